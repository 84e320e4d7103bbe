// The options beside the conversation: kept for the next visit, checked as they are typed, and made part of a request.

import { at } from "./dom.js";
import { keep, kept } from "./storage.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const KEPT = [...NUMBERS, "system", "tools", "tool_choice", "schema"];
const NAME = /^[\w-]{1,64}$/;
const EXAMPLES = {
  tools: [{ type: "function", function: {
    name: "get_weather", description: "The weather in a city",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false },
  } }],
  schema: {
    type: "object", properties: { name: { type: "string" }, age: { type: "integer" } },
    required: ["name", "age"], additionalProperties: false,
  },
};
const CHECKS = { tools: toolsIn, schema: schemaIn };

function json(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not JSON: ${error.message}.`);
  }
}
const isObject = (value) => value instanceof Object && !Array.isArray(value);

/** The schema that a text holds; the server checks what stands in it. Throws Error with what is wrong. */
function schemaIn(text) {
  const schema = json(text);
  if (!isObject(schema)) throw new Error("A schema is a JSON object, such as {\"type\": \"object\"}.");
  return schema;
}

/** The tools that a text holds, functions without their wrapper among them. Throws Error with what is wrong. */
function toolsIn(text) {
  const given = json(text);
  const tools = (Array.isArray(given) ? given : [given]).map((tool) => isObject(tool) && "function" in tool ? tool : { type: "function", function: tool });
  const names = new Set();
  tools.forEach(({ function: one }, index) => {
    const place = `Tool ${index + 1}`;
    if (!isObject(one)) throw new Error(`${place} is not a JSON object.`);
    if (typeof one.name !== "string" || !NAME.test(one.name)) {
      throw new Error(`${place} needs a "name" of 1 to 64 letters, digits, _ or -.`);
    }
    if (names.has(one.name)) throw new Error(`${place} has the name of another: ${one.name}.`);
    if ("parameters" in one && !isObject(one.parameters)) throw new Error(`"parameters" of ${one.name} must be a JSON schema.`);
    names.add(one.name);
  });
  if (!tools.length) throw new Error("The list is empty: describe a tool, or clear the field.");
  return tools;
}

/** Say beside a field what is wrong with it; nothing where it is right. */
export function mark(name, problem) {
  at(name).setAttribute("aria-invalid", String(problem !== ""));
  at(`${name}-problem`).textContent = problem;
}

function check(name) {
  const text = at(name).value.trim();
  let problem = "";
  try {
    if (text) CHECKS[name](text);
  } catch (error) {
    problem = error.message;
  }
  mark(name, problem);
  return problem;
}

/** The first field that is wrong, or null. */
export function wrongField() {
  const json = Object.keys(CHECKS).filter(check);
  return document.querySelector("#options :invalid") ?? (json.length ? at(json[0]) : null);
}

/** The field that a refused parameter was made from, or null. */
export function fieldOf(param) {
  const name = param.split(/[.[]/)[0];
  return at({ response_format: "schema" }[name] ?? (KEPT.includes(name) ? name : "")) ?? null;
}

/** The part of a request that the options make. They must be right. */
export function parameters() {
  const asked = at("model").value ? { model: at("model").value } : {}; // none is known yet: the server has one
  for (const name of NUMBERS) if (at(name).value !== "") asked[name] = at(name).valueAsNumber;
  const tools = at("tools").value.trim();
  if (tools) Object.assign(asked, { tools: toolsIn(tools), tool_choice: at("tool_choice").value });
  const schema = at("schema").value.trim();
  if (schema) {
    asked.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema: schemaIn(schema) } };
  }
  return asked;
}

export function prepare() {
  for (const name of KEPT) {
    at(name).value = kept(name) ?? at(name).value;
    at(name).addEventListener("input", () => {
      if (name in CHECKS) check(name);
      keep(name, at(name).value);
    });
  }
  for (const name of Object.keys(CHECKS)) {
    check(name);
    at(`${name}-example`).addEventListener("click", () => {
      at(name).value = JSON.stringify(EXAMPLES[name], null, 1);
      at(name).dispatchEvent(new Event("input"));
      at(name).focus();
    });
  }
}
