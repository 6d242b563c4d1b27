// The miss-ratio curve: which hit rate the recent requests would have had with other sizes.

import * as format from "./format.js";
import { SizeChart } from "./charts.js";
import { byId } from "./dom.js";

let chart = null;

export function startCurve() {
  chart = new SizeChart("chart-curve", {
    title: "Hit rate by size of the cache, on a logarithmic scale", latest: "none", hasPoints: false,
    x: { format: format.bytes, scale: { distr: 3 }, axis: { splits, filter: (u, all) => all } },
    y: { format: (value) => format.percent(value, 0), most: 1 },
    series: [
      { key: "size", label: "at this size", colour: "hit", area: true },
      { key: "ideal", label: "without bounds", colour: "plain", dash: true },
    ],
  });
}

/** Powers of two, or of four where there are many. */
function splits(u, index, low, high) {
  const doublings = Math.log2(high / low);
  const step = Math.max(1, Math.ceil(doublings / Math.max(2, u.width / 110)));
  const found = [];
  for (let power = Math.ceil(Math.log2(low)); 2 ** power <= high; power += step)
    found.push(2 ** power);
  return found;
}

export function showCurve(curve) {
  const hasPoints = curve !== null && curve.points.length > 1;
  byId("chart-curve").hidden = !hasPoints;
  byId("curve-note").textContent = hasPoints
    ? `by the last ${format.count(curve.num_requests)} requests` : "";
  byId("curve-said").textContent = hasPoints ? sentence(curve)
    : "Not enough requests yet to tell.";
  if (!hasPoints) return;
  const sizes = curve.points.map((point) => point.num_bytes);
  const marks = curve.sizes.map((size) => ({ at: size.num_bytes, kind: "now",
    text: `${size.name}: ${format.bytes(size.num_bytes)}, ${format.percent(size.hit_rate)}` }));
  chart.show(sizes, [curve.points.map((point) => point.hit_rate),
    sizes.map(() => curve.ideal_hit_rate)], marks);
  chart.say([curve.sizes.at(-1)?.hit_rate, curve.ideal_hit_rate]);
}

function sentence(curve) {
  const now = curve.sizes.at(-1);
  if (!now) return "";
  const twice = curve.points.find((point) => point.num_bytes >= 2 * now.num_bytes)
    ?? curve.points.at(-1);
  const gain = Math.max(0, twice.hit_rate - now.hit_rate);
  return `With the ${format.bytes(now.num_bytes)} there are: ${format.percent(now.hit_rate)}. ` +
    `Twice as much would find ${format.percent(gain)} more of the prompt tokens, ` +
    `no bounds at all ${format.percent(Math.max(0, curve.ideal_hit_rate - now.hit_rate))} more.`;
}
