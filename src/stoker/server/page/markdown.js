// Markdown as nodes of the page. What a model writes is never trusted: HTML in it is shown as text, and what marked
// makes of the rest passes DOMPurify, which knows the few elements that may become part of the page.

import { Marked } from "./vendor/marked.js";
import { copyButton, element } from "./dom.js";

const ALLOWED = {
  ALLOWED_TAGS: [
    "p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "code", "em", "strong",
    "del", "a", "table", "thead", "tbody", "tr", "th", "td",
  ],
  ALLOWED_ATTR: ["href", "title", "start", "align", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escaped = (text) => text.replace(/[&<>"']/g, (sign) => ESCAPES[sign]);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text),
    // A picture from elsewhere would tell that elsewhere what was read here; a link does so only when followed.
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

// Shows `text` in `node`. Blocks that have not changed since the last call stay as they are, so that a text can grow
// without losing what is selected in it.
export function show(node, text) {
  const blocks = marked.lexer(text).filter((block) => block.type !== "space");
  const shown = node.blocks ?? [];
  let same = 0;
  while (same < blocks.length && same < shown.length && shown[same] === blocks[same].raw) same += 1;
  while (node.children.length > same) node.lastChild.remove();
  for (const block of blocks.slice(same)) node.append(made(block));
  node.blocks = blocks.map((block) => block.raw);
}

function made(block) {
  const found = element("div", "block");
  found.append(DOMPurify.sanitize(marked.parser([block]), ALLOWED));
  for (const link of found.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const table of found.querySelectorAll("table")) framed(table, "table-frame", "Table");
  for (const pre of found.querySelectorAll("pre")) code(pre);
  return found;
}

// Wide content scrolls by itself, with the keyboard too.
function framed(node, name, label) {
  const frame = element("div", name);
  frame.tabIndex = 0;
  frame.setAttribute("role", "region");
  frame.setAttribute("aria-label", label);
  node.replaceWith(frame);
  frame.append(node);
  return frame;
}

function code(pre) {
  const language = /language-([\w+#.-]+)/.exec(pre.querySelector("code")?.className ?? "")?.[1] ?? "";
  const box = element("div", "code");
  const head = element("div", "code-head");
  head.append(element("span", "", language || "code"), copyButton("Copy this code", () => pre.textContent.replace(/\n$/, "")));
  pre.tabIndex = 0;
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
  pre.replaceWith(box);
  box.append(head, pre);
}
