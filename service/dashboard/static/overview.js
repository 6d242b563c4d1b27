// The top line, the figures, the memory and the workers: what is so at this moment.

import * as format from "./format.js";
import { bar, byId, element, put } from "./dom.js";

const WINDOW = "5m"; // which of the server's windows the recent figures are of
const TIERS = { device: "Device", host: "Host memory", disk: "Disk" };

export function showState(state, cause, since, now) {
  const node = byId("state");
  if (node.textContent !== state) node.textContent = state;
  byId("top").dataset.state = state;
  put("cause", cause);
  byId("since").hidden = since === undefined;
  if (since === undefined) return;
  put("since-at", format.moment(since, now), since);
  put("since-for", format.duration(now - since));
}

export function showOverview(data) {
  showState(data.status.state, data.status.cause, data.status.since, data.at);
  put("models", data.models.join(", "));
  showHitRate(data);
  showTimes(data.windows[WINDOW]);
  showLoad(data);
  showMemory(data);
  showWorkers(data.workers);
}

function showHitRate(data) {
  const [recent, total] = [data.windows[WINDOW].hit_rate, data.hit_rate];
  put("hit-recent", format.percent(recent.rate), recent.rate);
  put("hit-total", format.percent(total.rate), total.rate);
  put("tokens-hit", format.compact(total.hit), total.hit);
  put("tokens-queried", format.compact(total.queried), total.queried);
  put("saved-tokens", format.compact(total.hit), total.hit);
  put("computed-tokens", format.compact(total.queried - total.hit), total.queried - total.hit);
  put("saved-time", format.duration(data.totals.prefill_saved_s), data.totals.prefill_saved_s);
}

function showTimes({ ttft_hit_s: hit, ttft_miss_s: miss, itl_s: itl }) {
  for (const [name, times] of [["hit", hit], ["miss", miss]]) {
    put(`ttft-${name}-p50`, format.seconds(times.p50), times.p50);
    put(`ttft-${name}-p95`, format.seconds(times.p95), times.p95);
    put(`ttft-${name}-count`, format.count(times.count), times.count);
  }
  const gain = hit.p50 && miss.p50 ? miss.p50 / hit.p50 : null;
  put("ttft-gain", gain === null ? "hits against misses"
    : `the median hit is ${gain.toFixed(1)}× as fast`, gain);
  put("itl-p50", format.seconds(itl.p50), itl.p50);
  put("itl-p95", format.seconds(itl.p95), itl.p95);
}

function showLoad({ requests, totals }) {
  put("running", format.count(requests.running), requests.running);
  put("waiting", format.count(requests.waiting), requests.waiting);
  put("queued", format.count(requests.queued), requests.queued);
  put("in-flight", format.count(requests.in_flight), requests.in_flight);
  put("generated", format.compact(totals.generated_tokens), totals.generated_tokens);
  put("ended", format.compact(requests.ended.stop + requests.ended.length));
  put("failed", format.compact(requests.ended.error), requests.ended.error);
}

function showMemory({ memory, block_size: blockSize }) {
  byId("memory").replaceChildren(...memory.map((tier) => memoryRow(tier, blockSize)));
}

function memoryRow(tier, blockSize) {
  const size = (count) => tier.bytes_per_block
    ? format.bytes(count * tier.bytes_per_block) : `${format.compact(count)} blocks`;
  const parts = [
    { name: "locked", label: "used by requests", value: tier.locked },
    { name: "evictable", label: "cached, evictable", value: tier.evictable },
    { name: "free", label: "free", value: tier.free },
  ].map((part) => ({ ...part, title: `${part.label}: ${size(part.value)}` }));
  const figures = element("dl", { class: "figures" });
  for (const { name, label, value } of parts) {
    if (name === "locked" && tier.tier !== "device") continue;
    const share = tier.total ? ` · ${format.percent(value / tier.total, 0)}` : "";
    const shown = element("dd", { id: `kv-${tier.tier}-${name}` }, size(value) + share);
    shown.dataset.value = value;
    const term = element("dt", {}, element("span", { class: `swatch ${name}` }), label);
    figures.append(element("div", {}, term, shown));
  }
  const total = element("span", { class: "note", id: `kv-${tier.tier}-total` },
    `${size(tier.total)} for ${format.compact(tier.total * (blockSize ?? 0))} tokens`);
  total.dataset.value = tier.total;
  const said = parts.map(({ label, value }) => `${value} blocks ${label}`).join(", ");
  const name = TIERS[tier.tier] ?? tier.tier;
  return element("div", { class: "tier" },
    element("div", { class: "row" }, element("h3", {}, name), total),
    bar(parts, tier.total, `${name}: ${said}`), figures);
}

function showWorkers(workers) {
  const rows = workers.map((worker) => {
    const facts = [worker.device, worker.dtype, worker.detail].filter(Boolean);
    if (worker.state === "ready") {
      facts.push(`${worker.running} running`, `${worker.waiting} waiting`);
      if (worker.step_s > 0) facts.push(`last step ${format.seconds(worker.step_s)}`);
    }
    const dot = element("span", { class: "dot", "data-state": worker.state });
    return element("li", {}, dot, element("span", { class: "name" }, worker.worker_id),
      element("span", { class: "facts" }, [worker.state, ...facts].join(" · ")));
  });
  byId("workers").replaceChildren(...rows);
  byId("no-workers").hidden = rows.length > 0;
}
