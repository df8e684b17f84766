// The list of conversations: open, rename, delete.

import { $, button, element, toast } from "./dom.js";
import * as store from "./store.js";

const DAY = 86_400_000;

// `act` has: open(id), rename(id, title), deleted(id), restored(conversation).
export function show(current, act) {
  const found = store.conversations();
  let group = "";
  $("conversations").replaceChildren(...found.flatMap((entry) => {
    const named = age(entry.at);
    const head = named === group ? [] : [element("li", "group", named)];
    group = named;
    return [...head, row(entry, entry.id === current, act)];
  }));
}

function age(at) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (at >= today) return "Today";
  if (at >= today - DAY) return "Yesterday";
  return at >= today - 7 * DAY ? "Last week" : "Earlier";
}

function row({ id, title }, current, act) {
  const node = element("li", current ? "current" : "");
  const open = button(title || "Untitled", "bare title", () => act.open(id));
  open.title = title;
  if (current) open.setAttribute("aria-current", "true");
  const rename = button(`Rename “${title}”`, "bare small", () => node.replaceChildren(field(id, title, act)), "edit");
  const remove = button(`Delete “${title}”`, "bare small", () => {
    const gone = store.load(id);
    store.drop(id);
    act.deleted(id);
    toast("Conversation deleted.", "Undo", () => {
      if (!gone) return;
      store.save(gone);
      act.restored(gone);
    });
  }, "delete");
  node.append(open, rename, remove);
  return node;
}

function field(id, title, act) {
  const form = element("form");
  const input = element("input");
  input.value = title;
  input.setAttribute("aria-label", "Name of the conversation");
  form.append(input);
  let done = false;
  const end = (words) => {
    if (done) return;
    done = true;
    act.rename(id, words.trim() || title);
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    end(input.value);
  });
  input.addEventListener("blur", () => end(input.value));
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    end(title);
  });
  setTimeout(() => input.select());
  return form;
}
