// The conversation on the screen, and what people do with it.

import { at, copy, make } from "./dom.js";
import { call, chunks, Refusal } from "./completion.js";
import { messagesOf, whole } from "./history.js";
import { codeBlock, draw } from "./markdown.js";
import { fieldOf, mark, parameters, prepare, wrongField } from "./panel.js";
import { isPicture, pictureUrl } from "./pictures.js";
import { keep, kept, newConversation, Storage, titleOf } from "./storage.js";
import { rate, timingBar, timingOf } from "./timing.js";

const LOOK = 5000; // ms between questions after the server's state
const SAVE = 500; // ms between writes of an answer that grows
const PACE = 250; // ms between changes of its speed
const BYTES_PER_TOKEN = 16; // more than any text has on average; a longer file fits no prompt
const APPLE = /Mac|iPhone|iPad/.test(navigator.platform); // where Option+N is a letter's accent
const plural = (count, name) => `${count.toLocaleString("en")} ${name}${count === 1 ? "" : "s"}`;

let chat = newConversation();
let live = null; // the answer that streams into it
let files = []; // attached to the message that is being written
let models = [];
let storage = null; // null where the browser keeps no conversations
let saved = Promise.resolve(); // when everything that was to be kept is
let waiting = null; // the conversation that the last write in the queue is for
let opening = 0; // the conversation that was asked for last

// --- The server

async function look() {
  let problem = "";
  try {
    const ready = await fetch("health/ready");
    if (!ready.ok) problem = (await ready.json()).error.message;
  } catch {
    problem = "The server does not answer.";
  }
  const wrong = models[0]?.wrong_output;
  tell("state", problem || (wrong ? `ready; its output is wrong: ${wrong.join(", ")}` : "ready"));
  at("state").className = problem ? "down" : "ready";
}

async function learn() {
  models = (await (await call("v1/models")).json()).data;
  at("model").replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  at("max_tokens").max = models[0].max_model_len;
  at("attach").title = seesImages() ? "Attach text files and pictures" : "Attach text files";
}

const model = () => models.find((each) => each.id === at("model").value);
const seesImages = () => model()?.input_modalities?.includes("image") ?? false;

function tell(id, text) {
  if (at(id).textContent !== text) at(id).textContent = text;
}

// --- Turns as elements

function render() {
  at("talk").replaceChildren(...chat.turns.map(articleOf));
  if (!chat.turns.length) {
    at("talk").append(make("p", { className: "empty" }, make("b", {}, "Chat with the model"), "Type a message and press Enter."));
  }
  follow(true);
}

const articles = () => [...at("talk").querySelectorAll("article")];
const articleFor = (turn) => articles()[chat.turns.indexOf(turn)];
const heading = (text) => make("h2", { className: "unseen" }, text);

function act(name, does, { changes = true } = {}) {
  const button = make("button", { type: "button", className: changes ? "changes" : "", disabled: changes && live !== null }, name);
  button.addEventListener("click", () => does(button));
  return button;
}

async function copied(button, text) {
  const name = button.textContent;
  await copy(text).then(() => { button.textContent = "Copied"; }, () => { button.textContent = "Not copied"; });
  tell("told", button.textContent);
  button.addEventListener("blur", () => { button.textContent = name; }, { once: true });
  button.addEventListener("pointerleave", () => { button.textContent = name; }, { once: true });
}

function articleOf(turn) {
  return turn.role === "user" ? questionOf(turn) : answerOf(turn);
}

function questionOf(turn) {
  const acts = make("div", { className: "acts" },
    act("Copy", (button) => copied(button, turn.text), { changes: false }), act("Edit", () => edit(turn)));
  return make("article", { className: "user" }, heading("You"), fileList(turn.files),
    make("div", { className: "text", hidden: !turn.text }, turn.text), acts);
}

function fileList(given, remove) {
  return make("ul", { className: "files" }, ...given.map((file) => {
    const item = make("li", {}, file.image ? make("img", { src: file.image, alt: file.name }) : file.name);
    if (remove) {
      const button = make("button", { type: "button", "aria-label": `Remove ${file.name}` }, "×");
      button.addEventListener("click", () => remove(file));
      item.append(button);
    }
    return item;
  }));
}

function answerOf(turn) {
  const streams = live?.turn === turn;
  const article = make("article", { className: streams ? "assistant live" : "assistant" }, heading("Assistant"));
  if (turn.reasoning || streams) {
    article.append(make("details", { className: "thought", hidden: !turn.reasoning },
      make("summary", {}, "Reasoning"), make("div", {}, turn.reasoning)));
  }
  article.append(make("div", { className: "text" }), make("div", { className: "calls" }));
  say(article, turn);
  if (streams) {
    article.append(make("p", { className: "pace", "aria-hidden": true }));
    return article;
  }
  if (!turn.text && !turn.calls.length && !turn.fault) article.append(make("p", { className: "hint" }, "The answer is empty."));
  if (turn.fault) article.append(make("p", { className: "fault", role: "alert" }, turn.fault));
  if (turn.timing) article.append(timingBar(turn.timing, turn.finish));
  else article.append(make("p", { className: "hint" }, "The answer was interrupted."));
  article.append(make("div", { className: "acts" },
    act("Copy", (button) => copied(button, turn.text || turn.calls.map((each) => each.arguments).join("\n")), { changes: false }),
    act("Regenerate", () => regenerate(turn))));
  return article;
}

/** Show the text and the calls that a turn has by now. */
function say(article, turn) {
  const text = article.querySelector(".text");
  text.hidden = !turn.text && live?.turn !== turn;
  if (turn.json) text.replaceChildren(codeBlock(pretty(turn.text), "json"));
  else draw(text, turn.text);
  article.querySelector(".calls").replaceWith(callsOf(turn));
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function callsOf(turn) {
  const open = live?.turn !== turn && turn === chat.turns.at(-1) && turn.calls.some(whole);
  const box = make(open ? "form" : "div", { className: "calls" });
  for (const each of turn.calls) {
    const part = make("section", { className: "call" }, make("h3", {}, `Calls ${each.name}`), codeBlock(pretty(each.arguments), "json"));
    if (!whole(each)) {
      if (live?.turn !== turn) part.append(make("p", { className: "hint" }, "The call was cut off."));
    } else if (open) {
      const field = make("textarea", { rows: 1, value: each.result, placeholder: "What the tool returns" });
      field.addEventListener("input", () => { each.result = field.value; });
      field.addEventListener("change", () => save());
      part.append(make("label", {}, `Result of ${each.name}`, field));
    } else if (live?.turn !== turn) {
      part.append(make("p", { className: "hint" }, "Result"), make("p", { className: "result" }, each.result || "none given"));
    }
    box.append(part);
  }
  if (open) {
    box.append(make("button", { className: "main changes" }, turn.calls.length > 1 ? "Send results" : "Send result"));
    box.addEventListener("submit", (event) => {
      event.preventDefault();
      generate(chat.turns);
    });
  }
  return box;
}

function follow(always) {
  const talk = at("talk");
  if (always || talk.scrollHeight - talk.scrollTop - talk.clientHeight < 120) talk.scrollTop = talk.scrollHeight;
}

// --- Answers

/** Answer these turns. Where nothing comes, the conversation is as it was, and `restore` gives back what was asked. */
async function generate(turns, restore = () => {}) {
  const wrong = wrongField();
  if (live || wrong) {
    restore();
    return wrong && showField(wrong);
  }
  const system = at("system").value.trim();
  const asked = { ...parameters(), messages: messagesOf(turns, system) };
  const turn = { role: "assistant", text: "", reasoning: "", calls: [], json: "response_format" in asked, finish: "interrupted", fault: "" };
  const run = { turn, before: chat.turns, restore, control: new AbortController(), sent: performance.now(), times: [], usage: null, wrote: -SAVE, paced: 0 };
  live = run;
  chat.turns = [...turns, turn];
  problem("fault", "");
  render();
  busy(true);
  try {
    const stream = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    for await (const chunk of chunks({ ...asked, ...stream }, run.control.signal)) {
      if (live !== run) return;
      take(run, chunk);
    }
    if (live === run) end(run, null);
  } catch (error) {
    if (live === run) end(run, error);
  }
}

function take(run, chunk) {
  const { turn } = run;
  run.usage = chunk.usage ?? run.usage;
  const choice = chunk.choices[0];
  if (!choice) return;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
  turn.finish = choice.finish_reason ?? turn.finish;
  if (!content && !reasoning && !calls) return;
  run.times.push(performance.now() - run.sent);
  turn.text += content ?? "";
  turn.reasoning += reasoning ?? "";
  for (const part of calls ?? []) {
    const each = turn.calls[part.index] ??= { id: part.id, name: "", arguments: "", result: "" };
    each.name += part.function.name ?? "";
    each.arguments += part.function.arguments ?? "";
  }
  if (performance.now() - run.wrote > SAVE) {
    run.wrote = performance.now();
    save();
  }
  run.frame ??= requestAnimationFrame(() => {
    run.frame = undefined;
    if (live === run) grow(run);
  });
}

function grow(run) {
  const { turn } = run;
  const article = articles().at(-1);
  const thought = article.querySelector(".thought");
  thought.hidden = !turn.reasoning;
  thought.lastChild.textContent = turn.reasoning;
  say(article, turn);
  if (performance.now() - run.paced > PACE && run.usage) {
    run.paced = performance.now();
    const speed = rate(timingOf(run.times, run.times.at(-1), run.usage));
    article.querySelector(".pace").textContent =
      `${plural(run.usage.completion_tokens, "token")}${speed ? `, ${speed.toFixed(1)} tokens/s` : ""}`;
  }
  follow();
}

function end(run, error, options) {
  const { turn } = run;
  const came = turn.text || turn.reasoning || turn.calls.length;
  live = null;
  if (came || (!error && turn.finish !== "you")) {
    if (error) Object.assign(turn, { fault: error.message, finish: "an error" });
    turn.timing = timingOf(run.times, performance.now() - run.sent, run.usage);
    articles().at(-1).replaceWith(answerOf(turn));
    follow();
    save(options);
  } else {
    chat.turns = run.before;
    note("");
    render();
    run.restore();
    if (error) problem("fault", error.message);
  }
  const field = error instanceof Refusal ? fieldOf(error.param) : null;
  if (field?.getAttribute("aria-describedby")) mark(field.id, error.message);
  busy(false);
  tell("told", error ? "" : turn.finish === "you" ? "Stopped." : "The answer is complete.");
}

/** End the answer that streams; it keeps what has come. */
function stop(options) {
  if (!live) return;
  const run = live;
  run.turn.finish = "you";
  run.control.abort();
  end(run, null, options);
}

function busy(now) {
  const focused = document.activeElement;
  at("talk").ariaBusy = String(now);
  at("send").hidden = now;
  at("stop").hidden = !now;
  for (const button of at("talk").querySelectorAll(".changes")) button.disabled = now;
  if (now) tell("told", "Answering.");
  if (focused === document.body || focused.closest("[hidden]") || !focused.isConnected) at("prompt").focus();
}

function regenerate(turn) {
  const before = chat.turns;
  generate(before.slice(0, before.indexOf(turn)));
  replaced(before);
}

function edit(turn, text = turn.text) {
  const article = articleFor(turn);
  const field = make("textarea", { rows: 3, value: text, "aria-label": "Your message, edited" });
  const cancel = make("button", { type: "button" }, "Cancel");
  const form = make("form", { className: "edit" }, field, make("div", {}, cancel, make("button", { className: "main" }, "Send")));
  const back = () => {
    article.replaceWith(questionOf(turn));
    at("prompt").focus();
  };
  article.replaceChildren(heading("You"), fileList(turn.files), form);
  cancel.addEventListener("click", back);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const said = field.value.trim();
    if (live || (!said && !turn.files.length)) return;
    const before = chat.turns;
    generate([...before.slice(0, before.indexOf(turn)), { ...turn, text: said }], () => edit(turn, said));
    replaced(before);
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      back();
    }
    if (sends(event)) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  field.focus();
}

/** Offer to take back that turns were replaced. */
function replaced(before) {
  const conversation = chat;
  if (!live) return;
  note("What followed was replaced.", () => {
    if (chat !== conversation) return;
    stop();
    chat.turns = before;
    render();
    save();
  });
}

// --- Conversations

/** Keep the conversation. Writes follow each other; one that waits covers what comes meanwhile. */
function save({ leaving = false } = {}) {
  const conversation = chat;
  conversation.updated = Date.now();
  if (!storage) return;
  address();
  if (leaving) {
    storage.write(conversation, { leaving }).catch(() => {});
    return;
  }
  if (waiting === conversation) return;
  waiting = conversation;
  store(async () => {
    if (waiting === conversation) waiting = null;
    const parted = await storage.write(conversation);
    if (parted) note("Another tab changed this conversation. It goes on here as a copy.");
    if (parted && chat === conversation) address();
  });
}

/** Change what is kept, after all that is under way. */
function store(change) {
  saved = saved.then(change).then(() => problem("storage", ""), (error) => {
    const full = error.name === "QuotaExceededError";
    problem("storage", full ? "The browser's storage is full, so this conversation is not kept. Delete others to make room."
      : `This conversation is not kept: ${error.message}`);
  }).then(list);
}

/** The conversation's own address, so that a reload and a link find it. */
function address() {
  if (location.hash !== `#${chat.id}`) history.replaceState(null, "", `#${chat.id}`);
}

async function list() {
  const found = storage ? await storage.list().catch(() => []) : [];
  const shown = JSON.stringify([chat.id, ...found.map(({ id, title }) => [id, title])]);
  if (at("list").dataset.shown === shown) return; // what is being clicked stays
  at("list").dataset.shown = shown;
  const focused = document.activeElement?.closest("#list a")?.hash;
  at("list").replaceChildren(...found.map(({ id, title }) => {
    const link = make("a", { href: `#${id}`, title }, title || "Untitled");
    if (id === chat.id) link.setAttribute("aria-current", "page");
    const button = make("button", { type: "button", "aria-label": `Delete ${title}`, title: "Delete" }, "×");
    button.addEventListener("click", () => remove(id));
    return make("li", {}, link, button);
  }));
  at("none").hidden = found.length > 0;
  if (focused) [...at("list").querySelectorAll("a")].find((link) => link.hash === focused)?.focus();
}

async function open(id) {
  const turn = ++opening;
  if (id === chat.id) return;
  const found = storage && await saved.then(() => storage.read(id)).catch(() => null);
  if (turn !== opening) return;
  leave();
  enter(found || newConversation());
  if (!found) {
    history.replaceState(null, "", location.pathname + location.search);
    note("That conversation is not kept in this browser.");
  }
}

function begin() {
  opening++;
  leave();
  if (location.hash) history.pushState(null, "", location.pathname + location.search);
  enter(newConversation());
  fold(null);
  at("prompt").focus();
}

function leave(options) {
  stop(options);
  keep(draftName(), JSON.stringify({ text: at("prompt").value, files }), "sessionStorage")
    || keep(draftName(), JSON.stringify({ text: at("prompt").value, files: [] }), "sessionStorage");
}

function enter(conversation) {
  chat = conversation;
  const draft = JSON.parse(kept(draftName(), "sessionStorage") ?? "null");
  at("prompt").value = draft?.text ?? "";
  attached(draft?.files ?? []);
  keep(draftName(), "null", "sessionStorage"); // it is on the screen now
  note("");
  problem("fault", "");
  render();
  list();
}

const draftName = () => `draft.${chat.turns.length ? chat.id : ""}`;

async function remove(id) {
  if (id === chat.id) stop();
  await saved;
  const conversation = id === chat.id ? chat : await storage.read(id);
  if (!conversation) return list();
  const shown = chat === conversation;
  store(() => storage.remove(id));
  if (shown) begin();
  note(`Deleted “${titleOf(conversation)}”.`, () => {
    store(() => storage.write(conversation));
    if (shown) {
      leave();
      enter(conversation);
      address();
    }
  });
  at("undo").focus();
}

/** Another tab has written or removed a conversation. */
async function changed(id) {
  await list();
  if (id !== chat.id || live || document.querySelector(".edit")) return;
  const found = await storage.read(id).catch(() => null);
  if (!found || id !== chat.id || live || found.revision === chat.revision) return;
  chat = found;
  render();
}

// --- What the page says

/** Say what was done, and offer to undo it. */
function note(text, undo = null) {
  at("note").hidden = !text;
  tell("note-text", text);
  at("undo").hidden = !undo;
  follow();
  at("undo").onclick = () => {
    note("");
    undo();
    at("prompt").focus();
  };
}

const problems = { storage: "", fault: "" };
function problem(kind, text) {
  problems[kind] = text;
  const all = Object.values(problems).filter(Boolean).join(" ");
  at("problem").hidden = !all;
  tell("problem", all);
  follow();
}

/** Open one of the panels that narrow windows hide, or none. */
function fold(name) {
  for (const [button, panel] of [["chats", "conversations"], ["fold", "options"]]) {
    const opens = panel === name && !at(panel).classList.contains("open");
    at(panel).classList.toggle("open", opens);
    at(button).setAttribute("aria-expanded", String(opens));
  }
  const covered = document.querySelector(".open") !== null;
  for (const part of document.querySelector("main").children) part.inert = covered;
}

function showField(field) {
  if (!field.checkVisibility()) fold("options");
  field.focus();
  field.reportValidity();
}

// --- The message that is being written

async function attach(given) {
  problem("fault", "");
  for (const file of given) {
    try {
      const read = await readFile(file);
      attached([...files, read]);
    } catch (error) {
      problem("fault", error.message);
    }
  }
  at("prompt").focus();
}

/** A file as a turn has it. Throws Error where the model cannot take it. */
async function readFile(file) {
  const { name } = file;
  const read = seesImages() ? "text and pictures" : "text";
  if (isPicture(file) && !seesImages()) throw new Error(`${name} is a picture, and this model reads text only.`);
  if (isPicture(file)) return { name, image: await pictureUrl(file) };
  const most = BYTES_PER_TOKEN * (model()?.max_model_len ?? Infinity);
  if (file.size > most) {
    throw new Error(`${name} has ${plural(file.size, "byte")}; the model's context of ${plural(most / BYTES_PER_TOKEN, "token")} takes at most ${plural(most, "byte")}.`);
  }
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return { name, text };
  } catch { // told below
  }
  throw new Error(`${name} is not text in UTF-8, and this model reads ${read} only.`);
}

function attached(given) {
  files = given;
  const items = fileList(files, (file) => {
    attached(files.filter((each) => each !== file));
    at("prompt").focus();
  });
  at("attached").replaceChildren(...items.childNodes);
}

const sends = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

function submit() {
  const text = at("prompt").value.trim();
  if ((!text && !files.length) || live) return;
  const question = { role: "user", text, files };
  at("prompt").value = "";
  attached([]);
  generate([...chat.turns, question], () => {
    at("prompt").value = [question.text, at("prompt").value].filter(Boolean).join("\n\n");
    attached([...question.files, ...files]);
  });
}

// --- What is listened to

const listen = (id, event, does) => at(id).addEventListener(event, does);
listen("say", "submit", (event) => { event.preventDefault(); submit(); });
listen("prompt", "keydown", (event) => {
  if (sends(event)) {
    event.preventDefault();
    at("say").requestSubmit();
  }
  const last = chat.turns.findLast((turn) => turn.role === "user");
  if (event.key === "ArrowUp" && !at("prompt").value && last) {
    event.preventDefault();
    at("prompt").value = last.text;
  }
});
listen("talk", "click", (event) => {
  const button = event.target.closest(".copy-code");
  if (button) copied(button, button.closest(".code").querySelector("code").textContent);
});
listen("stop", "click", () => stop());
listen("clear", "click", begin);
listen("attach", "click", () => at("files").click());
listen("files", "change", async () => {
  await attach([...at("files").files]);
  at("files").value = "";
});
listen("prompt", "paste", (event) => {
  if (event.clipboardData.files.length) {
    event.preventDefault();
    attach([...event.clipboardData.files]);
  }
});
listen("dismiss", "click", () => { note(""); at("prompt").focus(); });
listen("chats", "click", () => fold("conversations"));
listen("fold", "click", () => fold("options"));
listen("lock", "cancel", (event) => event.preventDefault());
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    document.body.classList.toggle("dropping", kind === "dragover");
    if (kind === "drop") attach([...event.dataTransfer.files]);
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    stop();
    if (document.querySelector(".open")) fold(null);
  }
  const held = APPLE ? event.ctrlKey && !event.altKey : event.altKey && !event.ctrlKey;
  const only = held && !event.metaKey && !event.shiftKey && !event.getModifierState("AltGraph");
  if (only && event.key.toLowerCase() === "n" && !event.repeat && !at("lock").open) {
    event.preventDefault();
    begin();
  }
});
addEventListener("popstate", () => {
  fold(null);
  if (location.hash) open(location.hash.slice(1));
  else begin();
});
addEventListener("pagehide", () => leave({ leaving: true }));

// --- Start

const system = matchMedia("(prefers-color-scheme: dark)");
const paint = () => { document.documentElement.dataset.theme = kept("theme") ?? (system.matches ? "dark" : "light"); };
system.addEventListener("change", paint);
listen("theme", "click", () => {
  keep("theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  paint();
});
paint();
at("anew-key").textContent = APPLE ? "Control" : "Alt";
at("clear").title += ` (${APPLE ? "Control" : "Alt"}+N)`;
prepare();
enter(chat);
look();
setInterval(look, LOOK);
learn().then(look, (error) => {
  tell("state", error.message);
  at("state").className = "down";
});
Storage.open(changed).then(async (opened) => {
  storage = opened;
  await list();
  if (location.hash) await open(location.hash.slice(1));
}, (error) => problem("storage", `Conversations are not kept: ${error.message}`));
