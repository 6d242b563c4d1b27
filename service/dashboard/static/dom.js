// The page's own few ways to its elements. All text goes through textContent, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** Show `text`; `raw` is the figure behind it, for whoever reads the page by program. */
export function put(id, text, raw) {
  const node = byId(id);
  if (node.textContent !== text) node.textContent = text;
  if (raw === undefined || raw === null) delete node.dataset.value;
  else node.dataset.value = String(raw);
}

/** An element with attributes and children; strings among these become text. */
export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, String(value));
  node.append(...children);
  return node;
}

export function shape(name, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, String(value));
  node.append(...children);
  return node;
}

/** Parts of one bar, [{name, value, title}], of `whole`; widths through the DOM, so no style text. */
export function bar(parts, whole, label) {
  const node = element("div", { class: "bar", role: "img", "aria-label": label });
  for (const { name, value, title } of parts) {
    if (!(value > 0) || !(whole > 0)) continue;
    const part = element("span", { class: `part ${name}` });
    part.style.width = `${(value / whole) * 100}%`;
    if (title) part.title = title;
    node.append(part);
  }
  return node;
}

/** The value of a colour of the style sheet. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function empty(text) {
  return element("p", { class: "empty" }, text);
}
