// What Vercel's AI SDK makes of a server through its Anthropic provider: one line of JSON. The address is the argument.
import { createAnthropic } from "@ai-sdk/anthropic";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const model = createAnthropic({ baseURL: process.argv[2] + "/v1", apiKey: "none" })("penstock-demo");
const prompt = "What is 128 + 457?";
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = {
  get_weather: tool({
    description: "Get the weather in a city",
    inputSchema: jsonSchema(parameters),
    execute: async () => ({ weather: "sunny", temperature: 21 }),
  }),
};
const settings = { model, temperature: 0, maxRetries: 0, maxOutputTokens: 200 };
const found = {};

found.whole = (await generateText({ ...settings, prompt })).text;
found.stream = "";
for await (const piece of streamText({ ...settings, prompt }).textStream) found.stream += piece;
const loop = await generateText({ ...settings, prompt: "What is the weather in Rome?", tools, stopWhen: stepCountIs(3) });
found.calls = loop.steps.flatMap((step) => step.toolCalls.map((call) => [call.toolName, call.input]));
found.answer = loop.text;
found.finish = loop.finishReason;
const thinking = { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } };
const thought = await generateText({ ...settings, maxOutputTokens: 2000, prompt, providerOptions: thinking });
found.thought = thought.reasoningText;
found.behind = thought.text;
console.log(JSON.stringify(found));
