// A conversation with a model.

import { isUsable, setUsable } from "./dom.js";

const MAX_TOKENS = 512;
const $ = (id) => document.getElementById(id);

export class Chat {
  constructor(api, model) {
    this.api = api;
    this.model = model;
    this.messages = [];
    this.abort = null;
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      const prompt = $("prompt").value.trim();
      if (prompt && isUsable($("send"))) this.send(prompt);
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        $("ask").requestSubmit();
      }
    });
    $("stop").addEventListener("click", () => this.abort?.abort());
    $("forget").addEventListener("click", () => {
      this.messages = [];
      $("messages").replaceChildren();
    });
  }

  show(role, text) {
    const message = document.createElement("div");
    message.className = `message ${role}`;
    message.textContent = text;
    $("messages").append(message);
    message.scrollIntoView({ block: "nearest" });
    return message;
  }

  async send(prompt) {
    $("prompt").value = "";
    this.show("user", prompt);
    const shown = this.show("assistant", "");
    shown.setAttribute("aria-busy", "true"); // read out when it is whole, not a token at a time
    const note = document.createElement("span");
    note.className = "note";
    const system = $("system").value.trim();
    const messages = [...this.messages, { role: "user", content: prompt }];
    const opening = system ? [{ role: "system", content: system }] : [];
    this.abort = new AbortController();
    $("stop").hidden = false;
    setUsable($("send"), false);
    let text = "", request = "";
    const began = performance.now();
    try {
      const body = { model: this.model(), messages: [...opening, ...messages], max_tokens: MAX_TOKENS };
      const onNotice = (said) => (shown.textContent ||= `(${said})`);
      for await (const piece of this.api.chat(body, { signal: this.abort.signal, onNotice })) {
        request = piece.id;
        text += piece.text;
        shown.textContent = text;
      }
      this.messages = [...messages, { role: "assistant", content: text }];
      note.textContent = `${((performance.now() - began) / 1000).toFixed(1)} s`;
    } catch (error) {
      note.textContent = this.abort.signal.aborted ? "stopped" : error.message;
      if (request) this.api.request("DELETE", `/v1/requests/${request}`).catch(() => {});
    } finally {
      shown.append(note);
      shown.removeAttribute("aria-busy");
      this.abort = null;
      if (document.activeElement === $("stop")) $("prompt").focus();
      $("stop").hidden = true;
      setUsable($("send"), true);
    }
  }
}
