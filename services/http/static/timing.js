// When the parts of an answer came. What is kept of it: {first, last, total} in ms since the request, or null where
// nothing came; `ticks`, places of chunks in thousandths of the whole; `usage` as the server told it.

import { make } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const seconds = (ms) => ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(2)} s`;

/** `times` of chunks and `end` in ms since the request. */
export function timingOf(times, end, usage) {
  const total = Math.max(end, 1);
  const ticks = [...new Set(times.map((time) => Math.min(Math.round(time / total * 1000), 998)))];
  return { first: times[0] ?? null, last: times.at(-1) ?? null, total, ticks, usage };
}

/** Output tokens per second after the first; 0 where that says nothing. */
export function rate(timing) {
  const count = timing.usage?.completion_tokens ?? 0;
  return count > 1 && timing.last > timing.first ? (count - 1) / (timing.last - timing.first) * 1000 : 0;
}

export function timingBar(timing, finish) {
  const { first, total, ticks, usage } = timing;
  const start = first === null ? 1000 : first / total * 1000;
  const picture = shape("svg", { viewBox: "0 0 1000 16", preserveAspectRatio: "none", role: "img",
    "aria-label": "When the parts of the answer came" });
  picture.append(
    shape("rect", { class: "wait", x: 0, width: start, height: 16 }),
    shape("rect", { class: "run", x: start, width: 1000 - start, height: 16 }),
    shape("path", { class: "ticks", d: ticks.map((tick) => `M${tick} 0h2v16h-2z`).join("") }),
  );
  const list = make("dl");
  const row = (name, value) => list.append(make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  if (first !== null) row("first token", seconds(first));
  if (rate(timing)) row("speed", `${rate(timing).toFixed(1)} tokens/s`);
  if (usage) {
    row("tokens", `${usage.prompt_tokens} in, ${usage.completion_tokens} out`);
    const cached = usage.prompt_tokens_details?.cached_tokens;
    if (cached) row("cached", `${cached}`);
    const drafted = usage.completion_tokens_details?.accepted_prediction_tokens;
    if (drafted) row("drafted", `${drafted}`);
  }
  row("in all", seconds(total));
  if (finish && finish !== "stop") row("ended by", finish);
  return make("div", { className: "timing" }, picture, list);
}

function shape(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
