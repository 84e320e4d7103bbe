// Markdown as elements. marked reads it, and each of its tokens becomes an element here: HTML in an answer is text, a
// picture is a link (loading one would tell its server), and a link leads to the web or to mail.

import { Lexer, defaults } from "./marked.js";
import { make } from "./dom.js";

const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const SCHEMES = ["http:", "https:", "mailto:"];
const HEADING = 2; // level of the heading that an answer stands under
const drawn = new WeakMap(); // box → what its blocks were made from

/** Show Markdown in a box. Blocks that are as they were stay, so that an answer may grow at its end. */
export function draw(box, text) {
  const blocks = parse(text);
  const before = drawn.get(box) ?? [];
  const now = blocks.map((block) => `${block.level ?? ""} ${block.links} ${block.raw}`);
  let same = 0;
  while (same < before.length && before[same] === now[same]) same++;
  while (box.childNodes.length > same) box.lastChild.remove();
  box.append(...blocks.slice(same).map(blockOf));
  drawn.set(box, now);
}

function parse(text) {
  let tokens;
  try {
    tokens = Lexer.lex(text, { ...defaults, breaks: true });
  } catch { // nested too deep
    return [{ type: "html", raw: text }];
  }
  const links = Object.keys(tokens.links).join(" ");
  const blocks = tokens.filter((token) => token.type !== "space" && token.type !== "def");
  let level = HEADING;
  for (const block of blocks) {
    if (block.type === "heading") block.level = level = Math.min(HEADING + block.depth, level + 1, 6);
    block.links = links;
  }
  return blocks;
}

function blockOf(token) {
  switch (token.type) {
    case "heading": return make(token.level ? `h${token.level}` : "p", { className: "heading" }, ...spans(token.tokens));
    case "paragraph": return make("p", {}, ...spans(token.tokens));
    case "code": return codeBlock(token.text, token.lang?.match(/^\S+/)?.[0]);
    case "blockquote": return make("blockquote", {}, ...blocksOf(token.tokens));
    case "list": {
      const items = token.items.map((item) => make("li", {}, ...blocksOf(item.tokens)));
      return make(token.ordered ? "ol" : "ul", token.ordered ? { start: token.start } : {}, ...items);
    }
    case "table": return tableOf(token);
    case "hr": return make("hr");
    case "text": return make("span", {}, ...span(token));
    case "checkbox": return span(token)[0];
    default: return make("p", { className: "plain" }, token.raw.trimEnd());
  }
}
const blocksOf = (tokens) => tokens.filter((token) => token.type !== "space" && token.type !== "def").map(blockOf);

export function codeBlock(text, language = "") {
  const head = make("div", { className: "head" }, make("span", {}, language),
    make("button", { type: "button", className: "copy-code", "aria-label": "Copy the code" }, "Copy"));
  const code = make("pre", { tabIndex: 0, role: "group", "aria-label": `Code ${language}`.trim() }, make("code", {}, text));
  return make("div", { className: "code" }, head, code);
}

function tableOf(token) {
  const cell = (tag) => (each) => {
    const made = make(tag, {}, ...spans(each.tokens));
    if (each.align) made.style.textAlign = each.align;
    return made;
  };
  const head = make("thead", {}, make("tr", {}, ...token.header.map(cell("th"))));
  const rows = token.rows.map((row) => make("tr", {}, ...row.map(cell("td"))));
  const table = make("table", {}, head, make("tbody", {}, ...rows));
  return make("div", { className: "wide", tabIndex: 0, role: "group", "aria-label": "Table" }, table);
}

const spans = (tokens) => tokens.flatMap(span);

function span(token) {
  switch (token.type) {
    case "text": return token.tokens ? spans(token.tokens) : [token.escaped ? token.text : decoded(token.text)];
    case "escape": return [token.text];
    case "strong": case "em": case "del": return [make(token.type, {}, ...spans(token.tokens))];
    case "codespan": return [make("code", {}, token.text)];
    case "br": return [make("br")];
    case "checkbox": return [make("input", { type: "checkbox", checked: token.checked, disabled: true, "aria-label": "Done" })];
    case "link": return [linkTo(token.href, spans(token.tokens))];
    case "image": return [linkTo(token.href, [decoded(token.text) || token.href])];
    default: return [token.raw];
  }
}

function linkTo(given, children) {
  const href = decoded(given);
  const url = URL.canParse(href) ? new URL(href) : null;
  if (!SCHEMES.includes(url?.protocol)) return make("span", {}, ...children);
  return make("a", { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

/** Text with its character references resolved; those that few know stay as they are. */
function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w+));/gi, (all, decimal, hex, name) => {
    const code = decimal ? Number(decimal) : parseInt(hex, 16);
    if (name) return ENTITIES[name] ?? all;
    return code && code <= 0x10ffff ? String.fromCodePoint(code) : "\ufffd";
  });
}
