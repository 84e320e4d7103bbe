// The messages of a request. A conversation is a list of turns, oldest first:
//   {role: "user", text, files: [{name, text} or {name, image}]}
//   {role: "assistant", text, reasoning, calls: [{id, name, arguments, result}], finish, fault, timing}
// Whatever state it was left in (an answer stopped in its reasoning, a call cut off or without a result), roles
// alternate, and every call is whole and has its result.

const NO_RESULT = "The user gave no result.";

export function messagesOf(turns, system = "") {
  const messages = system ? [{ role: "system", content: system }] : [];
  let questions = []; // without an answer yet: they are one message
  const ask = () => {
    if (questions.length) messages.push({ role: "user", content: contentOf(questions) });
    questions = [];
  };
  for (const turn of turns) {
    if (turn.role === "user") {
      questions.push(turn);
      continue;
    }
    const calls = turn.calls.filter(whole);
    if (!turn.text && !calls.length) continue;
    ask();
    const shape = ({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } });
    messages.push({ role: "assistant", content: turn.text || null, ...(calls.length && { tool_calls: calls.map(shape) }) });
    for (const call of calls) messages.push({ role: "tool", tool_call_id: call.id, content: call.result || NO_RESULT });
  }
  ask();
  return messages;
}

/** Whether the arguments of a call have come to their end. */
export function whole(call) {
  try {
    return JSON.parse(call.arguments) instanceof Object;
  } catch {
    return false;
  }
}

function contentOf(turns) {
  const files = turns.flatMap((turn) => turn.files);
  const text = turns.map(textOf).join("\n\n");
  const images = files.filter((file) => file.image).map((file) => ({ type: "image_url", image_url: { url: file.image } }));
  return images.length ? [...images, { type: "text", text }] : text;
}

function textOf(turn) {
  const texts = turn.files.filter((file) => !file.image).map((file) => `${file.name}:\n${fenced(file.text)}`);
  return [...texts, turn.text].filter(Boolean).join("\n\n");
}

function fenced(text) {
  const runs = text.match(/`{3,}/g) ?? [];
  const fence = "`".repeat(Math.max(3, ...runs.map((run) => run.length + 1)));
  return `${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}
