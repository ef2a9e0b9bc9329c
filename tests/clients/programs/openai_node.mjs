// OpenAI's client for JavaScript against a gateway: `node openai_node.mjs URL`, with the results as JSON on stdout.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Who lives in the lighthouse?" }];
const common = { model: "demo", messages, temperature: 0, max_tokens: 200 };
const schema = {
  type: "object",
  properties: { name: { enum: ["Mara", "Otto"] }, is_keeper: { type: "boolean" } },
  required: ["name", "is_keeper"],
  additionalProperties: false,
};
const weather = {
  name: "get_weather",
  parameters: {
    type: "object",
    properties: { city: { enum: ["Oslo", "Bergen"] } },
    required: ["city"],
    additionalProperties: false,
  },
};

const whole = await client.chat.completions.create(common);
const pieces = [];
for await (const chunk of await client.chat.completions.create({ ...common, stream: true }))
  pieces.push(chunk.choices[0]?.delta.content ?? "");
const forced = await client.chat.completions.create({
  ...common,
  tools: [{ type: "function", function: weather }],
  tool_choice: { type: "function", function: { name: "get_weather" } },
});
const structured = await client.chat.completions.create({
  ...common,
  response_format: { type: "json_schema", json_schema: { name: "villager", schema, strict: true } },
});
const response = await client.responses.create({ model: "demo", input: messages[0].content, temperature: 0 });
console.log(
  JSON.stringify({
    text: whole.choices[0].message.content,
    tokens: whole.usage.completion_tokens,
    streamed: pieces.join(""),
    num_chunks: pieces.length,
    calls: forced.choices[0].message.tool_calls.map((call) => [
      call.function.name,
      Object.keys(JSON.parse(call.function.arguments)).sort(),
    ]),
    structured: Object.keys(JSON.parse(structured.choices[0].message.content)).sort(),
    response: response.output_text,
  }),
);
