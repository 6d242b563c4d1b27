// The latest requests, each with its way through queue, load, prefill and decode.

import * as format from "./format.js";
import { bar, byId, element } from "./dom.js";

const STEPS = [
  ["queue", "queue_s"], ["load", "load_s"], ["prefill", "prefill_s"], ["decode", "decode_s"],
];

export function showRequests({ requests }, now) {
  byId("request-table").hidden = !requests.length;
  byId("request-key").hidden = !requests.length;
  byId("no-requests").hidden = requests.length > 0;
  const longest = Math.max(...requests.map(whole), 0.001);
  byId("request-rows").replaceChildren(...requests.map((request) => rowOf(request, now, longest)));
}

const whole = (request) => STEPS.reduce((sum, [, key]) => sum + (request[key] ?? 0), 0);
const cell = (name, ...children) => element("td", { role: "cell", class: name }, ...children);

function rowOf(request, now, longest) {
  const { num_prompt_tokens: prompt, num_cached_tokens: cached } = request;
  const times = STEPS.filter(([, key]) => request[key] !== null)
    .map(([name, key]) => `${name} ${format.seconds(request[key])}`).join(", ");
  const parts = STEPS.map(([name, key]) => ({ name, value: request[key] ?? 0, title: times }));
  const tiers = [["device", request.num_device_tokens], ["host", request.num_host_tokens],
    ["disk", request.num_disk_tokens]].map(([name, value]) => ({ name, value }));
  const said = `${format.count(cached)} of ${format.count(prompt)} prompt tokens cached`;
  const name = element("th", { role: "rowheader", scope: "row", class: "at num" },
    format.clock(request.started_at));
  name.title = request.request_id;
  return element("tr", { role: "row" }, name,
    cell("who", request.session || request.tenant || request.model),
    cell("cached", element("div", { class: "beside" }, bar(tiers, prompt, said),
      element("span", { class: "num" }, `${format.compact(cached)} / ${format.compact(prompt)}`))),
    cell("reason", request.reason),
    cell("timeline", bar(parts, longest, times || "not begun")),
    cell("num ttft", format.seconds(request.ttft_s)),
    cell("num out", format.count(request.num_output_tokens)),
    cell(`outcome ${request.outcome}`, request.outcome));
}
