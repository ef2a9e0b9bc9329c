// The demonstration: streams read undisturbed, and again while processes are killed.

import { nameStream } from "./colours.js";
import { isUsable, keepChildren, setText, setUsable } from "./dom.js";
import { Timeline } from "./timeline.js";

const PROMPTS = ["the lighthouse", "the baker", "the harbour", "the mill"];
// All streams begin with it: engines share the blocks of what is equal.
const OPENING = [
  { role: "system", content: "You are the storyteller of Tidewick." },
  { role: "user", content: "Who lives in the lighthouse?" },
  { role: "assistant", content: "Mara lives in the lighthouse." },
  { role: "user", content: "Where does the baker work?" },
  { role: "assistant", content: "The baker works in the bakery." },
];
const SAMPLE_MS = 100;
const $ = (id) => document.getElementById(id);

class Stream {
  constructor(number, tokens) {
    this.number = number;
    this.tokens = tokens;
    this.text = "";
    this.id = "";
    this.num_read = 0; // tokens: a gateway writes several at once to a reader that is late
    this.gap = 0;
    this.ended = false;
  }

  get share() {
    return this.ended ? 1 : Math.min(0.99, this.num_read / this.tokens);
  }

  async read(api, model) {
    const content = `Tell me a story about ${PROMPTS[this.number % PROMPTS.length]}.`;
    const body = {
      model, seed: 100 + this.number, temperature: 0.9, max_tokens: this.tokens, ignore_eos: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      messages: [...OPENING, { role: "user", content }],
    };
    let last = null;
    for await (const { text, id, tokens } of api.chat(body, { first: this.number })) {
      if (id) nameStream(id, this.number);
      this.id = id;
      if (!text) continue;
      const now = performance.now();
      if (last !== null) this.gap = Math.max(this.gap, now - last);
      last = now;
      this.text += text;
      this.num_read = tokens ?? this.num_read;
    }
    this.ended = true;
    const bytes = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(this.text));
    this.digest = [...new Uint8Array(bytes)].slice(0, 8).map((each) => each.toString(16).padStart(2, "0")).join("");
    const state = await api.request("GET", `/v1/requests/${this.id}`);
    this.read_tokens = state.usage.completion_tokens;
    this.attempts = state.attempts;
  }
}

export class Demonstration {
  constructor(api, control, model) {
    this.api = api;
    this.control = control;
    this.model = model;
    this.timeline = null;
    this.killed = new Map(); // name -> pid: of processes that may still be listed
    $("start").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!isUsable($("run"))) return;
      this.run(Number($("count").value), Number($("tokens").value)).catch((error) => {
        $("phase").textContent = `failed: ${error.message}`;
        setUsable($("run"), true);
      });
    });
  }

  async showParts() {
    const { processes } = await this.control.processes();
    const buttons = keepChildren($("parts"), processes.map(({ name }) => name), (name) => this.button(name));
    for (const { name, pid, restarts } of processes) {
      const button = buttons.get(name), times = restarts === 1 ? "once" : `${restarts} times`;
      setText(button, restarts ? `${name} \u21bb ${restarts}` : name);
      button.title = `kill -9 ${name}${restarts ? `, restarted ${times}` : ""}`;
      button.setAttribute("aria-label", button.title);
      setUsable(button, pid !== null && pid !== this.killed.get(name));
    }
  }

  button(name) {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.part = name;
    button.addEventListener("click", async () => {
      if (!isUsable(button)) return;
      setUsable(button, false);
      try {
        const { pid } = await this.control.kill(name);
        this.killed.set(name, pid);
        this.timeline?.kills.push({ at: performance.now() - this.began, part: name });
        $("killed").textContent = `${name} (process ${pid}) was killed`;
      } catch (error) {
        $("killed").textContent = `${name} could not be killed: ${error.message}`;
      }
    });
    return button;
  }

  async run(count, tokens) {
    setUsable($("run"), false);
    $("results").hidden = true;
    $("verdict").textContent = "";
    $("phase").textContent = "reading the streams undisturbed";
    const first = await this.readAll(count, tokens);
    $("phase").textContent = this.control ? "reading them again: kill what you like" : "reading them again";
    const second = await this.readAll(count, tokens);
    $("phase").textContent = "";
    this.report(first, second);
    setUsable($("run"), true);
  }

  async readAll(count, tokens) {
    const streams = Array.from({ length: count }, (_, number) => new Stream(number, tokens));
    this.timeline = new Timeline($("timeline"), count);
    this.began = performance.now();
    let reading = true;
    const sampling = (async () => {
      while (reading) {
        await this.sample(streams);
        await new Promise((done) => setTimeout(done, SAMPLE_MS));
      }
    })();
    try {
      await Promise.all(streams.map((stream) => stream.read(this.api, this.model())));
    } finally {
      reading = false;
      await sampling;
    }
    this.timeline.draw(streams);
    return streams;
  }

  async sample(streams) {
    const known = streams.filter((stream) => stream.id && !stream.ended);
    let owners = {};
    if (this.control && known.length) {
      const found = await this.control.owners(known.map((stream) => stream.id)).catch(() => known.map(() => ""));
      owners = Object.fromEntries(known.map((stream, index) => [stream.number, found[index]]));
    }
    const at = performance.now() - this.began;
    this.timeline.samples.push({ at, owners: streams.map((each) => (each.ended ? null : (owners[each.number] ?? ""))) });
    this.timeline.draw(streams);
  }

  report(first, second) {
    const heads = [...$("results").tHead.rows[0].cells].map((each) => each.textContent); // beside values on a phone
    const rows = second.map((stream, number) => {
      const before = first[number], row = document.createElement("tr");
      const same = stream.digest === before.digest && stream.read_tokens === before.read_tokens;
      for (const value of [number + 1, stream.read_tokens, stream.attempts, `${Math.round(stream.gap)} ms`,
        before.digest, stream.digest, same ? "identical" : "DIFFERENT"]) {
        const cell = document.createElement("td");
        cell.textContent = value;
        cell.dataset.label = heads[row.children.length];
        row.append(cell);
      }
      row.lastElementChild.className = same ? "good" : "bad";
      return [row, same];
    });
    $("results").tBodies[0].replaceChildren(...rows.map(([row]) => row));
    $("results").hidden = false;
    const same = rows.filter(([, is]) => is).length;
    const killed = this.timeline.kills.map((kill) => kill.part).join(", ") || "nothing";
    $("verdict").textContent = `${same} of ${rows.length} streams are identical to the undisturbed ones; killed: ${killed}`;
    $("verdict").className = same === rows.length ? "good" : "bad";
    $("verdict").scrollIntoView({ block: "nearest" });
  }
}
