// What runs now: throughput, batch and queue of each model, and the blocks of each engine.

import { BlockGrid, legend } from "./blocks.js";
import { keepChildren, setText } from "./dom.js";

const PERIOD_MS = 1_000;
const SPAN_S = 60;
const GONE_MS = 6_000; // after which an engine that is no more is forgotten

export class Live {
  constructor(api, parent) {
    this.api = api;
    this.parent = parent;
    this.state = parent.querySelector("#state");
    this.silence = parent.querySelector("#silence");
    this.grids = new Map(); // name -> {grid, seen}
    this.ids = new Map(); // engine id -> {at, generated, rate, since}
    this.rates = []; // {at, rate}
    this.refused = null; // the key that was
    this.tiles = document.createElement("div");
    this.tiles.className = "tiles";
    this.engines = document.createElement("div");
    this.engines.className = "engines";
    this.state.append(this.tiles, this.engines, legend());
    const tick = async () => {
      if (!document.hidden) await this.refresh();
      setTimeout(tick, PERIOD_MS);
    };
    tick();
  }

  async refresh() {
    if (this.refused === this.api.key) return; // every refusal stands in the audit log
    try {
      this.show(await this.api.request("GET", "/page/state"));
      this.parent.hidden = false;
      this.parent.classList.remove("silent");
      setText(this.silence, "");
    } catch (error) {
      this.parent.classList.add("silent"); // no gateway answers, Redis is away, or a key is missing
      setText(this.silence, `No gateway answers; these figures are the last ones (${error.message}).`);
      if (error.status === 401) this.refused = this.api.key;
    }
  }

  show({ models }) {
    const now = performance.now(), engines = models.flatMap((model) => model.engines);
    for (const engine of engines) this.note(engine, now);
    for (const id of this.ids.keys()) if (!engines.some((engine) => engine.id === id)) this.ids.delete(id);
    const rate = [...this.ids.values()].reduce((sum, each) => sum + each.rate, 0);
    this.rates.push({ at: now, rate });
    this.rates = this.rates.filter((each) => now - each.at <= SPAN_S * 1_000);
    const several = models.length > 1;
    const shown = new Map([["Throughput", throughput(this.rates, now)], ...models.flatMap((model) => {
      const of = several ? ` of ${model.name}` : "";
      return [[`Batch${of}`, batch(model)], [`Queue${of}`, queue(model)]];
    })]);
    for (const [title, part] of keepChildren(this.tiles, [...shown.keys()], tile)) fill(part, shown.get(title));
    this.showEngines(engines, now);
  }

  // Keeps an engine's counter, and the tokens a second since its last map.
  note(engine, now) {
    const known = this.ids.get(engine.id) ?? { at: null, generated: 0, rate: 0, since: now, fresh: now };
    this.ids.set(engine.id, known);
    if (engine.blocks && engine.blocks.at_ms !== known.at) {
      const { at_ms, num_generated_tokens } = engine.blocks;
      if (known.at !== null) known.rate = (1_000 * (num_generated_tokens - known.generated)) / (at_ms - known.at);
      Object.assign(known, { at: at_ms, generated: num_generated_tokens, fresh: now });
    } else if (now - known.fresh > 2.5 * PERIOD_MS) known.rate = 0;
  }

  // One picture for each name: a process that was started again has another id, and takes the place of the old one.
  showEngines(engines, now) {
    const byName = new Map();
    const age = (engine) => (engine.blocks ? 1e12 : 0) + this.ids.get(engine.id).since;
    for (const engine of engines) {
      const name = nameOf(engine.id), other = byName.get(name);
      if (!other || age(engine) > age(other)) byName.set(name, engine);
    }
    for (const [name, engine] of byName) {
      const known = this.grids.get(name) ?? { grid: new BlockGrid(name) };
      known.seen = now;
      this.grids.set(name, known);
      known.grid.show(engine);
    }
    for (const [name, { grid, seen }] of this.grids) {
      if (!byName.has(name)) grid.show({ blocks: null });
      if (now - seen > GONE_MS) this.grids.delete(name);
    }
    const sorted = [...this.grids.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const shown = sorted.map((name) => this.grids.get(name).grid.element);
    const before = [...this.engines.children];
    if (shown.length !== before.length || shown.some((each, place) => before[place] !== each))
      this.engines.replaceChildren(...shown);
  }
}

// `engine-0-<pid of serve>:<nonce>`; a pod's name has no number of a process.
const nameOf = (id) => id.split(":")[0].replace(/^(engine-\d+)-\d+$/, "$1");

function tile(title) {
  const part = document.createElement("div");
  part.className = "tile";
  part.innerHTML = "<h3></h3><p><b></b> <small></small></p><div></div>";
  part.children[0].textContent = title;
  return part;
}

// Shows a figure with its unit, notes below it, and the picture of its past where it has one.
function fill(part, { value, unit, notes = [], points = "" }) {
  setText(part.querySelector("b"), value);
  setText(part.querySelector("small"), unit);
  const numbers = notes.map((_, number) => `${number}`);
  const lines = keepChildren(part.lastElementChild, numbers, () => document.createElement("p"));
  for (const number of numbers) setText(lines.get(number), notes[number]);
  if (!points) return;
  if (!part.querySelector("svg"))
    part.querySelector("p").insertAdjacentHTML("afterend", `<svg class="spark" viewBox="0 0 100 30"
      preserveAspectRatio="none" aria-hidden="true"><polygon/><polyline/></svg>`);
  part.querySelector("polyline").setAttribute("points", points);
  part.querySelector("polygon").setAttribute("points", `${points.split(",", 1)[0]},30 ${points} 100,30`);
}

function throughput(rates, now) {
  const last = rates.at(-1).rate, peak = Math.max(...rates.map((each) => each.rate)), most = Math.max(peak, 1);
  const x = (at) => (100 - (100 * (now - at)) / (SPAN_S * 1_000)).toFixed(2);
  const points = rates.map(({ at, rate }) => `${x(at)},${(29 - (28 * rate) / most).toFixed(2)}`).join(" ");
  return { value: Math.round(last), unit: `tokens/s, at most ${Math.round(peak)} in the last minute`, points };
}

function batch(model) {
  const sum = (field) => model.engines.reduce((total, engine) => total + (engine[field] ?? 0), 0);
  const sequences = model.engines.flatMap((engine) => engine.blocks?.sequences ?? []);
  const prefills = sequences.filter((seq) => seq.phase === "prefill").length, running = sum("running");
  const notes = [`${sequences.length - prefills} decode, ${prefills} prefill, ${sum("waiting")} wait in engines`];
  if (model.num_engines > model.engines.length)
    notes.push(`of ${model.engines.length} of the ${model.num_engines} engines`);
  return { value: running, unit: running === 1 ? "sequence runs" : "sequences run", notes };
}

function queue(model) {
  const waiting = model.queues.reduce((sum, each) => sum + each.requests, 0);
  const shown = model.queues.filter(({ name, requests }) => requests || name !== "suspect");
  const line = ({ name, requests }) => `${/^\d/.test(name) ? `class ${name}` : name}: ${requests}`;
  const notes = [shown.map(line).join(", ")];
  const oldest = Math.max(0, ...model.queues.map((each) => each.oldest_s));
  if (waiting) notes.push(`the oldest for ${oldest.toFixed(1)} s`);
  return { value: waiting, unit: waiting === 1 ? "request waits" : "requests wait", notes };
}
