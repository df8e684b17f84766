// The chat page: one conversation, streamed, with what each step of the model drafted. No library, nothing from elsewhere.
"use strict";

const $ = (id) => document.getElementById(id);
const EXAMPLES = [
  "Write a little story about an owl.",
  "Read this note and answer with JSON only. Keys: name, city, phone.\n\nAnna Kovács called from Győr, 06 30 555 0199.",
  "Who wrote Northanger Abbey?",
];
let conversation = [];
let running = null; // an AbortController while an answer is being written
let context = 0;

function element(kind, name, text) {
  const made = document.createElement(kind);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

function add(node) {
  $("empty")?.remove();
  $("messages").append(node);
  node.scrollIntoView({ block: "end" });
  return node;
}

// -- one answer as it comes

class Answer {
  constructor() {
    this.node = add(element("div", "answer"));
    this.thought = null;
    this.said = this.node.appendChild(element("div", "said"));
    this.steps = this.node.appendChild(element("div", "steps"));
    this.cost = this.node.appendChild(element("div", "cost"));
    this.text = "";
    this.tokens = 0;
    this.count = 0; // steps, without the one that the prompt ends with
    this.began = performance.now();
    this.first = null;
  }

  take(choice) {
    const delta = choice.delta;
    if (delta.reasoning_content) {
      if (!this.thought) {
        this.thought = element("div", "thought");
        this.node.prepend(this.thought);
      }
      this.thought.textContent += delta.reasoning_content;
    }
    if (delta.content) this.text += delta.content;
    if (choice.drafts) this.step(choice.drafts);
    if (!$("tokens").checked && delta.content) this.said.append(delta.content);
    this.node.scrollIntoView({ block: "end" });
  }

  step(drafts) {
    const now = performance.now();
    if (this.first === null) {
      this.first = now;
      $("first").value = ((now - this.began) / 1000).toFixed(2);
    } else {
      this.count += 1;
    }
    this.tokens += drafts.tokens.length;
    const column = this.steps.appendChild(element("div", "step"));
    drafts.tokens.forEach((token, place) => column.append(element("i", place < drafts.accepted ? "right" : "own")));
    drafts.rejected.forEach(() => column.append(element("i", "wrong")));
    column.title = `${drafts.forced ? "forced" : "made"}: ${drafts.tokens.join("")}` +
      (drafts.rejected.length ? `\nrejected: ${drafts.rejected.join("")}` : "");
    if ($("tokens").checked) {
      drafts.tokens.forEach((token, place) =>
        this.said.append(element("span", place < drafts.accepted ? "right" : "own", token)));
      if (drafts.rejected.length) this.said.append(element("span", "wrong", drafts.rejected.join("")));
    }
    const seconds = (now - this.first) / 1000;
    if (this.count && seconds > 0) {
      $("speed").value = ((this.tokens - 1) / seconds).toFixed(0);
      $("accepted").value = ((this.tokens - 1) / this.count).toFixed(2);
    }
  }

  end(usage, metrics) {
    if (!usage) return;
    const spec = metrics?.speculative_decoding;
    const drafted = spec?.num_draft_tokens
      ? ` · ${spec.num_accepted_draft_tokens} of ${spec.num_draft_tokens} drafts accepted` : "";
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    this.cost.textContent = `${usage.completion_tokens} tokens in ${metrics.steps} steps${drafted} · ` +
      `${usage.prompt_tokens} in (${cached} cached)`;
    this.node.scrollIntoView({ block: "end" });
    show("context", usage.total_tokens, context, `${usage.total_tokens.toLocaleString()} / ${context.toLocaleString()}`);
  }

  fail(message) {
    this.node.append(element("div", "error", message));
  }
}

async function ask(text) {
  add(element("div", "user said", text));
  conversation.push({ role: "user", content: text });
  const answer = new Answer();
  running = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      signal: running.signal,
      body: JSON.stringify({
        messages: conversation,
        stream: true,
        stream_options: { include_usage: true },
        return_drafts: true,
        temperature: Number($("temperature").value),
        max_completion_tokens: Number($("most").value),
        chat_template_kwargs: { enable_thinking: $("think").checked },
      }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const message of messages(response.body)) {
      if (message.error) throw new Error(message.error.message);
      for (const choice of message.choices) answer.take(choice);
      if (message.usage) answer.end(message.usage, message.metrics);
    }
  } catch (error) {
    answer.fail(error.name === "AbortError" ? "stopped" : error.message);
  }
  conversation.push({ role: "assistant", content: answer.text });
  running = null;
  $("send").hidden = false;
  $("stop").hidden = true;
}

async function* messages(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// -- gauges

function show(id, value, most, text) {
  $(id).max = most || 1;
  $(id).value = value;
  $(`${id}-text`).textContent = text;
}

const gib = (bytes) => `${(bytes / 2 ** 30).toFixed(1)} GiB`;

async function look() {
  try {
    const state = await (await fetch("/state")).json();
    context = state.context;
    $("model").textContent = `${state.model} · draft ${state.draft}`;
    $("state").textContent = state.ready ? "ready" : (state.detail || state.phase) + (state.percent == null ? "" : ` (${state.percent} %)`);
    $("state").className = `state ${state.ready ? "ready" : ""}`;
    if ($("context-text").textContent === "–") show("context", 0, context, `0 / ${context.toLocaleString()}`);
    if (state.engine) {
      const { pages_held, pages, running, waiting, slots } = state.engine;
      show("pages", pages_held, pages, `${pages_held} / ${pages}`);
      show("requests", running, slots, waiting ? `${running} + ${waiting} waiting` : `${running} / ${slots}`);
    }
    if (state.memory) show("memory", state.memory.available, state.memory.total, gib(state.memory.available));
  } catch {
    $("state").textContent = "no connection";
    $("state").className = "state down";
  }
  setTimeout(look, 1000);
}

// -- what the user does

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  ask(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("reset").addEventListener("click", () => {
  running?.abort();
  conversation = [];
  $("messages").replaceChildren();
  show("context", 0, context, `0 / ${context.toLocaleString()}`);
  $("text").focus();
});
for (const text of EXAMPLES) {
  const button = element("button", "", text.split("\n")[0]);
  button.type = "button";
  button.addEventListener("click", () => { if (!running) ask(text); });
  $("examples").append(button);
}
$("settings").open = matchMedia("(min-width: 50rem)").matches;
look();
