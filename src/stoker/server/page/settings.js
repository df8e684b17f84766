// What holds for the next answers: the dialog, what is kept of it, and what a request gets from it.

import { $ } from "./dom.js";
import { forgetSettings, keepSettings, settings as kept } from "./store.js";

const EMPTY = { system: "", temperature: "", top_p: "", top_k: "", max_tokens: "", seed: "", thinking: "", tools: "", steps: true, tokens: false };
// Of the demonstration model: it was made for short answers without chance.
const DEMO = { ...EMPTY, temperature: "0", max_tokens: "512", thinking: "off" };
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
let defaults = EMPTY;
let values = { ...EMPTY, ...kept() };
let changed = () => {};

export const current = () => values;

export function begin(demo, onChange) {
  defaults = demo ? DEMO : EMPTY;
  changed = onChange;
  set({ ...defaults, ...kept() });
}

function set(found) {
  values = found;
  for (const [name, value] of Object.entries(values)) {
    const field = $("settings-form").elements[name];
    if (!field) continue;
    if (field.type === "checkbox") field.checked = Boolean(value);
    else field.value = value;
  }
  told();
  changed();
}

function read() {
  for (const name of Object.keys(EMPTY)) {
    const field = $("settings-form").elements[name];
    values[name] = field.type === "checkbox" ? field.checked : field.value;
  }
  keepSettings(values);
  told();
  changed();
}

// Below the message field: what is not as the model would have it.
function told() {
  const set = [];
  if (values.system.trim()) set.push("system prompt");
  if (values.temperature !== "") set.push(`temperature ${values.temperature}`);
  if (values.max_tokens !== "") set.push(`at most ${values.max_tokens} tokens`);
  if (values.thinking) set.push(`thinking ${values.thinking}`);
  if (values.tools.trim()) set.push("tools");
  $("next").textContent = set.join(" · ");
}

// The list of tools, or undefined; a sentence about what is wrong with the text is thrown.
export function tools() {
  const text = values.tools.trim();
  if (!text) return undefined;
  let found;
  try {
    found = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools are not JSON: ${error.message}.`);
  }
  if (!Array.isArray(found)) throw new Error("The tools are not a list: put the functions into [ and ].");
  return found.length ? found : undefined;
}

export function request() {
  const found = {};
  for (const name of NUMBERS) {
    if (values[name] !== "") found[name === "max_tokens" ? "max_completion_tokens" : name] = Number(values[name]);
  }
  if (values.thinking) found.chat_template_kwargs = { enable_thinking: values.thinking === "on" };
  return found;
}

export function open() {
  check();
  $("settings").showModal();
}

function check() {
  const problem = $("tools-problem");
  problem.hidden = true;
  try {
    tools();
  } catch (error) {
    problem.textContent = error.message;
    problem.hidden = false;
  }
  return problem.hidden;
}

$("settings-form").addEventListener("input", () => {
  read();
  check();
});
$("settings-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (check()) $("settings").close();
  else $("settings-form").elements.tools.focus();
});
$("close-settings").addEventListener("click", () => $("settings").close());
$("settings").addEventListener("click", (event) => { if (event.target === $("settings")) $("settings").close(); });
$("reset-settings").addEventListener("click", () => {
  forgetSettings();
  set({ ...defaults });
  check();
});
