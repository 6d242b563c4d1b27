// The tree of prefixes that recent requests have in common: drawn, and as a list.

import * as format from "./format.js";
import { bar, byId, element, shape } from "./dom.js";

const LEAST_HEIGHT = 2;
const MAX_ROWS = 10;

export function showPrefixes(prefixes, now) {
  const { nodes } = prefixes;
  byId("prefix-note").textContent = prefixes.num_requests
    ? `${format.count(prefixes.num_requests)} requests since ${format.moment(prefixes.since, now)}`
    : "";
  const reason = prefixes.is_kept ? "No two requests had a block of their prompts in common yet."
    : "The server keeps no history of requests (--no-request-history).";
  byId("prefix-tree").toggleAttribute("hidden", !nodes.length);
  byId("prefix-key").hidden = !nodes.length;
  byId("prefix-list").replaceChildren(...(nodes.length
    ? rowsOf(prefixes) : [element("li", { class: "empty" }, reason)]));
  draw(nodes);
}

const detail = (node) => `${format.count(node.num_tokens)} tokens after ` +
  `${format.count(node.num_tokens_before)}, ${format.count(node.num_requests)} requests, ` +
  `${format.percent(node.hit_share, 0)} of it found in the cache`;

/** To the right are tokens, downwards requests: an area is traffic, and the filled part was found. */
function draw(nodes) {
  const deepest = Math.max(...nodes.map((node) => node.num_tokens_before + node.num_tokens), 1);
  const shared = nodes.filter((node) => node.parent === null)
    .reduce((sum, node) => sum + node.num_requests, 0);
  const svg = byId("prefix-tree");
  const [width, height] = [svg.clientWidth || 1000, svg.clientHeight || 260];
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const scale = { x: width / deepest, y: height / Math.max(1, shared) };
  const next = new Map([[null, 0]]); // where the next child of a node begins
  const shapes = nodes.flatMap((node, index) => {
    const y = next.get(node.parent);
    const rows = node.num_requests * scale.y;
    next.set(node.parent, y + rows);
    next.set(index, y);
    return rows < LEAST_HEIGHT ? [] : [block(node, y, rows, scale)];
  });
  svg.replaceChildren(...shapes);
}

function block(node, y, height, scale) {
  const [x, width] = [node.num_tokens_before * scale.x, node.num_tokens * scale.x];
  const [w, h] = [Math.max(1, width - 1.5), Math.max(1, height - 1.5)];
  const group = shape("g", {}, shape("title"),
    shape("rect", { class: "miss", x, y, width: w, height: h, rx: 2 }),
    shape("rect", { class: "hit", x, y, width: w * node.hit_share, height: h, rx: 2 }));
  group.firstChild.textContent = detail(node);
  if (h > 15 && w > 70) {
    const label = shape("text", { x: x + 6, y: y + Math.min(h / 2 + 4, 17) });
    label.textContent = w > 150
      ? `${format.compact(node.num_tokens)} tok · ${format.compact(node.num_requests)}×`
      : `${format.compact(node.num_requests)}×`;
    group.append(label);
  }
  return group;
}

function rowsOf({ nodes }) {
  const depth = [];
  for (const node of nodes) depth.push(node.parent === null ? 0 : depth[node.parent] + 1);
  const widest = Math.max(...nodes.map((node) => node.share));
  const listed = largest(nodes);
  const rows = nodes.flatMap((node, index) =>
    listed.has(index) ? [row(node, depth[index], widest)] : []);
  const numLeft = nodes.length - rows.length;
  if (numLeft > 0)
    rows.push(element("li", { class: "empty" }, `and ${numLeft} that come to less`));
  return rows;
}

/** Those that come to most, with all that they stand on. */
function largest(nodes) {
  const chosen = new Set();
  const order = nodes.map((_, index) => index).sort((a, b) => nodes[b].share - nodes[a].share);
  for (const first of order) {
    if (chosen.size >= MAX_ROWS) break;
    for (let at = first; at !== null && !chosen.has(at); at = nodes[at].parent) chosen.add(at);
  }
  return chosen;
}

function row(node, depth, widest) {
  const found = { name: "hit", value: node.share * node.hit_share };
  const missed = { name: "miss", value: node.share * (1 - node.hit_share) };
  const item = element("li", {},
    element("span", { class: "tokens num" }, `${format.count(node.num_tokens)} tokens`),
    element("span", { class: "num" }, `${format.count(node.num_requests)} requests`),
    element("span", { class: "num" }, `${format.percent(node.hit_share, 0)} found`),
    element("span", { class: "num" }, `${format.percent(node.share)} of traffic`),
    bar([found, missed], widest, `${format.percent(node.share)} of traffic`));
  item.style.setProperty("--depth", Math.min(depth, 6));
  if (node.preview !== null) item.append(element("span", { class: "preview" }, node.preview));
  return item;
}
