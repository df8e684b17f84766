// How messages look: what the user said, and an answer with its thought, text, tool calls, steps and notices.

import { button, copyButton, element, icon } from "./dom.js";
import { indented, looksLikeJson } from "./json.js";
import { show } from "./markdown.js";

const COLUMNS = 500; // steps drawn; thousands would make the page slow
const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

export function userView(message, act) {
  const node = element("article", "user");
  node.setAttribute("aria-label", "You");
  const said = element("div", "said", message.content);
  const tools = element("div", "acts");
  const edit = button("Edit", "bare small", () => begin(), "edit");
  tools.append(edit, copyButton("Copy", () => message.content));
  node.append(said, tools);

  function begin() {
    const form = element("form", "editing");
    const field = element("textarea");
    field.value = message.content;
    field.rows = Math.min(12, message.content.split("\n").length + 1);
    field.setAttribute("aria-label", "Edit the message");
    const acts = element("div", "row");
    const send = element("button", "strong", "Send again");
    acts.append(button("Cancel", "", end), send);
    form.append(field, acts);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) act.edit(message, field.value.trim());
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        end();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    node.replaceChildren(form);
    field.focus();
  }
  function end() {
    node.replaceChildren(said, tools);
    edit.focus();
  }
  return { node, edit: begin };
}

export function toolView(message) {
  const node = element("article", "result");
  node.setAttribute("aria-label", "Result of a tool");
  node.append(element("div", "call-head", message.name ? `Result of ${message.name}` : "Result"), element("pre", "", message.content));
  return { node };
}

export class AnswerView {
  // `act` has: again(), resume(), results(texts); `options()` gives {steps, tokens, context, limit, results}.
  constructor(message, act, options) {
    Object.assign(this, { message, act, options, frame: 0, drawn: 0, pieces: 0 });
    this.node = element("article", "answer");
    this.node.setAttribute("aria-label", "Answer");
    this.thought = element("details", "thought");
    this.thoughtHead = this.thought.appendChild(element("summary"));
    this.thoughtText = this.thought.appendChild(element("div", "thought-text"));
    this.said = element("div", "said markdown");
    this.calls = element("div", "calls");
    this.notices = element("div", "notices");
    this.steps = element("div", "steps");
    this.steps.setAttribute("role", "img");
    this.foot = element("div", "acts");
    this.cost = element("p", "cost");
    this.again = button("Answer again (Alt+R)", "bare small again", () => act.again(), "again");
    this.foot.append(copyButton("Copy the answer", () => message.content || message.calls.map((call) => `${call.name}(${call.arguments})`).join("\n")), this.again, this.cost);
    this.node.append(this.thought, this.said, this.calls, this.notices, this.steps, this.foot);
    this.draw();
  }

  // Soon, at most once a frame.
  changed() {
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    const { message } = this;
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.node.classList.toggle("running", message.running);
    this.node.setAttribute("aria-busy", String(message.running));
    this.drawThought(message);
    this.drawText(message);
    this.drawCalls(message);
    this.drawSteps(message);
    this.drawNotices(message);
    this.again.hidden = message.running;
    this.cost.textContent = costOf(message);
  }

  drawThought({ reasoning, content, calls, running, thought_s: seconds }) {
    this.thought.hidden = !reasoning;
    if (!reasoning) return;
    const open = running && !content && !calls.length;
    this.thoughtHead.textContent = open ? "Thinking …" : seconds ? `Thought for ${seconds.toFixed(1)} s` : "Thought";
    this.thoughtText.textContent = reasoning;
  }

  drawText({ content, pieces, running }) {
    if (this.options().tokens && pieces?.length) {
      if (!this.pieces) this.said.replaceChildren();
      for (const [text, kind] of pieces.slice(this.pieces)) this.said.append(element("span", `piece ${kind}`, text));
      this.pieces = pieces.length;
      this.said.classList.add("plain");
    } else {
      show(this.said, shownAs(content, running));
    }
    this.said.hidden = !this.said.hasChildNodes();
  }

  drawCalls({ calls, running, finish }) {
    const asking = this.last && !running && calls.length > 0 && finish === "tool_calls";
    const state = JSON.stringify([calls, asking]);
    if (state === this.callState) return;
    this.callState = state;
    this.calls.replaceChildren(...calls.filter(Boolean).map(callView));
    if (asking) this.calls.append(this.asked(calls));
  }

  // The page runs no tools: who reads along says what they would have answered.
  asked(calls) {
    const form = element("form", "editing results");
    const known = this.options().results ?? {};
    const fields = calls.map((call) => {
      const label = element("label", "tall", `Result of ${call.name}`);
      const field = label.appendChild(element("textarea"));
      field.rows = 2;
      field.value = known[call.name] ?? "";
      form.append(label);
      return field;
    });
    const row = element("div", "row");
    row.append(element("span", "soft", "The page runs no tools. Say what they answer."), element("button", "strong", "Send result"));
    form.append(row);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.act.results(calls.map((call, place) => ({ role: "tool", call: call.id, name: call.name, content: fields[place].value })));
    });
    return form;
  }

  drawSteps({ steps }) {
    this.steps.hidden = !this.options().steps || !steps.length;
    if (this.steps.hidden) return;
    for (const [made, accepted, rejected, forced] of steps.slice(this.drawn, COLUMNS)) {
      const column = this.steps.appendChild(element("div", "step"));
      for (let place = 0; place < made; place += 1) column.append(element("i", place < accepted ? "right" : "own"));
      for (let place = 0; place < rejected; place += 1) column.append(element("i", "wrong"));
      column.title = forced ? `${count(accepted, "token")} that the grammar left no choice about`
        : `${count(made, "token")}: ${count(accepted, "draft")} accepted, ${rejected} rejected`;
    }
    this.drawn = Math.min(steps.length, COLUMNS);
    const sums = [0, 1, 2].map((place) => steps.reduce((sum, step) => sum + step[place], 0));
    const more = steps.length > COLUMNS ? `; the first ${COLUMNS} are drawn` : "";
    this.steps.setAttribute("aria-label", `${count(steps.length, "step")} made ${count(sums[0], "token")}: ` +
      `${count(sums[1], "draft")} accepted, ${sums[2]} rejected${more}`);
  }

  drawNotices({ running, error, finish, content, reasoning, calls }) {
    const state = running ? "" : [error, finish].join("|");
    if (state === this.noticeState) return;
    this.noticeState = state;
    this.notices.replaceChildren();
    if (running) return;
    if (error) this.notice(error, "bad", "Try again", () => this.act.again());
    else if (finish === "length") this.notice(this.whyCut(), "cut", this.full() ? "" : "Continue", () => this.act.resume());
    else if (finish === "stopped") this.notice("Stopped by you.", "cut", content || reasoning ? "Continue" : "", () => this.act.resume());
    else if (!content && !calls.length) this.notice("The model ended its answer without a word.", "cut");
  }

  full() {
    return this.message.prompt + this.message.tokens >= this.options().context;
  }

  whyCut() {
    if (this.full()) {
      return `Cut: the context of ${count(this.options().context, "token")} is full. Begin a new chat, or edit an earlier message.`;
    }
    return `Cut after ${count(this.message.tokens, "token")}: that is the most an answer may have (Settings).`;
  }

  notice(words, kind, label, action) {
    const node = element("div", `notice ${kind}`);
    if (kind === "bad") node.setAttribute("role", "alert");
    node.append(element("span", "", words));
    if (label) node.append(button(label, "", action));
    this.notices.append(node);
  }
}

// An answer that is JSON and nothing else is shown as such; what is copied is the answer as it came.
function shownAs(content, running) {
  if (!looksLikeJson(content)) return content;
  try {
    if (!running) JSON.parse(content);
  } catch {
    return content;
  }
  return `\`\`\`json\n${indented(content)}\n\`\`\``;
}

function callView({ name, arguments: text }) {
  const node = element("section", "call");
  node.setAttribute("aria-label", `Call of ${name}`);
  const head = element("div", "call-head");
  head.append(icon("tool"), element("b", "", name));
  node.append(head);
  let found;
  try {
    found = JSON.parse(text || "{}");
  } catch { /* not whole yet, or not JSON */ }
  if (found === null || typeof found !== "object" || Array.isArray(found)) {
    node.append(element("pre", "", text));
    return node;
  }
  const list = element("dl");
  for (const [key, value] of Object.entries(found)) {
    const row = element("div");
    row.append(element("dt", "", key), element("dd", "", readable(value)));
    list.append(row);
  }
  if (list.children.length) node.append(list);
  return node;
}

function readable(value) {
  if (typeof value === "string") return value;
  const plain = Array.isArray(value) && value.length && value.every((each) => typeof each !== "object");
  return plain ? value.join(", ") : JSON.stringify(value);
}

function costOf({ running, tokens, timed, verify, decode_s: seconds, first_s: first, drafted, accepted, prompt, cached }) {
  if (!tokens) return running ? "Reading …" : "";
  const parts = [count(tokens, "token")];
  if (timed && seconds) parts.push(`${(timed / seconds).toFixed(0)} tokens/s`);
  if (verify) parts.push(`${(timed / verify).toFixed(2)} per step`);
  if (!running && drafted) parts.push(`${accepted} of ${drafted} drafts accepted`);
  if (first) parts.push(`first after ${first.toFixed(2)} s`);
  if (!running && prompt) parts.push(`${prompt.toLocaleString("en")} in${cached ? `, ${cached.toLocaleString("en")} cached` : ""}`);
  return parts.join(" · ");
}
