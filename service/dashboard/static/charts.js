// Charts over time and over size, drawn by uPlot: legend, tooltip, marks. A chart knows numbers and
// how they are written, not what they mean.

import { clock, NONE } from "./format.js";
import { byId, colour, element } from "./dom.js";

const HEIGHT = 164;
const MARK_REACH = 8; // pixels on either side of the pointer
const MARK_COLOURS = {
  start: "mark-good", restart: "mark-warn", lost: "mark-bad", reset: "mark-warn",
  model: "mark-info", template: "mark-info", now: "locked",
};

const charts = new Set();
const dark = matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => charts.forEach((chart) => chart.redraw()));

const isKnown = (value) => value !== null && value !== undefined && !Number.isNaN(value);
const font = () => `11px ${getComputedStyle(document.body).fontFamily}`;

function axis(options) {
  return {
    stroke: () => colour("muted"),
    font: font(),
    labelFont: font(),
    grid: { stroke: () => colour("grid"), width: 1 },
    ticks: { show: false },
    gap: 6,
    ...options,
  };
}

/** Alpha is in hundredths. */
const soft = (name, alpha) => () => `color-mix(in srgb, ${colour(name)} ${alpha}%, transparent)`;

/** Each column upon those before it; where it adds nothing it is not drawn over them. */
function stacked(columns) {
  const below = columns[0].map(() => 0);
  return columns.map((column, index) => column.map((value, at) => {
    if (!isKnown(value)) return null;
    below[at] += value;
    return index && !value ? null : below[at];
  }));
}

class Chart {
  constructor(id, spec) {
    this.root = byId(id);
    this.spec = spec;
    this.marks = [];
    this.canvas = element("div", { class: "plot", role: "img", "aria-label": spec.title });
    this.tooltip = element("div", { class: "tooltip", "aria-hidden": "true" });
    this.tooltip.hidden = true;
    this.legend = element("ul", { class: "legend" });
    this.values = spec.series.map(({ label, key, colour: name, dash }) => {
      const value = element("span", { class: "value" }, NONE);
      value.id = `${id}-${key}`;
      const swatch = element("span", { class: dash ? `swatch dash ${name}` : `swatch ${name}` });
      this.legend.append(element("li", {}, swatch, label, " ", value));
      return value;
    });
    this.root.replaceChildren(this.legend, this.canvas);
    this.plot = new uPlot(this.options(), [[], ...spec.series.map(() => [])], this.canvas);
    this.plot.over.append(this.tooltip);
    new ResizeObserver(() => this.resize()).observe(this.canvas);
    charts.add(this);
  }

  get width() {
    return Math.max(120, this.canvas.clientWidth);
  }

  resize() {
    if (this.canvas.clientWidth && this.width !== this.plot.width)
      this.plot.setSize({ width: this.width, height: HEIGHT });
  }

  /** Of the series with these keys; the others' names stand for what this server has not. */
  showOnly(isThere) {
    this.spec.series.forEach(({ key }, index) => {
      this.legend.children[index].hidden = !isThere(key);
    });
  }

  redraw() {
    this.plot.redraw(false, true);
  }

  options() {
    const { spec } = this;
    return {
      width: this.width,
      height: HEIGHT,
      padding: [8, 10, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false }, ...this.cursor() },
      scales: { x: { time: false, range: (u, low, high) => this.range(low, high), ...spec.x?.scale },
        y: { range: (u, low, high) => this.heights(low, high), ...spec.y?.scale } },
      axes: [
        axis({ size: 22, space: 64, values: (u, splits) => splits.map((at) => this.at(at)),
          ...this.xAxis() }),
        axis({ size: 52, space: 34, values: (u, splits) => splits.map(spec.y.format) }),
      ],
      series: [{}, ...spec.series.map((item) => ({
        label: item.label,
        stroke: () => colour(item.colour),
        width: item.dash ? 1.25 : 1.75,
        dash: item.dash ? [4, 3] : undefined,
        fill: item.area ? soft(item.colour, spec.stacked ? 45 : 14) : undefined,
        points: spec.hasPoints === false ? { show: false } : { size: 3 },
      }))],
      bands: spec.stacked
        ? spec.series.slice(1).map((item, index) =>
            ({ series: [index + 2, index + 1], fill: soft(item.colour, 45) }))
        : [],
      hooks: { draw: [() => this.drawMarks()], setCursor: [() => this.showTooltip()] },
    };
  }

  heights(low, high) {
    const { least = 0, most } = this.spec.y;
    if (most !== undefined) return [0, most];
    return [0, Math.max(isKnown(high) ? high * 1.1 : 0, least)];
  }

  /** Columns are as measured; what is stacked is added up for drawing alone. */
  draw(x, columns) {
    this.columns = columns;
    this.plot.setData([x, ...(this.spec.stacked ? stacked(columns) : columns)]);
    this.showLatest();
  }

  showLatest() {
    if (this.spec.latest === "none") return;
    this.say(this.columns.map((column) =>
      this.spec.latest === "known" ? column.findLast(isKnown) : column.at(-1)));
  }

  /** One figure for each series, in the legend and for those who cannot see the chart. */
  say(values) {
    const said = this.spec.series.flatMap((item, index) => {
      if (this.legend.children[index].hidden) return [];
      const value = values[index];
      this.values[index].textContent = isKnown(value) ? this.spec.y.format(value) : NONE;
      if (isKnown(value)) this.values[index].dataset.value = value;
      else delete this.values[index].dataset.value;
      return `${item.label} ${this.values[index].textContent}`;
    });
    this.canvas.setAttribute("aria-label", `${this.spec.title}: ${said.join(", ")}`);
  }

  showTooltip() {
    const { left, idx } = this.plot.cursor;
    const isOver = left !== null && left !== undefined && left >= 0;
    const near = isOver ? this.marks.filter((mark) =>
      Math.abs(this.plot.valToPos(mark.at, "x") - left) <= MARK_REACH) : [];
    this.tooltip.hidden = !isOver || (!near.length && !isKnown(idx));
    if (this.tooltip.hidden) return;
    const rows = near.map((mark) =>
      element("p", { class: "mark" }, this.markText(mark)));
    if (isKnown(idx)) {
      rows.push(element("p", { class: "at" }, this.at(this.plot.data[0][idx], true)));
      this.spec.series.forEach((item, index) => {
        const value = this.columns[index][idx];
        if (!isKnown(value)) return;
        rows.push(element("p", {}, element("span", { class: `swatch ${item.colour}` }), item.label,
          " ", element("b", {}, this.spec.y.format(value))));
      });
    }
    this.tooltip.replaceChildren(...rows);
    const width = this.tooltip.offsetWidth;
    const x = left + 14 + width > this.plot.over.clientWidth ? left - width - 14 : left + 14;
    this.tooltip.style.transform = `translate(${Math.round(Math.max(0, x))}px, 4px)`;
  }

  drawMarks() {
    const { ctx, bbox, scales } = this.plot;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    for (const mark of this.marks) {
      if (mark.at < scales.x.min || mark.at > scales.x.max) continue;
      const x = Math.round(this.plot.valToPos(mark.at, "x", true));
      ctx.strokeStyle = ctx.fillStyle = colour(MARK_COLOURS[mark.kind] ?? "muted");
      ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.beginPath();
      const size = 4 * devicePixelRatio;
      ctx.moveTo(x - size, bbox.top);
      ctx.lineTo(x + size, bbox.top);
      ctx.lineTo(x, bbox.top + size * 1.4);
      ctx.fill();
    }
    ctx.restore();
  }
}

/** Over time; all of these move together under the pointer. */
export class TimeChart extends Chart {
  constructor(id, spec) {
    super(id, { latest: "last", ...spec });
  }

  cursor() {
    return { sync: { key: "time", setSeries: false } };
  }

  xAxis() {
    return {
      values: (u, splits) => splits.map((at) => clock(at, splits[1] - splits[0] < 60)),
      splits: (u, index, low, high) => {
        const target = (high - low) / Math.max(2, Math.floor(this.width / 90));
        const steps = [10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600];
        const step = steps.find((size) => size >= target) ?? 43200;
        const found = [];
        const offset = new Date(high * 1000).getTimezoneOffset() * 60;
        for (let at = Math.ceil((low - offset) / step) * step + offset; at <= high; at += step)
          found.push(at);
        return found;
      },
    };
  }

  at(value, isExact = false) {
    return clock(value, isExact);
  }

  markText(mark) {
    return `${clock(mark.at)} ${mark.text}`;
  }

  range(low, high) {
    return this.extent ?? [low ?? 0, high ?? 1];
  }

  show(times, columns, marks, extent) {
    [this.extent, this.marks] = [extent, marks];
    this.draw(times, this.spec.series.map(({ key }) => columns[key] ?? times.map(() => null)));
  }
}

/** Over a size, on a logarithmic scale. */
export class SizeChart extends Chart {
  cursor() {
    return {};
  }

  xAxis() {
    return { space: 72, ...this.spec.x.axis };
  }

  at(value) {
    return value ? this.spec.x.format(value) : "";
  }

  markText(mark) {
    return mark.text;
  }

  range(low, high) {
    return [low > 0 ? low : 1, high > low ? high : (low > 0 ? low : 1) * 2];
  }

  show(sizes, columns, marks) {
    this.marks = marks;
    this.draw(sizes, columns);
  }
}
