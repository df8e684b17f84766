// JSON with line breaks. Only white space between values changes, and a text that is still growing is fine.

export const looksLikeJson = (text) => /^\s*[[{]\s*(["{[\]}]|-?\d|$)/.test(text);

export function indented(text) {
  let depth = 0;
  let out = "";
  for (const [part] of text.trim().matchAll(/"(?:[^"\\]|\\.)*"?|[[{]\s*[\]}]|[[\]{},:]|[^\s[\]{},:"]+/g)) {
    if (/^[[{]$/.test(part)) out += part + line((depth += 1));
    else if (/^[\]}]$/.test(part)) out += line((depth -= 1)) + part;
    else if (part === ",") out += part + line(depth);
    else out += part === ":" ? ": " : part;
  }
  return out;
}

const line = (depth) => `\n${"  ".repeat(Math.max(0, depth))}`;
