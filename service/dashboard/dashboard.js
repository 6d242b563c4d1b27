"use strict";
// Polls /dashboard/data and shows it. All figures come from the server's own metrics.

const POLL_MS = 1000;
const HISTORY = 180; // polls kept for the small charts
const WINDOW = "5m"; // which of the server's windows the recent figures are of
const LIVE = "1m"; // and the small charts
const KEY = "headstart-admin-key";
const NONE = "–";

const byId = (id) => document.getElementById(id);
const history = { hit: [], itl: [], running: [], queue: [] };

function put(id, text, raw) {
  const node = byId(id);
  node.textContent = text;
  if (raw === undefined || raw === null) delete node.dataset.value;
  else node.dataset.value = String(raw);
}

function seconds(value) {
  if (value === null) return NONE;
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

function percent(rate) {
  return rate === null ? NONE : `${(rate * 100).toFixed(1)} %`;
}

function count(value) {
  return value.toLocaleString("en-US");
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value.toFixed(unit > 1 && value < 100 ? 1 : 0)} ${units[unit]}`;
}

function duration(value) {
  const [days, hours] = [Math.floor(value / 86400), Math.floor(value / 3600) % 24];
  const [minutes, rest] = [Math.floor(value / 60) % 60, Math.floor(value) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${rest} s` : `${rest} s`;
}

function remember(name, value) {
  history[name].push(value);
  if (history[name].length > HISTORY) history[name].shift();
  return history[name];
}

function showState(state, text) {
  const node = byId("state");
  if (node.textContent !== text) node.textContent = text;
  node.dataset.state = state;
}

function showHead(data) {
  byId("models").textContent = data.models.join(", ");
  byId("up").hidden = false;
  put("uptime", duration(data.uptime_s), data.uptime_s);
  if (data.ready) showState("ready", "ready");
  else showState(data.workers.length ? data.workers[0].state : "failed", data.reason);
}

function showHitRate(data) {
  const recent = data.windows[WINDOW].hit_rate;
  const total = data.hit_rate;
  put("hit-recent", percent(recent.rate), recent.rate);
  put("hit-total", percent(total.rate), total.rate);
  put("tokens-hit", count(total.hit), total.hit);
  put("tokens-queried", count(total.queried), total.queried);
  drawSpark(byId("spark-hit"), remember("hit", data.windows[LIVE].hit_rate.rate), 1);
}

function showFirstToken({ ttft_hit_s: hit, ttft_miss_s: miss }) {
  const times = { "hit-p50": hit.p50, "hit-p95": hit.p95, "miss-p50": miss.p50, "miss-p95": miss.p95 };
  const longest = Math.max(...Object.values(times).map((value) => value ?? 0));
  for (const [name, value] of Object.entries(times)) {
    put(`ttft-${name}`, seconds(value), value);
    drawBar(byId(`bar-${name}`), value === null ? null : value / longest);
  }
  put("ttft-hit-count", count(hit.count), hit.count);
  put("ttft-miss-count", count(miss.count), miss.count);
  const gain = hit.p50 && miss.p50 ? miss.p50 / hit.p50 : null;
  byId("ttft-gain").textContent =
    gain === null ? "hits against misses" : `median hit ${gain.toFixed(1)}× as fast as a miss`;
}

function showLoad(data) {
  const itl = data.windows[WINDOW].itl_s;
  const { running, waiting, queued, in_flight: inFlight } = data.requests;
  put("itl-p50", seconds(itl.p50), itl.p50);
  put("itl-p95", seconds(itl.p95), itl.p95);
  put("running", count(running), running);
  put("in-flight", count(inFlight), inFlight);
  put("queued", count(queued), queued);
  put("waiting", count(waiting), waiting);
  drawSpark(byId("spark-itl"), remember("itl", data.windows[LIVE].itl_s.p50));
  drawSpark(byId("spark-running"), remember("running", running));
  drawSpark(byId("spark-queue"), remember("queue", queued));
}

function showMemory({ total, used, evictable, free, bytes_per_block: perBlock }) {
  const share = (blocks) => (total ? ` · ${Math.round((blocks / total) * 100)} %` : "");
  const size = (blocks) => (perBlock ? bytes(blocks * perBlock) : `${count(blocks)} blocks`);
  const parts = { "kv-locked": used, "kv-evictable": evictable, "kv-free": free };
  for (const [id, blocks] of Object.entries(parts)) put(id, size(blocks) + share(blocks), blocks);
  put("kv-size", `${size(total)} in ${count(total)} blocks`, total);
  const bar = byId("kv-bar");
  drawStack(bar, [
    { name: "used", value: used },
    { name: "evictable", value: evictable },
    { name: "free", value: free },
  ]);
  bar.setAttribute("aria-label",
    `KV blocks: ${used} used by requests, ${evictable} cached and evictable, ${free} free`);
}

function element(name, className, text) {
  const node = document.createElement(name);
  node.className = className;
  node.textContent = text;
  return node;
}

function showWorkers(workers) {
  byId("workers").replaceChildren(...workers.map((worker) => {
    const dot = element("span", "dot", "");
    dot.dataset.state = worker.state;
    const facts = [worker.device, worker.dtype, worker.detail].filter(Boolean);
    if (worker.state === "ready") {
      facts.push(`${worker.running} running`, `${worker.waiting} waiting`);
      if (worker.step_s > 0) facts.push(`last step ${seconds(worker.step_s)}`);
    }
    const item = document.createElement("li");
    item.append(dot, element("span", "name", worker.worker_id),
      element("span", "facts", [worker.state, ...facts].join(" · ")));
    return item;
  }));
}

function show(data) {
  showHead(data);
  showHitRate(data);
  showFirstToken(data.windows[WINDOW]);
  showLoad(data);
  showMemory(data.kv_blocks);
  showWorkers(data.workers);
  const board = byId("board");
  board.classList.remove("stale");
  board.setAttribute("aria-busy", "false");
}

function askForKey(wasGiven) {
  sessionStorage.removeItem(KEY);
  byId("key-form").hidden = false;
  byId("board").hidden = true;
  showState("offline", wasGiven ? "this key does not open the dashboard" : "needs a key");
}

async function poll() {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  try {
    const response = await fetch("/dashboard/data", { headers, cache: "no-store" });
    if (response.status === 401 || response.status === 403) {
      askForKey(key !== null);
      return; // goes on when a key is entered
    }
    if (!response.ok) throw new Error(`status ${response.status}`);
    const data = await response.json();
    byId("key-form").hidden = true;
    byId("board").hidden = false;
    show(data);
  } catch {
    showState("offline", "no connection");
    byId("board").classList.add("stale");
  }
  setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  poll();
});
poll();
