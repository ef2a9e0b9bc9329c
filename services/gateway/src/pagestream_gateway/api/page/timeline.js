// Which engine had which stream when, a lane for each stream, and what was killed.

const COLOURS = ["#2f7ed8", "#e08a1e", "#3aa655", "#9b59b6", "#c0392b", "#16a0a0"];
const NOBODY = "#9aa4ad55";
const MARK = { engine: "#c0392b", gateway: "#7f3fbf", redis: "#d35400" };

export const colourOf = (part) => (part ? COLOURS[Number(part.split("-")[1]) % COLOURS.length] : NOBODY);

export class Timeline {
  constructor(parent, count) {
    this.samples = []; // {at, owners}
    this.kills = []; // {at, part}
    this.lanes = [];
    parent.replaceChildren();
    for (let number = 0; number < count; number++) {
      const lane = document.createElement("div");
      lane.className = "lane";
      lane.innerHTML = `<span>stream ${number + 1}</span><canvas width="800" height="16"></canvas><span></span>`;
      parent.append(lane);
      this.lanes.push({ context: lane.querySelector("canvas").getContext("2d"), share: lane.lastElementChild });
    }
    const legend = document.createElement("p");
    legend.className = "legend";
    for (const [name, colour] of [["engine-0", COLOURS[0]], ["engine-1", COLOURS[1]], ["no engine", NOBODY],
      ["kill of an engine", MARK.engine], ["of a gateway", MARK.gateway], ["of Redis", MARK.redis]]) {
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = colour;
      legend.append(swatch, name);
    }
    parent.append(legend);
  }

  draw(streams) {
    const end = this.samples.at(-1)?.at ?? 1;
    this.lanes.forEach(({ context, share }, number) => {
      const { width, height } = context.canvas;
      context.clearRect(0, 0, width, height);
      this.samples.forEach((sample, index) => {
        const owner = sample.owners[number];
        if (owner === null) return;
        const from = (sample.at / end) * width;
        const to = ((this.samples[index + 1]?.at ?? end) / end) * width;
        context.fillStyle = colourOf(owner);
        context.fillRect(from, 0, Math.max(to - from, 1), height);
      });
      for (const kill of this.kills) {
        context.fillStyle = MARK[kill.part.split("-")[0]];
        context.fillRect((kill.at / end) * width - 1, 0, 3, height);
      }
      share.textContent = `${Math.floor(100 * streams[number].share)} %`;
    });
  }
}
