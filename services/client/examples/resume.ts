// A stream that goes on at another gateway: `node resume.js PROMPT URL [URL ...]`. It needs fetch and nothing else.
//
// Each event has a `stream_position`. After a break the next call is GET /v1/requests/<id>/events with the last one as
// `Last-Event-ID`, at any gateway. Before the id is known, the same call is made again: its `Idempotency-Key` lets it
// join the request of the first try.

interface Chunk {
  id: string;
  stream_position?: string;
  choices?: { delta?: { content?: string }; finish_reason?: string | null }[];
  error?: { code: string | null; message: string };
}

interface Chat {
  model: string;
  messages: { role: string; content: string }[];
  max_tokens?: number;
  temperature?: number;
  seed?: number;
}

const GIVE_UP_MS = 130_000; // without any progress: longer than a gateway waits for Redis
const PASSING = new Set(["unavailable", "gateway_stopping", "too_many_connections", "overloaded", "no_engine"]);

export class StreamFailed extends Error {}

/** Yields the text of an answer, each piece once, whichever gateway dies meanwhile. */
export async function* chat(gateways: string[], body: Chat, key?: string): AsyncGenerator<string> {
  const idempotency = crypto.randomUUID();
  const own: Record<string, string> = key ? { Authorization: `Bearer ${key}` } : {};
  let position = "";
  let pauseMs = 50;
  let progressAt = Date.now();
  for (let turn = 0; Date.now() - progressAt < GIVE_UP_MS; turn++) {
    const gateway = gateways[turn % gateways.length];
    try {
      const answer = position
        ? await fetch(`${gateway}/v1/requests/${position.split("/")[0]}/events`, {
            headers: { ...own, "Last-Event-ID": position },
          })
        : await fetch(`${gateway}/v1/chat/completions`, {
            method: "POST",
            headers: { ...own, "Content-Type": "application/json", "Idempotency-Key": idempotency },
            body: JSON.stringify({ ...body, stream: true }),
          });
      if (!answer.ok) throwUnlessPassing(((await answer.json()) as Chunk).error);
      else
        for await (const data of events(answer)) {
          if (data === "[DONE]") return;
          const chunk = JSON.parse(data) as Chunk;
          if (chunk.error) {
            throwUnlessPassing(chunk.error);
            break;
          }
          position = chunk.stream_position ?? position;
          progressAt = Date.now();
          pauseMs = 50;
          const text = chunk.choices?.[0]?.delta?.content;
          if (text) yield text;
        }
    } catch (error) {
      if (error instanceof StreamFailed) throw error; // anything else is a connection that broke
    }
    await new Promise((done) => setTimeout(done, pauseMs * (0.5 + Math.random() / 2)));
    pauseMs = Math.min(2 * pauseMs, 2_000);
  }
  throw new StreamFailed(`no gateway answered for ${GIVE_UP_MS / 1000} s; the answer goes on from ${position}`);
}

function throwUnlessPassing(error?: { code: string | null; message: string }): void {
  if (!PASSING.has(error?.code ?? "")) throw new StreamFailed(error?.message ?? "the server refused the request");
}

async function* events(answer: Response): AsyncGenerator<string> {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const bytes of answer.body as unknown as AsyncIterable<Uint8Array>) {
    const parts = (rest + decoder.decode(bytes, { stream: true })).split("\n\n");
    rest = parts.pop() ?? "";
    for (const part of parts)
      for (const line of part.split("\n")) if (line.startsWith("data: ")) yield line.slice("data: ".length);
  }
}

const [prompt, ...gateways] = process.argv.slice(2);
if (prompt && gateways.length) {
  const asked = { model: "demo", messages: [{ role: "user", content: prompt }], max_tokens: 400, temperature: 0 };
  for await (const text of chat(gateways, asked)) process.stdout.write(text);
  process.stdout.write("\n");
}
