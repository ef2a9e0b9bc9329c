// Second turns of OpenAI's and Anthropic's clients for JavaScript: `node second_turns.mjs URL`, with the results as JSON.
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const openai = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const common = { model: "demo", temperature: 0 };
const City = z.object({ city: z.string() });
const Sum = z.object({ a: z.number().int(), b: z.number().int() });
const Villager = z.object({ name: z.string(), job: z.string(), age: z.number().int() });
const asked = [{ role: "user", content: "What is the weather in Paris, and what is 17 + 25?" }];
const who = [{ role: "user", content: "Who is Mara?" }];
const next = { role: "user", content: "Who lives in the lighthouse?" };
const results = { get_weather: "rain, 12 degrees", add: "42" };
const found = {};

// Chats.
const form = zodResponseFormat(Villager, "villager");
const functions = [
  zodFunction({ name: "get_weather", parameters: City }),
  zodFunction({ name: "add", parameters: Sum }),
];
const chatted = async (messages, tools) =>
  (await openai.chat.completions.create({ ...common, messages, tools })).choices[0].message.content;
for (const [name, first] of Object.entries({
  parse: async (body) => (await openai.chat.completions.parse(body)).choices[0].message,
  stream: async (body) => (await openai.chat.completions.stream(body).finalChatCompletion()).choices[0].message,
})) {
  const parsed = await first({ ...common, messages: who, response_format: form });
  found[`chat, ${name}`] = await chatted([...who, parsed, next]);
  const message = await first({ ...common, messages: asked, tools: functions });
  const told = message.tool_calls.map((call) => ({
    role: "tool",
    tool_call_id: call.id,
    content: results[call.function.name],
  }));
  found[`chat, ${name} with tools`] = await chatted([...asked, message, ...told], functions);
}
for (const stream of [false, true]) {
  const runner = openai.chat.completions.runTools({
    ...common,
    stream,
    messages: [...asked],
    tools: functions.map(({ function: each }) => ({
      type: "function",
      function: { ...each, parse: JSON.parse, function: async () => results[each.name] },
    })),
  });
  await runner.finalContent();
  found[`chat, runTools, ${stream}`] = await chatted([...runner.messages, next]);
}

// Responses.
const text = { format: zodTextFormat(Villager, "villager") };
const flat = [
  zodResponsesFunction({ name: "get_weather", parameters: City }),
  zodResponsesFunction({ name: "add", parameters: Sum }),
];
const responded = async (input, tools) => (await openai.responses.create({ ...common, input, tools })).output_text;
for (const [name, first] of Object.entries({
  parse: (body) => openai.responses.parse(body),
  stream: (body) => openai.responses.stream(body).finalResponse(),
})) {
  const parsed = await first({ ...common, input: who, text });
  found[`responses, ${name}`] = await responded([...who, ...parsed.output, next]);
  const { output } = await first({ ...common, input: asked, tools: flat });
  const told = output
    .filter((item) => item.type === "function_call")
    .map((item) => ({ type: "function_call_output", call_id: item.call_id, output: results[item.name] }));
  found[`responses, ${name} with tools`] = await responded([...asked, ...output, ...told], flat);
}

// Messages.
const runnable = [
  betaZodTool({ name: "get_weather", inputSchema: City, run: async () => results.get_weather }),
  betaZodTool({ name: "add", inputSchema: Sum, run: async () => results.add }),
];
const limited = { ...common, max_tokens: 200 };
const written = async (messages) =>
  (await anthropic.messages.create({ ...limited, messages: [...messages, next] })).content[0].text;
const output_config = { format: zodOutputFormat(Villager) };
const parsed = await anthropic.messages.parse({ ...limited, messages: who, output_config });
found["messages, parse"] = await written([...who, { role: parsed.role, content: parsed.content }]);
const streamed = await anthropic.messages.stream({ ...limited, messages: who }).finalMessage();
found["messages, stream"] = await written([...who, { role: streamed.role, content: streamed.content }]);
for (const stream of [false, true]) {
  const runner = anthropic.beta.messages.toolRunner({ ...limited, messages: [...asked], tools: runnable, stream });
  const last = await runner.runUntilDone();
  const turns = [...runner.params.messages.filter((each) => each.content !== last.content)];
  found[`messages, toolRunner, ${stream}`] = await written([...turns, { role: last.role, content: last.content }]);
}
console.log(JSON.stringify(found));
