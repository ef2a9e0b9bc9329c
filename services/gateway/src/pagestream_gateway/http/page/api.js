// The HTTP API: streams that go on at another gateway from their last position.

const GIVE_UP_MS = 90_000; // without any progress
const LONGEST_PAUSE_MS = 1_000;
const PASSING = new Set(["unavailable", "gateway_stopping", "too_many_connections", "overloaded", "no_engine"]);

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export class Api {
  constructor() {
    this.gateways = [location.origin];
    this.key = "";
    this.unserved = new Set(); // models without engines
  }

  headers(more = {}) {
    return this.key ? { Authorization: `Bearer ${this.key}`, ...more } : more;
  }

  async ask(method, path) {
    const answer = await fetch(this.gateways[0] + path, { method, headers: this.headers() });
    const body = await answer.json();
    if (!answer.ok) throw new ApiError(body.error?.message ?? `${answer.status}`);
    return body;
  }

  async models() {
    const { data } = await this.ask("GET", "/v1/models");
    this.unserved = new Set(data.filter((each) => each.engines === 0).map((each) => each.id));
    return data.map((each) => each.id); // the default, then those with engines
  }

  marked(name) {
    return this.unserved.has(name) ? `${name} (no engine)` : name;
  }

  // Whatever gateway answers first: one may have just been killed.
  async request(method, path) {
    let last;
    for (const gateway of this.gateways) {
      try {
        const answer = await fetch(gateway + path, { method, headers: this.headers() });
        if (answer.ok) return await answer.json();
        last = new ApiError(`${answer.status}`, answer.status);
      } catch (error) {
        last = error;
      }
    }
    throw last;
  }

  // Yields {text, id, tokens} of a chat's stream: each text once, whatever dies meanwhile, and how many tokens the
  // stream has had until then, where the body asks for continuous usage. `onNotice` gets what the server says meanwhile.
  async *chat(body, { signal, first = 0, onNotice = () => {} } = {}) {
    const idempotency = crypto.randomUUID();
    let turn = first, position = "", id = "", pause = 50, progressAt = performance.now();
    for (;;) {
      const gateway = this.gateways[turn % this.gateways.length];
      try {
        const answer = position
          ? await fetch(`${gateway}/v1/requests/${id}/events`, {
              headers: this.headers({ "Last-Event-ID": position }), signal,
            })
          : await fetch(`${gateway}/v1/chat/completions`, {
              method: "POST", signal, body: JSON.stringify({ ...body, stream: true }),
              headers: this.headers({ "Content-Type": "application/json", "Idempotency-Key": idempotency }),
            });
        if (!answer.ok) {
          const { error } = await answer.json().catch(() => ({ error: null }));
          if (!PASSING.has(error?.code)) throw new ApiError(error?.message ?? `the server answered ${answer.status}`);
        } else {
          id ||= answer.headers.get("X-Request-Id") ?? "";
          if (id) yield { text: "", id };
          for await (const data of events(answer.body, onNotice)) {
            if (data === "[DONE]") return;
            const event = JSON.parse(data);
            if (event.error) {
              if (!PASSING.has(event.error.code)) throw new ApiError(event.error.message);
              break;
            }
            position = event.stream_position ?? position;
            id ||= event.id ?? "";
            progressAt = performance.now();
            pause = 50;
            const text = event.choices?.[0]?.delta?.content ?? "";
            if (text) yield { text, id, tokens: event.usage?.completion_tokens };
          }
        }
      } catch (error) {
        if (error instanceof ApiError || signal?.aborted) throw error;
      }
      if (performance.now() - progressAt > GIVE_UP_MS) throw new ApiError("no gateway answers");
      turn += 1;
      await new Promise((done) => setTimeout(done, pause * (0.5 + Math.random() / 2)));
      pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
    }
  }
}

async function* events(stream, onNotice) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts)
        for (const line of part.split("\n")) {
          if (line.startsWith(": ")) onNotice(line.slice(2));
          if (line.startsWith("data: ")) yield line.slice(6);
        }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
