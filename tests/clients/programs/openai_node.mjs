// OpenAI's client for JavaScript against a gateway: `node openai_node.mjs URL`, with the results as JSON on stdout.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Who lives in the lighthouse?" }];
const common = { model: "demo", messages, temperature: 0, max_tokens: 200 };
const schema = {
  type: "object",
  properties: { name: { type: "string" }, job: { type: "string" }, age: { type: "integer" } },
  required: ["name", "job", "age"],
  additionalProperties: false,
};
const weather = {
  name: "get_weather",
  parameters: {
    type: "object",
    properties: { city: { type: "string" } },
    required: ["city"],
    additionalProperties: false,
  },
};
const add = {
  name: "add",
  parameters: { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } }, required: ["a", "b"] },
};
const results = { get_weather: "rain, 12 degrees", add: "42" };
const asked = [{ role: "user", content: "What is the weather in Paris, and what is 17 + 25?" }];
const called = (message) => message.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]);

const whole = await client.chat.completions.create(common);
const pieces = [];
for await (const chunk of await client.chat.completions.create({ ...common, stream: true }))
  pieces.push(chunk.choices[0]?.delta.content ?? "");
const forced = await client.chat.completions.create({
  ...common,
  messages: asked,
  tools: [{ type: "function", function: weather }],
  tool_choice: { type: "function", function: { name: "get_weather" } },
});
const tools = [weather, add].map((each) => ({ type: "function", function: each }));
const chosen = (await client.chat.completions.create({ ...common, messages: asked, tools })).choices[0].message;
const told = chosen.tool_calls.map((call) => ({
  role: "tool",
  tool_call_id: call.id,
  content: results[call.function.name],
}));
const answer = await client.chat.completions.create({ ...common, messages: [...asked, chosen, ...told], tools });
const structured = await client.chat.completions.create({
  ...common,
  messages: [{ role: "user", content: "Who is Mara?" }],
  response_format: { type: "json_schema", json_schema: { name: "villager", schema, strict: true } },
});
const response = await client.responses.create({ model: "demo", input: messages[0].content, temperature: 0 });
console.log(
  JSON.stringify({
    text: whole.choices[0].message.content,
    tokens: whole.usage.completion_tokens,
    streamed: pieces.join(""),
    num_chunks: pieces.length,
    forced: called(forced.choices[0].message),
    calls: called(chosen),
    answer: answer.choices[0].message.content,
    structured: JSON.parse(structured.choices[0].message.content),
    response: response.output_text,
  }),
);
