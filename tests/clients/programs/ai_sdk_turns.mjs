// Second turns of Vercel's AI SDK, by each of its providers: `node ai_sdk_turns.mjs URL`, with the results as JSON.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenResponses } from "@ai-sdk/open-responses";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = `${process.argv[2]}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const models = {
  openai: openai("demo"), // by responses; refers to items of earlier ones
  "openai, chat": openai.chat("demo"),
  compatible: createOpenAICompatible({ name: "pagestream", baseURL }).chatModel("demo"),
  anthropic: createAnthropic({ baseURL, apiKey: "none" })("demo"),
  "open responses": createOpenResponses({ name: "pagestream", url: `${baseURL}/responses`, apiKey: "none" })("demo"),
};
const tools = {
  get_weather: tool({
    description: "Weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async () => "rain, 12 degrees",
  }),
  add: tool({
    description: "Add two numbers.",
    inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
    execute: async ({ a, b }) => String(a + b),
  }),
};
const found = {};
for (const [name, model] of Object.entries(models)) {
  const common = { model, tools, temperature: 0, maxOutputTokens: 200, maxRetries: 0, stopWhen: stepCountIs(3) };
  for (const way of [generateText, streamText]) {
    const messages = [];
    for (const content of ["What is the weather in Paris, and what is 17 + 25?", "Who lives in the lighthouse?"]) {
      messages.push({ role: "user", content });
      const made = await way({ ...common, messages });
      if (made.consumeStream) await made.consumeStream();
      messages.push(...(await made.response).messages);
      found[`${name}, ${way.name}`] = await made.text;
    }
  }
}
console.log(JSON.stringify(found));
