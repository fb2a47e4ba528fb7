/* uPlot in the page's own colours: CSS variables, read anew whenever they may have changed. */
"use strict";

const shown = new Set();
const redraw = () => shown.forEach((plot) => plot.redraw(false));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

function color(host, name) {
  return getComputedStyle(host).getPropertyValue(name).trim();
}

function axis(host, label, more = {}) {
  return {
    stroke: () => color(host, "--soft"),
    grid: { stroke: () => color(host, "--line"), width: 1 },
    ticks: { stroke: () => color(host, "--line"), width: 1, size: 5 },
    font: "12px system-ui, sans-serif",
    labelFont: "12px system-ui, sans-serif",
    labelSize: 20,
    ...(label ? { label } : { labelSize: 0, size: 32 }),
    ...more,
  };
}

/** A chart that is as wide as its host, which it empties first. */
function chart(host, height, options, data) {
  host.replaceChildren();
  const size = () => ({ width: Math.max(200, host.clientWidth), height });
  const plot = new uPlot({ ...size(), ...options }, data, host);
  shown.forEach((old) => old.root.isConnected || shown.delete(old));
  shown.add(plot);
  new ResizeObserver(() => plot.root.isConnected && plot.setSize(size())).observe(host);
  return plot;
}

/** Ticks of a logarithmic axis: powers of ten, as text. */
function powers(plot, values) {
  return values.map((x) => {
    if (x === null) return "";
    const power = Math.log10(x);
    return Math.abs(power - Math.round(power)) < 1e-9 ? String(Number(x.toPrecision(1))) : "";
  });
}

/** An element with text or further elements in it; text is never read as HTML. */
function element(kind, attributes = {}, ...inside) {
  const made = document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, x] of Object.entries(value)) made.style.setProperty(key, x);
    else if (value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...inside);
  return made;
}
