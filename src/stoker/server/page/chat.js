// One answer of the server: the request, its stream, and what the stream adds to a message.

export const fresh = () => ({
  role: "assistant", content: "", reasoning: "", thought_s: 0, calls: [], finish: "", error: "", steps: [], pieces: [],
  tokens: 0, timed: 0, decode_s: 0, first_s: 0, verify: 0, drafted: 0, accepted: 0, prompt: 0, cached: 0, running: true,
});

// Messages as the server takes them. An answer that failed before its first word is left out.
export function sent(messages, system) {
  const found = system ? [{ role: "system", content: system }] : [];
  for (const message of messages) {
    if (message.role === "tool") {
      found.push({ role: "tool", tool_call_id: message.call, content: message.content });
    } else if (message.role === "user") {
      found.push({ role: "user", content: message.content });
    } else if (message.content || message.calls?.length || message.reasoning) {
      const calls = message.calls?.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text || "{}" } }));
      found.push({
        role: "assistant",
        content: message.content,
        ...(message.reasoning ? { reasoning_content: message.reasoning } : {}),
        ...(calls?.length ? { tool_calls: calls } : {}),
      });
    }
  }
  return found;
}

// Streams the answer into `message` and calls `changed` after each chunk. What goes wrong ends as words in the message.
export async function answer(body, message, signal, changed) {
  const began = performance.now();
  Object.assign(message, { running: true, error: "", finish: "" });
  const before = { timed: message.timed, decode_s: message.decode_s, tokens: message.tokens, verify: message.verify };
  const live = { first: 0, since: before };
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      signal,
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true }, return_drafts: true }),
    });
    if (!response.ok) throw new Refused(await reason(response));
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Refused(chunk.error.message);
      for (const choice of chunk.choices) take(message, choice, began, live);
      if (chunk.usage) total(message, chunk, before);
      changed();
    }
    if (!message.finish) throw new Refused("The connection ended before the answer was complete.");
  } catch (error) {
    if (error.name === "AbortError") message.finish = "stopped";
    else if (error instanceof Refused) message.error = error.message;
    else message.error = `The server at ${location.host} cannot be reached (${error.message}). Is it still running?`;
  }
  message.running = false;
  changed();
}

class Refused extends Error {}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status} ${response.statusText} and gave no reason.`;
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const found = held.split("\n\n");
    held = found.pop();
    for (const event of found) {
      const data = event.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// What one chunk adds.
function take(message, choice, began, live) {
  const now = performance.now();
  const { delta } = choice;
  if (delta.reasoning_content) {
    message.reasoning += delta.reasoning_content;
    message.thought_s = (now - began) / 1000;
  }
  message.content += delta.content ?? "";
  for (const call of delta.tool_calls ?? []) {
    message.calls[call.index] ??= { id: call.id, name: call.function.name, arguments: "" };
    message.calls[call.index].arguments += call.function.arguments ?? "";
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
  if (choice.drafts) step(message, choice.drafts, now, began, live);
}

function step(message, { tokens, accepted, rejected, forced }, now, began, live) {
  message.tokens += tokens.length;
  message.steps.push([tokens.length, accepted, rejected.length, forced ? 1 : 0]);
  tokens.forEach((text, place) => message.pieces.push([text, place < accepted ? "right" : "own"]));
  if (rejected.length) message.pieces.push([rejected.join(""), "wrong"]);
  if (!live.first) {
    live.first = now;
    message.first_s = (now - began) / 1000;
  } else {
    message.verify += 1;
    message.timed += tokens.length;
    message.decode_s = live.since.decode_s + (now - live.first) / 1000;
  }
}

// The server's own count and times, once the answer has ended.
function total(message, { usage, metrics }, before) {
  message.tokens = before.tokens + usage.completion_tokens;
  message.timed = before.timed + Math.max(0, usage.completion_tokens - 1);
  message.decode_s = before.decode_s + metrics.decode_s;
  message.verify = before.verify + metrics.steps; // a chunk may carry several steps
  message.prompt = usage.prompt_tokens;
  message.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const drafts = metrics.speculative_decoding;
  message.drafted += drafts?.num_draft_tokens ?? 0;
  message.accepted += drafts?.num_accepted_draft_tokens ?? 0;
}
