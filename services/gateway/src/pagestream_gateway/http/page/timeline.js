// Which engine had which stream when, a lane for each stream, and what was killed.

import { streamColour } from "./colours.js";
import { setText } from "./dom.js";

const MARK = { engine: "#d1242f", gateway: "#8250df", redis: "#bc4c00" };
const TRACK = 7; // pixels: of each engine in a lane

const numberOf = (part) => Number(part.split("-")[1]);

export class Timeline {
  constructor(parent, count) {
    this.samples = []; // {at, owners}
    this.kills = []; // {at, part}
    this.engines = 2;
    this.lanes = [];
    parent.replaceChildren();
    for (let number = 0; number < count; number++) {
      const lane = document.createElement("div");
      lane.className = "lane";
      lane.innerHTML = `<span><span class="swatch"></span>stream ${number + 1}</span>
        <canvas width="1600" role="img"></canvas><span></span>`;
      lane.querySelector(".swatch").style.background = streamColour(number);
      parent.append(lane);
      this.lanes.push({ canvas: lane.querySelector("canvas"), share: lane.lastElementChild });
    }
    this.legend = document.createElement("p");
    this.legend.className = "legend";
    parent.append(this.legend);
    this.explain();
  }

  explain() {
    const rows = Array.from({ length: this.engines }, (_, number) => `engine-${number}`).join(", ");
    this.legend.textContent = `Rows of a lane, from the top: ${rows}; none: no engine has the stream. kill -9 of`;
    for (const [kind, colour] of Object.entries(MARK)) {
      const swatch = document.createElement("span");
      swatch.className = "swatch bar";
      swatch.style.background = colour;
      this.legend.append(swatch, kind === "redis" ? "Redis" : kind === "engine" ? "an engine" : "a gateway");
    }
  }

  draw(streams) {
    const end = this.samples.at(-1)?.at ?? 1;
    const most = 1 + Math.max(1, ...this.samples.flatMap((each) => each.owners.filter(Boolean).map(numberOf)));
    if (most !== this.engines) {
      this.engines = most;
      this.explain();
    }
    this.lanes.forEach(({ canvas, share }, number) => {
      const pen = canvas.getContext("2d"), { width } = canvas;
      canvas.height = 2 * TRACK * this.engines; // clears it too
      canvas.style.height = `${TRACK * this.engines + 2}px`;
      this.samples.forEach((sample, index) => {
        const owner = sample.owners[number];
        if (!owner) return;
        const from = Math.floor((sample.at / end) * width);
        const to = Math.ceil(((this.samples[index + 1]?.at ?? end) / end) * width);
        pen.fillStyle = streamColour(number);
        pen.fillRect(from, 2 * TRACK * numberOf(owner), Math.max(to - from, 1), 2 * TRACK);
      });
      const mark = (3 * width) / (canvas.clientWidth || width); // of 3 pixels, also on a phone
      for (const kill of this.kills) {
        pen.fillStyle = MARK[kill.part.split("-")[0]];
        pen.fillRect((kill.at / end) * width - mark / 2, 0, mark, canvas.height);
      }
      const percent = `${Math.floor(100 * streams[number].share)} %`, owner = this.samples.at(-1)?.owners[number];
      const where = streams[number].ended ? "ended" : owner ? `at ${owner}` : "at no engine";
      canvas.setAttribute("aria-label", `stream ${number + 1}: ${percent}, ${where}`);
      setText(share, percent);
    });
  }
}
