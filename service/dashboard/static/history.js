// The charts over time and the list of what happened. Keeps the points it has and asks for later
// ones alone.

import * as format from "./format.js";
import { get } from "./api.js";
import { TimeChart } from "./charts.js";
import { byId, element } from "./dom.js";

const MAX_EVENTS = 8;
const LEAST_STEPS = 60; // that a chart is wide
const share = { format: (value) => format.percent(value, 0), most: 1 };

const state = { span: "10m", times: [], columns: {}, step: 1, numPoints: 0, marks: [] };
let charts = [];

export function startHistory(reload) {
  charts = [
    new TimeChart("chart-hit", {
      title: "Hit rate over time, by tier", stacked: true, y: share, latest: "known",
      series: [
        { key: "hit_device", label: "device", colour: "device", area: true },
        { key: "hit_host", label: "host", colour: "host", area: true },
        { key: "hit_disk", label: "disk", colour: "disk", area: true },
      ],
    }),
    new TimeChart("chart-ttft", {
      title: "Time to first token, hits against misses", latest: "known",
      y: { format: format.seconds, least: 0.001 },
      series: [
        { key: "ttft_hit_p50", label: "hit p50", colour: "hit" },
        { key: "ttft_hit_p95", label: "hit p95", colour: "hit", dash: true },
        { key: "ttft_miss_p50", label: "miss p50", colour: "miss" },
        { key: "ttft_miss_p95", label: "miss p95", colour: "miss", dash: true },
      ],
    }),
    new TimeChart("chart-throughput", {
      title: "Prompt tokens per second, computed against saved", stacked: true,
      y: { format: format.perSecond, least: 1 },
      series: [
        { key: "computed_per_s", label: "computed", colour: "miss", area: true },
        { key: "hit_per_s", label: "saved", colour: "hit", area: true },
      ],
    }),
    new TimeChart("chart-itl", {
      title: "Inter-token latency", latest: "known", y: { format: format.seconds, least: 0.001 },
      series: [
        { key: "itl_p50", label: "p50", colour: "plain" },
        { key: "itl_p95", label: "p95", colour: "plain", dash: true },
      ],
    }),
    new TimeChart("chart-generated", {
      title: "Output tokens per second", y: { format: format.perSecond, least: 1 },
      series: [{ key: "generated_per_s", label: "generated", colour: "plain", area: true }],
    }),
    new TimeChart("chart-load", {
      title: "Requests running and waiting", y: { format: (value) => Number(value.toFixed(1)).toString(),
        least: 1 },
      series: [
        { key: "running", label: "running", colour: "locked", area: true },
        { key: "queued", label: "waiting for a first token", colour: "queue" },
      ],
    }),
  ];
  byId("spans").addEventListener("change", (event) => {
    Object.assign(state, { span: event.target.value, times: [], columns: {} });
    reload();
  });
}

/** Below the device there are not always tiers. */
export function setTiers(names) {
  charts[0].showOnly((key) => names.includes(key.replace("hit_", "")));
}

export async function loadHistory(now) {
  const { span } = state;
  const after = state.times.at(-1) ?? 0;
  const body = await get(`/dashboard/data/series?span=${span}&after=${after}`);
  if (span !== state.span) return; // another one was chosen meanwhile
  append(body);
  // Of a server that has just started, what there is.
  const begin = Math.min(state.times[0] ?? now, now - LEAST_STEPS * body.step_s);
  const extent = [Math.max(begin, now - body.step_s * body.num_points), now];
  for (const chart of charts) chart.show(state.times, state.columns, state.marks, extent);
  showEvents(now);
  byId("span-note").textContent = `each point over ${format.duration(body.window_s)}`;
}

function append(body) {
  const known = state.times.length;
  const excess = Math.max(0, known + body.times.length - body.num_points);
  state.times = [...state.times, ...body.times].slice(excess);
  for (const [name, values] of Object.entries(body.columns)) {
    const earlier = state.columns[name] ?? new Array(known).fill(null);
    state.columns[name] = [...earlier, ...values].slice(excess);
  }
  state.marks = body.marks;
}

function showEvents(now) {
  const latest = state.marks.slice(-MAX_EVENTS).reverse();
  byId("events").replaceChildren(...latest.map((mark) =>
    element("li", {}, element("span", { class: `tick ${mark.kind}` }),
      element("span", { class: "num" }, format.moment(mark.at, now)), " ", mark.text)));
  byId("no-events").hidden = latest.length > 0;
}
