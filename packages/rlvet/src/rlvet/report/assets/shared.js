/* Code for all parts of the report: its data, the format of numbers, the names of runs. */
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const main = document.querySelector("main");
const percent = (x, digits = 1) => `${(100 * x).toFixed(digits)} %`;

/** A number with three digits: 0.0123, 12,345, 2.5e-6. */
function short(x) {
  if (x === null || x === undefined) return "–";
  if (Math.abs(x) >= 1000 && Math.abs(x) < 1e7) return Math.round(x).toLocaleString("en");
  const rounded = Number(x.toPrecision(3));
  const tiny = rounded !== 0 && Math.abs(rounded) < 1e-3;
  return tiny ? rounded.toExponential() : String(rounded);
}

/** The CSS variable of a run's colour: its rule's, if all runs have different ones. */
const hue = (number) => `--${data.runs[number].color}`;

/** The CSS variable of a rule's colour in the figures of a run. */
const ruleHue = (run, rule) => `--${run.rule_colors[rule] || "soft"}`;

/** The names of runs in legends: the last components of each path, as many as make them unique. */
const labels = (() => {
  const parts = data.runs.map((run) => run.name.split(/[\\/]/).filter(Boolean));
  for (let length = 1; length < 9; length++) {
    const ends = parts.map((part) => part.slice(-length).join("/"));
    if (new Set(ends).size === ends.length) return ends;
  }
  return data.runs.map((run, number) => `${number + 1}: ${run.name}`);
})();

/** A section that a reader opens. Its charts are drawn as wide as it is then. */
function foldedSection(title, ...children) {
  main.append(element("details", { class: "section" }, element("summary", {}, element("h2", {}, title)), ...children));
}

/** Open the folded sections around the element that the address names. */
function openAround() {
  const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
  for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
  if (target) target.scrollIntoView();
}
addEventListener("hashchange", openAround);

function section(title, ...children) {
  main.append(element("section", {}, element("h2", {}, title), ...children));
}

/** A row of radio buttons. The chosen one has the colour of its variable. */
function choices(name, options, chosen, change, hueOf) {
  const buttons = options.map(([value, text]) =>
    element("label", { style: { "--rule": `var(${hueOf(value)})` } },
      element("input", { type: "radio", name, value, checked: value === chosen, onchange: () => change(value) }), text));
  return element("fieldset", { class: "switch", "aria-label": name }, ...buttons);
}
