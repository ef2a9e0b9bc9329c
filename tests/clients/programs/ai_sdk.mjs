// Vercel's AI SDK against a gateway: `node ai_sdk.mjs URL`, with the results as JSON on stdout.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "pagestream",
  baseURL: `${process.argv[2]}/v1`,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider.chatModel("demo");
const common = { model, temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
const prompt = "Who lives in the lighthouse?";

const whole = await generateText({ ...common, prompt });
const stream = streamText({ ...common, prompt });
const pieces = [];
for await (const piece of stream.textStream) pieces.push(piece);
const asked = "What is the weather in Paris, and what is 17 + 25?";
const getWeather = { description: "Weather of a city.", inputSchema: z.object({ city: z.string() }) };
const add = { description: "Add two numbers.", inputSchema: z.object({ a: z.number().int(), b: z.number().int() }) };
const forced = await generateText({
  ...common,
  prompt: asked,
  tools: { get_weather: tool(getWeather) },
  toolChoice: { type: "tool", toolName: "get_weather" },
});
const looped = await generateText({
  ...common,
  prompt: asked,
  tools: {
    get_weather: tool({ ...getWeather, execute: async () => "rain, 12 degrees" }),
    add: tool({ ...add, execute: async ({ a, b }) => String(a + b) }),
  },
  stopWhen: stepCountIs(3),
});
const structured = await generateObject({
  ...common,
  prompt: "Who is Mara?",
  schema: z.object({ name: z.string(), job: z.string(), age: z.number().int() }),
});
console.log(
  JSON.stringify({
    text: whole.text,
    tokens: whole.usage.outputTokens,
    streamed: pieces.join(""),
    num_chunks: pieces.length,
    forced: forced.toolCalls.map((call) => [call.toolName, call.input]),
    calls: looped.steps[0].toolCalls.map((call) => [call.toolName, call.input]),
    answer: looped.text,
    structured: structured.object,
  }),
);
