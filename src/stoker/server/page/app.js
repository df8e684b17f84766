// The page: the conversation that is shown, what is done with it, and the keyboard.

import { AnswerView, toolView, userView } from "./answer.js";
import { showContext, showState } from "./charts.js";
import { answer, fresh, sent } from "./chat.js";
import { $, button, copy, element, tell, toast } from "./dom.js";
import { DEMO, GENERAL } from "./examples.js";
import { closeDrawers } from "./layout.js";
import * as list from "./list.js";
import * as settings from "./settings.js";
import * as store from "./store.js";

const NEAR = 80; // pixels from the end within which new text is followed
const runs = new Map(); // conversation id -> the AbortController of its answer
let server = { context: 0, demo: false };
let conversation = empty();
let views = [];
let following = true;

function empty() {
  return { id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), title: "", at: 0, messages: [] };
}

// -- the conversation

function view(message, place) {
  if (message.role === "user") return userView(message, { edit: (which, text) => edit(which, text) });
  if (message.role === "tool") return toolView(message);
  const act = { again: () => again(message), resume: () => resume(message), results: (found) => ask(found) };
  const made = new AnswerView(message, act, () => ({ ...settings.current(), context: server.context, results: conversation.results }));
  made.last = place === conversation.messages.length - 1;
  made.draw();
  return made;
}

function show() {
  views = conversation.messages.map(view);
  $("messages").replaceChildren(...views.map((each) => each.node));
  $("empty").hidden = views.length > 0;
  document.title = conversation.title ? `${conversation.title} – Stoker` : "Stoker";
  list.show(conversation.id, LIST_ACTS);
  following = true;
  progress();
}

// After anything that changed in the conversation on display.
function progress() {
  const running = runs.has(conversation.id);
  $("send").hidden = running;
  $("stop").hidden = !running;
  const last = conversation.messages.findLast((message) => message.role === "assistant");
  showContext(last ? (last.prompt || 0) + (last.tokens || 0) : 0, server.context);
  follow();
}

function follow() {
  if (following) $("scroll").scrollTop = $("scroll").scrollHeight;
}

function open(found) {
  conversation = found;
  show();
  closeDrawers();
  $("text").focus();
}

function keep(which) {
  store.save(which);
  list.show(conversation.id, LIST_ACTS);
}

const LIST_ACTS = {
  open: (id) => {
    if (id === conversation.id) closeDrawers();
    else open(live.get(id) ?? store.load(id) ?? empty());
  },
  rename: (id, title) => {
    const found = id === conversation.id ? conversation : live.get(id) ?? store.load(id);
    if (found) keep(Object.assign(found, { title }));
    if (found === conversation) document.title = `${title} – Stoker`;
  },
  deleted: (id) => {
    runs.get(id)?.abort();
    live.delete(id);
    if (id === conversation.id) open(empty());
    else list.show(conversation.id, LIST_ACTS);
  },
  restored: (found) => open(found),
};
const live = new Map(); // conversations that are being answered, shown or not

// -- answers

// Adds messages and asks for an answer to them.
function ask(messages) {
  if (runs.has(conversation.id)) return;
  conversation.messages.push(...messages, fresh());
  if (!conversation.title && messages.length) conversation.title = messages[0].content.split("\n")[0].slice(0, 80);
  show();
  run(conversation, conversation.messages.at(-1));
}

async function run(which, message, resumed = false) {
  let tools;
  try {
    tools = which.tools ?? settings.tools();
  } catch (error) {
    Object.assign(message, { running: false, error: error.message });
    return show();
  }
  const asked = resumed ? which.messages : which.messages.slice(0, which.messages.indexOf(message));
  const body = {
    ...settings.request(),
    messages: sent(asked, settings.current().system.trim()),
    ...(tools ? { tools } : {}),
    ...(resumed ? { continue_final_message: true } : {}),
  };
  const controller = new AbortController();
  runs.set(which.id, controller);
  live.set(which.id, which);
  which.at = Date.now();
  message.running = true;
  keep(which);
  progress();
  tell("Answering.");
  await answer(body, message, controller.signal, () => {
    const shown = viewOf(message);
    if (!shown) return;
    shown.changed();
    requestAnimationFrame(progress);
  });
  if (runs.get(which.id) !== controller) return; // stopped by an edit, which asked again
  runs.delete(which.id);
  live.delete(which.id);
  if (store.conversations().some((entry) => entry.id === which.id)) keep(which);
  viewOf(message)?.draw();
  progress();
  tell(message.error || `The answer is complete: ${message.tokens} tokens.`);
}

function viewOf(message) {
  return views[conversation.messages.indexOf(message)];
}

function cut(place) {
  conversation.messages.length = place;
}

function again(message) {
  if (runs.has(conversation.id)) return;
  cut(conversation.messages.indexOf(message));
  ask([]);
}

function edit(message, text) {
  runs.get(conversation.id)?.abort();
  runs.delete(conversation.id);
  const place = conversation.messages.indexOf(message);
  if (place === 0) conversation.title = "";
  cut(place);
  ask([{ role: "user", content: text }]);
}

function resume(message) {
  if (runs.has(conversation.id)) return;
  run(conversation, message, true);
}

const stop = () => runs.get(conversation.id)?.abort();
const lastOf = (role) => conversation.messages.findLast((message) => message.role === role);

// -- an empty conversation

function drawEmpty() {
  const head = element("h2", "", server.demo ? "Try what it was made for" : "What should it do?");
  const cards = element("div", "examples");
  for (const { title, about, prompt, tools, results } of server.demo ? DEMO : GENERAL) {
    const card = button("", "example", () => {
      if (tools) Object.assign(conversation, { tools, results });
      ask([{ role: "user", content: prompt }]);
    });
    card.append(element("b", "", title), element("span", "", about));
    cards.append(card);
  }
  const words = server.demo
    ? "A small model that comes with Stoker, to show that everything works. It reads invoices, calls tools and writes very short stories. It knows next to nothing else."
    : "";
  $("empty").replaceChildren(head, element("p", "soft", words), cards);
}

// -- the server

async function look() {
  if (!document.hidden) {
    try {
      const response = await fetch("/state");
      if (!response.ok) throw new Error(response.statusText);
      const state = await response.json();
      if (state.model !== server.model || state.demo !== server.demo || state.context !== server.context) first(state);
      const far = state.percent == null ? "" : ` (${state.percent} %)`;
      said(state.ready ? "ready" : (state.detail || state.phase) + far, state.ready ? "ready" : "");
      showState(state);
    } catch {
      said("no connection", "down");
    }
  }
  setTimeout(look, 1000);
}

function said(words, kind) {
  if ($("state").textContent === words) return; // screen readers would say it again
  $("state").textContent = words;
  $("state").className = `state ${kind}`;
}

function first(state) {
  server = state;
  $("model").textContent = state.model;
  $("about").textContent = state.about;
  $("drafting").textContent = state.draft;
  $("text").placeholder = `Message ${state.model}`;
  settings.begin(state.demo, () => show());
  drawEmpty();
  progress();
}

// -- what the user does

function grow() {
  const field = $("text");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight, window.innerHeight / 3)}px`;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || runs.has(conversation.id)) return;
  $("text").value = "";
  grow();
  ask([{ role: "user", content: text }]);
});
$("text").addEventListener("input", grow);
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  } else if (event.key === "ArrowUp" && !$("text").value && lastOf("user")) {
    event.preventDefault();
    viewOf(lastOf("user")).edit();
  }
});
$("stop").addEventListener("click", () => {
  stop();
  $("text").focus();
});
$("new").addEventListener("click", () => open(empty()));
$("open-settings").addEventListener("click", settings.open);
$("newest").addEventListener("click", () => {
  following = true;
  follow();
});
$("scroll").addEventListener("scroll", () => {
  const left = $("scroll").scrollHeight - $("scroll").scrollTop - $("scroll").clientHeight;
  following = left < NEAR;
  $("newest").hidden = following;
});
const ALT = {
  KeyN: () => open(empty()),
  KeyS: settings.open,
  KeyR: () => lastOf("assistant") && again(lastOf("assistant")),
  KeyC: () => lastOf("assistant") && copy(lastOf("assistant").content).then(() => toast("Answer copied.")),
};
document.addEventListener("keydown", (event) => {
  if ($("settings").open) return;
  if (event.altKey && !event.ctrlKey && !event.metaKey && ALT[event.code]) {
    event.preventDefault();
    ALT[event.code]();
  } else if (event.key === "Escape" && !closeDrawers()) {
    stop();
  } else if (event.key === "/" && !event.target.closest("input, textarea, select")) {
    event.preventDefault();
    $("text").focus();
  }
});
window.addEventListener("storage", (event) => { if (store.isList(event.key)) list.show(conversation.id, LIST_ACTS); });
store.onProblem((words) => toast(words));
show();
look();
