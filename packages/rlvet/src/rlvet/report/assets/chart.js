/* Charts of uPlot in the page's colours, which are CSS variables that change with the colour scheme. */
"use strict";

const shown = new Set();
const redraw = () => shown.forEach((plot) => plot.redraw(false));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
// Charts below a part that opens or closes move, and look for the cursor where they were unless they are told.
addEventListener("toggle", () => shown.forEach((plot) => plot.syncRect(true)), true);

function color(host, name) {
  return getComputedStyle(host).getPropertyValue(name).trim();
}

function axis(host, label, more = {}) {
  const shown = more.filter ? { filter: more.filter } : {};
  return {
    stroke: () => color(host, "--soft"),
    grid: { stroke: () => color(host, "--line"), width: 1, ...shown },
    ticks: { stroke: () => color(host, "--line"), width: 1, size: 5, ...shown },
    font: "12px system-ui, sans-serif",
    labelFont: "12px system-ui, sans-serif",
    labelSize: 20,
    ...(label ? { label } : { labelSize: 0, size: 32 }),
    ...more,
  };
}

/** Replaces the content of an element by a chart of the same width. */
function chart(host, height, options, data) {
  host.replaceChildren();
  const size = () => ({ width: Math.max(200, host.clientWidth), height });
  const plot = new uPlot({ ...size(), ...options }, data, host);
  shown.forEach((old) => old.root.isConnected || shown.delete(old));
  shown.add(plot);
  new ResizeObserver(() => {
    if (!plot.root.isConnected) return;
    plot.setSize(size());
    plot.syncRect(true);
  }).observe(host);
  return plot;
}

/** The texts of a logarithmic axis's ticks: powers of ten only, such as 0.001, 100 and 1e-5. */
function powers(plot, values) {
  return values.map((x) => {
    if (x === null) return "";
    const power = Math.round(Math.log10(x));
    if (Math.abs(Math.log10(x) - power) >= 1e-9) return "";
    return power < -3 || power > 5 ? `1e${power}` : String(Number(x.toPrecision(1)));
  });
}

/** Creates an element with children. Text is never parsed as HTML. */
function element(kind, attributes = {}, ...children) {
  const node = document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, x] of Object.entries(value)) node.style.setProperty(key, x);
    else if (value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}
