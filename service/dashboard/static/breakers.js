// What breaks prefixes, the costliest first: where it stands, what it costs, what to do about it.

import * as format from "./format.js";
import { byId, element } from "./dom.js";

export function showBreakers(breakers) {
  byId("no-breakers").hidden = breakers.length > 0;
  byId("breakers").replaceChildren(...breakers.map(row));
}

function row(breaker) {
  return element("li", {},
    element("p", { class: "row" }, element("b", {}, breaker.title),
      element("span", { class: "num miss" }, `${format.compact(breaker.num_tokens_lost)} tokens lost`)),
    element("p", { class: "note num" }, breaker.detail),
    element("p", {}, breaker.suggestion));
}
