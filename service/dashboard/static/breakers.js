// What breaks prefixes, the costliest first: where it stands, what it costs, what to do about it.

import * as format from "./format.js";
import { byId, element } from "./dom.js";

const MAX_ROWS = 6;
const KINDS = {
  clock: "A date or time", id: "An id or counter", reordered_tools: "Tools in another order",
  edited_tools: "Other tools", edited_message: "An edited message", edited_prompt: "An edited prompt",
  template: "Other tokens for the same text",
};

export function showBreakers(breakers, now) {
  byId("no-breakers").hidden = breakers.length > 0;
  byId("breakers").replaceChildren(...breakers.slice(0, MAX_ROWS).map((one) => row(one, now)));
}

function row(breaker, now) {
  const lost = element("span", { class: "num miss" },
    `${format.compact(breaker.num_lost_tokens)} tokens lost`);
  const title = element("b", {}, `${KINDS[breaker.kind] ?? breaker.kind} in `,
    element("code", {}, breaker.field || "the prompt"));
  const figures = [
    `${format.count(breaker.num_requests)} requests, ${format.percent(breaker.share, 0)} of the latest`,
    `last ${format.ago(breaker.last_at, now)}`,
    ...(breaker.tenant && breaker.tenant !== "default" ? [breaker.tenant] : []),
  ].join(" · ");
  return element("li", {}, element("p", { class: "row" }, title, lost),
    element("p", { class: "note num" }, figures),
    element("p", { class: "advice" }, breaker.suggestion));
}
