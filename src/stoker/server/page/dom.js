// Small helpers for elements. Text is always set as text.

export const $ = (id) => document.getElementById(id);

export function element(kind, name, text) {
  const made = document.createElement(kind);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function drawing(kind, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

export function icon(name) {
  const made = drawing("svg", { "aria-hidden": "true" });
  made.append(drawing("use", { href: `#i-${name}` }));
  return made;
}

export function button(label, name, action, symbol) {
  const made = element("button", name);
  made.type = "button";
  if (symbol) {
    made.append(icon(symbol));
    made.setAttribute("aria-label", label);
    made.title = label;
  } else {
    made.textContent = label;
  }
  made.addEventListener("click", action);
  return made;
}

// navigator.clipboard exists only on https and on this machine; a server in the next room is neither.
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = element("textarea", "unseen");
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

export function copyButton(label, text) {
  const made = button(label, "bare small", async () => {
    try {
      await copy(text());
    } catch {
      tell("The browser did not let the page copy.");
      return;
    }
    made.querySelector("use").setAttribute("href", "#i-done");
    tell("Copied.");
    setTimeout(() => made.querySelector("use").setAttribute("href", "#i-copy"), 1500);
  }, "copy");
  return made;
}

// For screen readers: what happened elsewhere on the page.
export function tell(words) {
  $("told").textContent = words;
}

let fading = 0;
export function toast(words, label, action) {
  clearTimeout(fading);
  const node = $("toast");
  node.replaceChildren(element("span", "", words));
  if (label) {
    node.append(button(label, "", () => {
      node.hidden = true;
      action();
    }));
  }
  node.hidden = false;
  fading = setTimeout(() => { node.hidden = true; }, 8000);
}
