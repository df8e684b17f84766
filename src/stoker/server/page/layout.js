// What is beside the conversation: on wide screens in place, on narrow ones a drawer that comes and goes.

import { $ } from "./dom.js";

const narrow = { list: matchMedia("(max-width: 50rem)"), numbers: matchMedia("(max-width: 75rem)") };
const openers = { list: $("open-list"), numbers: $("open-numbers") };
const wanted = { list: true, numbers: true }; // where there is room for them
const drawn = { list: false, numbers: false }; // as drawers

export function draw() {
  for (const name of ["list", "numbers"]) {
    const shown = narrow[name].matches ? drawn[name] : wanted[name];
    $(name).hidden = !shown;
    $(name).classList.toggle("drawer", narrow[name].matches);
    openers[name].setAttribute("aria-expanded", String(shown));
  }
  document.body.classList.toggle("no-numbers", narrow.numbers.matches || !wanted.numbers);
  $("scrim").hidden = !["list", "numbers"].some((name) => narrow[name].matches && drawn[name]);
}

export function toggle(name, shown) {
  const where = narrow[name].matches ? drawn : wanted;
  where[name] = shown ?? !where[name];
  draw();
  if (!narrow[name].matches) return;
  if (where[name]) $(name).querySelector("button")?.focus();
  else openers[name].focus();
}

// Whether there was a drawer to close.
export function closeDrawers() {
  const open = ["list", "numbers"].filter((name) => narrow[name].matches && drawn[name]);
  for (const name of open) toggle(name, false);
  return open.length > 0;
}

for (const [name, opener] of Object.entries(openers)) {
  opener.addEventListener("click", () => toggle(name));
  narrow[name].addEventListener("change", draw);
}
for (const closer of document.querySelectorAll("[data-close]")) {
  closer.addEventListener("click", () => toggle(closer.dataset.close, false));
}
$("scrim").addEventListener("click", closeDrawers);
draw();
