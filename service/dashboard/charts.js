"use strict";
// Small SVG charts. Each call redraws one <svg>; a chart knows numbers, not what they mean.

const SVG = "http://www.w3.org/2000/svg";

function shape(name, attributes) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, String(value));
  return node;
}

/** A line with a filled area over `values` (null leaves a gap); the scale begins at 0. */
function drawSpark(svg, values, ceiling) {
  const known = values.filter((value) => value !== null);
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  const top = ceiling ?? Math.max(...known, 0) * 1.15;
  const nodes = [];
  let run = [];
  const flush = () => {
    if (run.length === 1) run.push([Math.min(100, run[0][0] + 0.6), run[0][1]]);
    if (run.length) {
      const line = run.map(([x, y], index) => `${index ? "L" : "M"}${x} ${y}`).join("");
      const area = `${line}L${run[run.length - 1][0]} 100L${run[0][0]} 100Z`;
      nodes.push(shape("path", { class: "area", d: area }), shape("path", { class: "line", d: line }));
    }
    run = [];
  };
  values.forEach((value, index) => {
    if (value === null) return flush();
    const x = values.length > 1 ? (index / (values.length - 1)) * 100 : 0;
    const y = top > 0 ? 98 - (Math.min(value, top) / top) * 96 : 98;
    run.push([Math.round(x * 100) / 100, Math.round(y * 100) / 100]);
  });
  flush();
  svg.replaceChildren(...nodes);
}

/** One horizontal bar; `share` of the width from 0 to 1, or null for none. */
function drawBar(svg, share) {
  const width = share === null ? 0 : Math.max(share * 100, 0.8);
  svg.replaceChildren(
    shape("rect", { class: "track", x: 0, y: 0, width: "100%", height: 16, rx: 4 }),
    shape("rect", { class: "value", x: 0, y: 0, width: `${width}%`, height: 16, rx: width ? 4 : 0 }),
  );
}

/** Parts side by side: [{name, value}], the whole being their sum. */
function drawStack(svg, parts) {
  const whole = parts.reduce((sum, part) => sum + part.value, 0);
  let x = 0;
  svg.replaceChildren(...parts.filter((part) => part.value > 0).map((part) => {
    const width = (part.value / whole) * 100;
    const node = shape("rect", {
      class: part.name, x: `${x}%`, y: 0, width: `${width}%`, height: 22,
    });
    x += width;
    return node;
  }));
}
