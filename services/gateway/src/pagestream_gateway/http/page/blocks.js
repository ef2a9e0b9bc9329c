// An engine's KV blocks as a picture: a cell for each block, in the colours of the requests that hold it.

import { colourOf, nameOf } from "./colours.js";
import { keepChildren, setText } from "./dom.js";

const CACHED = 1, OTHERS = 2, HELD = 3; // see core/engine_monitor.py; 0 is free
const TALLEST = 168, LARGEST = 12, SMALLEST = 4; // pixels: of the picture, of a cell
const MOST_COLOURS = 4; // in one cell

export class BlockGrid {
  constructor(name) {
    this.name = name;
    this.blocks = null;
    this.last = []; // of each cell, the request that had it last: it dims where only the cache has the block
    this.only = ""; // the request that is looked at
    this.element = document.createElement("section");
    this.element.className = "engine";
    this.element.innerHTML = `<h3><b></b> <small></small></h3><canvas role="img"></canvas>
      <p class="cell" aria-hidden="true"></p><ul aria-label="requests in the batch"></ul>`;
    [this.title, this.canvas, this.cell, this.list] = this.element.children;
    this.canvas.addEventListener("mousemove", (event) => this.explain(event));
    this.canvas.addEventListener("mouseleave", () => (this.cell.textContent = ""));
    new ResizeObserver(() => this.draw()).observe(this.element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  // Shows an engine as `/page/state` has it; one whose blocks are null does not answer.
  show(engine) {
    this.element.classList.toggle("silent", !engine.blocks);
    const used = engine.blocks ? 1 - engine.blocks.num_free / engine.blocks.num_blocks : 0;
    const what = engine.blocks
      ? `${Math.round(100 * used)} % of ${engine.blocks.num_blocks} blocks held, ${engine.running} sequences run`
      : "does not answer";
    setText(this.title.children[0], this.name);
    setText(this.title.children[1], what);
    if (!engine.blocks) {
      this.canvas.setAttribute("aria-label", `KV blocks of ${this.name}, which does not answer`);
      return;
    }
    if (this.blocks?.cells.length !== engine.blocks.cells.length || engine.id !== this.id) this.last = [];
    this.id = engine.id;
    this.blocks = engine.blocks;
    this.owners = this.blocks.cells.map((cell) => this.holdersOf(cell));
    this.owners.forEach((found, cell) => {
      if (found.length) this.last[cell] = found[0];
      else if (this.blocks.cells[cell] !== CACHED) delete this.last[cell];
    });
    this.describe();
    this.listRequests();
    this.draw();
  }

  // The requests that hold a cell's block, each once.
  holdersOf(cell) {
    if (cell < HELD) return [];
    const { sequences } = this.blocks.holders[cell - HELD];
    return [...new Set(sequences.map((place) => this.blocks.sequences[place].request_id))];
  }

  countOf(cell) {
    return cell < HELD ? 0 : this.blocks.holders[cell - HELD].count;
  }

  describe() {
    const { cells, num_blocks, num_free, num_cached } = this.blocks;
    const shared = cells.filter((cell) => this.countOf(cell) > 1).length;
    const sampled = cells.length < num_blocks ? `; the picture shows ${cells.length} of them` : "";
    Object.assign(this.canvas.dataset, {
      held: num_blocks - num_free, cached: num_cached, shared, requests: new Set(this.owners.flat()).size,
    });
    const label = `KV blocks of ${this.name}: of ${num_blocks}, ${num_blocks - num_free} are held by sequences, `
      + `${num_cached} are cached alone, ${num_free - num_cached} are free; ${shared} are shared${sampled}`;
    this.canvas.setAttribute("aria-label", label);
  }

  listRequests() {
    const requests = new Map();
    for (const seq of this.blocks.sequences) {
      const found = requests.get(seq.request_id) ?? { tokens: 0, blocks: 0, prefills: false };
      found.tokens += seq.tokens;
      found.prefills ||= seq.phase === "prefill";
      found.blocks += seq.blocks;
      requests.set(seq.request_id, found);
    }
    const sorted = [...requests.keys()].sort((a, b) => nameOf(a).localeCompare(nameOf(b), "en", { numeric: true }));
    for (const [id, row] of keepChildren(this.list, sorted, (id) => this.row(id))) {
      const { tokens, blocks, prefills } = requests.get(id);
      setText(row.lastElementChild, `${nameOf(id)}: ${tokens} tokens, ${blocks} blocks${prefills ? ", prefill" : ""}`);
    }
    if (this.only && !requests.has(this.only)) this.only = "";
  }

  row(id) {
    const row = document.createElement("li");
    row.innerHTML = `<span class="swatch"></span><span></span>`;
    row.firstElementChild.style.background = colourOf(id);
    row.dataset.request = id;
    row.addEventListener("mouseenter", () => this.look(id));
    row.addEventListener("mouseleave", () => this.look(""));
    return row;
  }

  look(id) {
    this.only = id;
    this.draw();
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth, cells = this.blocks?.cells;
    if (!cells || !width) return;
    let size = LARGEST;
    while (size > SMALLEST && Math.ceil(cells.length / Math.floor(width / size)) * size > TALLEST) size -= 1;
    this.columns = Math.floor(width / size);
    this.size = size;
    const height = Math.ceil(cells.length / this.columns) * size, scale = devicePixelRatio || 1;
    Object.assign(this.canvas, { width: width * scale, height: height * scale });
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d"), style = getComputedStyle(this.canvas);
    const [free, dim] = [style.getPropertyValue("--free"), style.getPropertyValue("--dim")];
    pen.scale(scale, scale);
    const inner = size - (size > 5 ? 2 : 1);
    cells.forEach((cell, place) => {
      const x = (place % this.columns) * size, y = Math.floor(place / this.columns) * size, owners = this.owners[place];
      pen.globalAlpha = 1;
      if (cell === OTHERS) this.hatch(pen, x, y, inner, dim);
      else if (cell === CACHED || owners.length) {
        const shown = owners.length ? owners : [this.last[place] ?? ""];
        if (this.only && !shown.includes(this.only)) pen.globalAlpha = 0.12;
        else if (!owners.length) pen.globalAlpha = 0.3;
        const colours = shown.slice(0, MOST_COLOURS).map((id) => (id ? colourOf(id) : dim));
        this.bands(pen, x, y, inner, this.countOf(cell) > 1 && colours.length < 2 ? [colours[0], dim] : colours);
      } else {
        pen.fillStyle = free;
        pen.fillRect(x, y, inner, inner);
      }
    });
  }

  // A cell in diagonal bands, one of each colour: a shared block.
  bands(pen, x, y, size, colours) {
    pen.fillStyle = colours[0];
    pen.fillRect(x, y, size, size);
    for (let band = 1; band < colours.length; band++) {
      const from = (2 * size * band) / colours.length, to = (2 * size * (band + 1)) / colours.length;
      pen.save();
      pen.beginPath();
      pen.rect(x, y, size, size);
      pen.clip();
      pen.beginPath();
      pen.moveTo(x + from, y);
      pen.lineTo(x + to, y);
      pen.lineTo(x, y + to);
      pen.lineTo(x, y + from);
      pen.fillStyle = colours[band];
      pen.fill();
      pen.restore();
    }
  }

  hatch(pen, x, y, size, colour) {
    pen.fillStyle = pen.strokeStyle = colour;
    pen.globalAlpha = 0.25;
    pen.fillRect(x, y, size, size);
    pen.globalAlpha = 1;
    pen.beginPath();
    pen.moveTo(x, y + size);
    pen.lineTo(x + size, y);
    pen.stroke();
  }

  // Says in words what is below the pointer.
  explain(event) {
    const place = Math.floor(event.offsetY / this.size) * this.columns + Math.floor(event.offsetX / this.size);
    const cell = this.blocks?.cells[place];
    if (cell === undefined) return;
    const block = Math.floor((place * this.blocks.num_blocks) / this.blocks.cells.length), count = this.countOf(cell);
    const names = this.owners[place].map(nameOf).join(", ");
    const what = cell === OTHERS ? "another tenant's" : cell === CACHED ? "cached" : cell < HELD ? "free"
      : `${names}${count > 1 ? `, shared by ${count} sequences` : ""}`;
    this.cell.textContent = `block ${block}: ${what}`;
  }
}

// What the cells mean, in the order in which a reader meets them.
export function legend() {
  const part = document.createElement("p");
  part.className = "legend";
  part.innerHTML = `<span class="swatch held"></span>of one request <span class="swatch shared"></span>shared
    <span class="swatch cached"></span>cached, can be reused or evicted <span class="swatch free"></span>free
    <span class="swatch others"></span>another tenant's`;
  return part;
}
