// Requests to this server, with the key where it asks for one, and the stream of one answer.

import { at } from "./dom.js";
import { keep, kept } from "./storage.js";

/** An error that the server told: `param` names the part of the request that it is about. */
export class Refusal extends Error {
  constructor({ message, param }) {
    super(message);
    this.param = param ?? "";
  }
}

let lastKey = ""; // where the browser keeps none
const key = () => kept("key", "sessionStorage") ?? lastKey;

export async function call(path, options = {}) {
  const headers = { ...options.headers, ...(key() && { Authorization: `Bearer ${key()}` }) };
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw error instanceof TypeError ? new Error("The server does not answer.") : error;
  });
  if (response.status === 401) {
    await unlocked(key() !== "", options.signal);
    return call(path, options);
  }
  if (!response.ok) {
    const told = await response.json().catch(() => ({}));
    throw new Refusal(told.error ?? { message: `The server answered with ${response.status}.` });
  }
  return response;
}

/** Ask for the key; resolves when one was given. */
function unlocked(wrong, signal) {
  at("lock-title").textContent = wrong ? "The server does not know that key" : "This server asks for a key";
  if (!at("lock").open) {
    at("key").value = "";
    at("lock").showModal();
  }
  return new Promise((resolve, reject) => {
    at("lock").addEventListener("close", () => {
      lastKey = at("key").value;
      keep("key", lastKey, "sessionStorage");
      resolve();
    }, { once: true });
    signal?.addEventListener("abort", () => reject(signal.reason), { once: true });
  });
}

/** The chunks of a streamed chat completion. Throws Refusal for an error in the stream, and Error where it breaks off. */
export async function* chunks(body, signal) {
  const response = await call("v1/chat/completions", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error instanceof TypeError ? new Error("The connection broke before the answer was complete.") : error;
    });
    if (done) throw new Error("The answer broke off before it was complete.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Refusal(chunk.error);
      yield chunk;
    }
  }
}
