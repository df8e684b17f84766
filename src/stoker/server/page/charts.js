// The live numbers: charts of the last two minutes and gauges, from GET /state once a second.

import { $, drawing, element } from "./dom.js";

const SECONDS = 120;
const [WIDTH, HEIGHT] = [240, 44];
const GIB = 2 ** 30;
const number = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));

class Chart {
  constructor(name, unit) {
    Object.assign(this, { name, unit, values: [] });
    this.node = element("figure", "chart");
    const head = element("figcaption");
    this.output = element("b", "", "–");
    this.unitNode = element("small", "", unit);
    head.append(element("span", "", name), this.output, this.unitNode);
    this.picture = drawing("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${name}: nothing yet` });
    this.area = drawing("path", { class: "area" });
    this.line = drawing("path", { class: "line" });
    this.picture.append(this.area, this.line);
    this.node.append(head, this.picture);
    $("charts").append(this.node);
  }

  // null where there is nothing to say of that second; `least` is the top of an empty chart.
  add(value, least, shown) {
    this.values.push(value);
    if (this.values.length > SECONDS) this.values.shift();
    const known = this.values.filter((each) => each !== null);
    const top = Math.max(least, ...known);
    const place = (index) => WIDTH - (this.values.length - 1 - index) * (WIDTH / (SECONDS - 1));
    let line = "";
    let area = "";
    let from = null;
    this.values.forEach((each, index) => {
      if (each === null) {
        if (from !== null) area += `L${place(index - 1).toFixed(1)} ${HEIGHT}Z`;
        from = null;
        return;
      }
      const at = `${place(index).toFixed(1)} ${(HEIGHT - 1 - (HEIGHT - 4) * (each / top)).toFixed(1)}`;
      area += from === null ? `M${place(index).toFixed(1)} ${HEIGHT}L${at}` : `L${at}`;
      line += `${from === null ? "M" : "L"}${at}`;
      from = index;
    });
    if (from !== null) area += `L${WIDTH} ${HEIGHT}Z`;
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
    this.output.textContent = shown.value;
    this.unitNode.textContent = shown.unit ?? this.unit;
    const most = known.length ? `, at most ${number(Math.max(...known))}` : "";
    this.picture.setAttribute("aria-label", `${this.name}, the last two minutes: now ${shown.value} ${shown.unit ?? this.unit}${most}`);
  }
}

class Gauge {
  constructor(name) {
    this.node = element("div", "gauge");
    const label = element("label", "", name);
    this.text = element("span", "", "–");
    this.meter = element("meter");
    this.meter.id = `gauge-${name.replace(/\W+/g, "-").toLowerCase()}`;
    label.htmlFor = this.meter.id;
    label.append(this.text);
    this.node.append(label, this.meter);
    $("gauges").append(this.node);
  }

  show(value, most, text) {
    this.meter.max = most || 1;
    this.meter.value = value;
    this.text.textContent = text;
  }
}

const charts = {
  speed: new Chart("Speed", "tokens/s"),
  accepted: new Chart("Per step", "tokens"),
  queue: new Chart("Requests", "running"),
  memory: new Chart("Memory used", "GiB"),
};
const gauges = { context: new Gauge("Context, tokens"), pages: new Gauge("KV pages held") };
let before = null;
let lastAccepted = null;

export function showContext(used, context) {
  gauges.context.show(used, context, context ? `${used.toLocaleString("en")} of ${context.toLocaleString("en")}` : "–");
}

export function showState(state) {
  const { counts, at, engine, memory } = state;
  if (before && at > before.at) {
    const since = (name) => Math.max(0, counts[name] - before.counts[name]); // a restarted server counts from 0
    const speed = since("tokens") / (at - before.at);
    charts.speed.add(speed, 10, { value: speed ? number(speed) : "0" });
    const steps = since("steps");
    const accepted = steps ? since("step_tokens") / steps : null;
    lastAccepted = accepted ?? lastAccepted;
    charts.accepted.add(accepted, 2, { value: lastAccepted === null ? "–" : number(lastAccepted) });
  }
  before = { at, counts };
  if (engine) {
    const { running, waiting, slots, pages, pages_held: held } = engine;
    charts.queue.add(running + waiting, Math.max(1, slots), { value: String(running), unit: waiting ? `running, ${waiting} waiting` : "running" });
    gauges.pages.show(held, pages, `${held.toLocaleString("en")} of ${pages.toLocaleString("en")}`);
  }
  if (memory) {
    const [used, all] = [(memory.total - memory.available) / GIB, memory.total / GIB];
    charts.memory.add(used, all, { value: used.toFixed(1), unit: `of ${all.toFixed(0)} GiB` });
  }
}
