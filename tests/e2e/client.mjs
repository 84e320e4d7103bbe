// What OpenAI's client for Node makes of a server: one line of JSON. Its address is the first argument.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const model = "penstock-demo";
const messages = [{ role: "user", content: "What is 128 + 457?" }];
const ask = [{ role: "user", content: "What is the weather in Rome?" }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const weather = { name: "get_weather", description: "Get the weather in a city", parameters };
const found = {};

const whole = await client.chat.completions.create({ model, messages, temperature: 0 });
found.chat = whole.choices[0].message.content;
found.chatStream = "";
for await (const chunk of await client.chat.completions.create({ model, messages, temperature: 0, stream: true })) {
  found.chatStream += chunk.choices[0]?.delta?.content ?? "";
}
const tools = [{ type: "function", function: weather }];
const called = await client.chat.completions.create({ model, messages: ask, tools, temperature: 0 });
found.call = called.choices[0].message.tool_calls[0].function;
const runner = client.chat.completions.stream({ model, messages: ask, tools, temperature: 0 });
found.callStream = (await runner.finalChatCompletion()).choices[0].message.tool_calls[0].function;

const response = await client.responses.create({ model, input: messages[0].content, temperature: 0 });
found.response = response.output_text;
found.responseStream = "";
const events = await client.responses.create({ model, input: messages[0].content, temperature: 0, stream: true });
for await (const event of events) {
  if (event.type === "response.output_text.delta") found.responseStream += event.delta;
  if (event.type === "response.completed") found.status = event.response.status;
}
const said = await client.responses.create({
  model, input: ask[0].content, temperature: 0, tools: [{ type: "function", strict: false, ...weather }],
});
found.responseCall = { name: said.output[0].name, arguments: said.output[0].arguments };
try {
  await client.chat.completions.create({ model, messages, temperature: 9 });
} catch (error) {
  found.refusal = { status: error.status, param: error.param };
}
console.log(JSON.stringify(found));
