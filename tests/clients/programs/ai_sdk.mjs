// Vercel's AI SDK against a gateway: `node ai_sdk.mjs URL`, with the results as JSON on stdout.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
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
const forced = await generateText({
  ...common,
  prompt: "What is the weather in Oslo?",
  tools: { get_weather: tool({ description: "Weather of a city.", inputSchema: z.object({ city: z.enum(["Oslo", "Bergen"]) }) }) },
  toolChoice: { type: "tool", toolName: "get_weather" },
});
const structured = await generateObject({
  ...common,
  prompt,
  schema: z.object({ name: z.enum(["Mara", "Otto"]), is_keeper: z.boolean() }),
});
console.log(
  JSON.stringify({
    text: whole.text,
    tokens: whole.usage.outputTokens,
    streamed: pieces.join(""),
    num_chunks: pieces.length,
    calls: forced.toolCalls.map((call) => [call.toolName, Object.keys(call.input).sort()]),
    structured: Object.keys(structured.object).sort(),
  }),
);
