// Conversations and settings in this browser (localStorage). Where it keeps nothing, they live as long as the page.

const LIST = "stoker.conversations";
const ONE = "stoker.conversation.";
const SETTINGS = "stoker.settings";
const memory = new Map();
let listener = () => {};

export const onProblem = (tell) => { listener = tell; };

function read(key) {
  let text = memory.get(key);
  try {
    text = localStorage.getItem(key) ?? text;
  } catch { /* not allowed here */ }
  try {
    return text ? JSON.parse(text) : undefined;
  } catch {
    return undefined; // somebody else wrote there
  }
}

function write(key, value) {
  const text = JSON.stringify(value);
  try {
    localStorage.setItem(key, text);
    memory.delete(key);
  } catch (error) {
    memory.set(key, text);
    if (error.name === "QuotaExceededError") {
      listener("This browser's storage for the page is full. Delete conversations; until then, new ones are lost with the page.");
    }
  }
}

function remove(key) {
  memory.delete(key);
  try {
    localStorage.removeItem(key);
  } catch { /* not allowed here */ }
}

// The newest first: {id, title, at}.
export function conversations() {
  const found = read(LIST);
  return Array.isArray(found) ? found.filter((entry) => typeof entry?.id === "string").sort((a, b) => b.at - a.at) : [];
}

export function load(id) {
  const found = read(ONE + id);
  if (!Array.isArray(found?.messages)) return undefined;
  const messages = found.messages.filter((message) => ["user", "assistant", "tool"].includes(message?.role));
  return { ...found, id, title: String(found.title ?? ""), messages: messages.map(sound) };
}

function sound(message) {
  const { pieces, ...kept } = message;
  return { ...kept, content: String(kept.content ?? ""), running: false };
}

export function save(conversation) {
  const { id, title, at } = conversation;
  const messages = conversation.messages.map(({ pieces, running, ...kept }) => kept); // tokens' texts are not kept
  write(ONE + id, { ...conversation, messages });
  write(LIST, [{ id, title, at }, ...conversations().filter((entry) => entry.id !== id)]);
}

export function drop(id) {
  remove(ONE + id);
  write(LIST, conversations().filter((entry) => entry.id !== id));
}

export const settings = () => read(SETTINGS);
export const keepSettings = (values) => write(SETTINGS, values);
export const forgetSettings = () => remove(SETTINGS);
export const isList = (key) => key === LIST;
