// Elements are made here and by nothing that reads HTML.

export const at = (id) => document.getElementById(id);

/** An element with these properties, attributes where the name has a dash or is `role`, and children. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "role" || name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** Put text on the clipboard, also where a page without TLS may not use the newer way. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const had = document.activeElement;
  const box = make("textarea", { value: text, className: "unseen" });
  document.body.append(box);
  box.select();
  document.execCommand("copy");
  box.remove();
  had?.focus();
}
