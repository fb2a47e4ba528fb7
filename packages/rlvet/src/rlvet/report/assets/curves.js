/* The curves of runs: the logged values faint, a running median on top, and lines at the first steps of findings. */
"use strict";

const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((x) => x * 10 ** power)); // between ticks of steps
const LABEL_HEIGHT = 16; // of a line's label, in pixels
const AROUND = 60; // about the height of what is above and below a chart's curves, in pixels
const FEW_POINTS = 30; // a curve up to which its points are drawn

const chartOf = (name) => data.charts.find((one) => one.name === name);
const panelId = (name) => `curve-${data.charts.findIndex((one) => one.name === name) + 1}`;

/** The texts of ticks, with as many digits as they need to differ. */
function tickTexts(ticks, step) {
  const isWhole = (x) => Math.abs(x - Math.round(x)) < 1e-6 * Math.abs(x);
  let digits = 0;
  while (digits < 9 && !isWhole(step * 10 ** digits)) digits++;
  return ticks.map((x) => {
    if (Math.abs(x) < step / 1e6) return "0";
    const largest = Math.max(...ticks.map(Math.abs));
    if (largest < 1e-3 || largest >= 1e7) return Number(x.toPrecision(6)).toExponential().replace("e+", "e");
    return Number(x.toFixed(digits)).toLocaleString("en", { maximumFractionDigits: digits });
  });
}

/** The range of a linear axis, which includes 0 unless the curve is far from 0. */
function plainRange(low, high) {
  if (low === null) return [0, 1];
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  const nearZero = low >= 0 && low < 0.5 * high;
  return [nearZero || low === 0 ? 0 : low - pad, high + pad];
}

/** The ticks of a vertical logarithmic axis that are powers of ten, as many as have room for their texts. */
function wholePowers(plot, ticks) {
  const powersOfTen = ticks.map((x) => Math.log10(x)).map((power) => (Math.abs(power - Math.round(power)) < 1e-9 ? Math.round(power) : null));
  const whole = powersOfTen.filter((power) => power !== null);
  const room = Math.max(2, Math.floor((plot.height - AROUND) / LABEL_HEIGHT));
  const distance = Math.ceil(whole.length / room);
  return ticks.map((x, place) => (powersOfTen[place] !== null && (powersOfTen[place] - whole[0]) % distance === 0 ? x : null));
}

/** The powers of ten around the values above 0. */
function logRange(tables) {
  const values = tables.flatMap(([, ys]) => ys.filter((y) => y > 0));
  const low = values.reduce((a, b) => Math.min(a, b), Infinity);
  const high = values.reduce((a, b) => Math.max(a, b), 0);
  return [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high))];
}

/** Powers of ten above which the ticks of a logarithmic axis are whole powers alone: uPlot's own do not end then. */
const MOST_POWERS = 20;

/** The ticks of a logarithmic axis of many powers of ten; those of uPlot for others. */
function splitsOfPowers(tables) {
  const [low, high] = logRange(tables).map((x) => Math.round(Math.log10(x)));
  if (high - low <= MOST_POWERS) return {};
  return { splits: () => Array.from({ length: high - low + 1 }, (_, place) => 10 ** (low + place)) };
}

/** The findings of runs that refer to a curve and have a first step. */
function onsets(name, runs) {
  return runs.flatMap((number) => data.runs[number].findings
    .map((finding, rank) => ({ number, rank, finding }))
    .filter(({ finding }) => finding.onset !== null && finding.quantities.includes(name)));
}

/** Draws lines over a chart at the first steps of findings, each with a label. Returns a function that moves them with the axis. */
function onsetLines(plot, marks) {
  // The first step has the highest label, so that no line on its right goes through it.
  const lines = [...marks].sort((a, b) => a.finding.onset - b.finding.onset).map(({ number, rank, finding }, row) => {
    const run = data.runs.length > 1 ? [element("i", { class: "dot", style: { "--run": `var(${hue(number)})` } })] : [];
    const text = `${rank + 1} ${finding.code} · step ${short(finding.onset)}`;
    const label = element("span", {}, ...run, text);
    const crowded = marks.length > 1 ? " crowded" : "";
    const line = element("div", { class: `onset ${finding.severity}${crowded}`, style: { "--row": marks.length - row } }, label);
    plot.over.append(line);
    return { line, label, step: finding.onset };
  });
  return () => lines.forEach(({ line, label, step }) => {
    const left = plot.valToPos(step, "x");
    const width = plot.over.clientWidth;
    line.hidden = left < -1 || left > width + 1;
    line.style.left = `${Math.max(0, Math.min(width, left))}px`;
    line.classList.toggle("leftward", left + label.offsetWidth > width && left > width / 3);
  });
}

/** What the axis of steps has, of which some runs have none. */
function stepLabel() {
  const counted = labels.filter((_, number) => data.runs[number].are_steps_counted);
  if (!counted.length) return "step";
  return counted.length === data.runs.length ? "row" : `step; of ${counted.join(", ")} the row`;
}

/** A chart of one quantity.

    host: the element of the chart.
    name: the quantity.
    runs: the numbers of the runs.
    marks: findings with a line at their first step.
    height: the height in pixels.
    log: true for a logarithmic axis.
    readouts: for each run the element that shows the value under the cursor, and its text without a cursor. */
function curveChart(host, name, { runs, marks, height, log, readouts = [] }) {
  const tables = [];
  const series = [{ label: "step" }];
  const places = [];
  const above = (ys) => (log ? ys.map((y) => (y > 0 ? y : null)) : ys);
  runs.forEach((number) => {
    const curve = data.runs[number].curves[name];
    if (!curve) return;
    const stroke = () => color(host, hue(number));
    const smooth = curve.medians.length > 0;
    const place = { number, raw: series.length, median: null };
    tables.push([curve.steps, above(curve.values)]);
    series.push({
      label: labels[number], stroke, width: smooth ? 1 : 1.75, alpha: !smooth ? 1 : curve.segments ? 0.2 : 0.35, spanGaps: true,
      points: { show: curve.rows <= FEW_POINTS, size: 5 },
    });
    if (smooth) {
      place.median = series.length;
      tables.push([curve.median_steps, above(curve.medians)]);
      series.push({ label: "median", stroke, width: 2, spanGaps: true, points: { show: false } });
    }
    places.push(place);
  });
  if (marks.length) {
    // A step at which a curve has no number, as that of NaN, is on the axis too.
    const steps = [...new Set(marks.map(({ finding }) => finding.onset))].sort((a, b) => a - b);
    tables.push([steps, steps.map(() => null)]);
    series.push({ label: "findings", show: false });
  }
  const lone = runs.length === 1 ? data.runs[runs[0]].last_tenth : null;
  const joined = uPlot.join(tables);

  // The row of the nearest point of a curve: uPlot joins the steps of all curves, so rows of one curve may be empty.
  const nearest = (plot, at, row) => {
    const ys = plot.data[at];
    for (let away = 0; away < ys.length; away++) {
      if (ys[row - away] != null) return row - away;
      if (ys[row + away] != null) return row + away;
    }
    return row;
  };
  const valueAt = (plot, at) => {
    const row = at === null ? null : plot.cursor.idxs[at];
    return row === null || row === undefined ? null : [plot.data[0][row], plot.data[at][row]];
  };
  const showValues = (plot) => places.forEach(({ raw, median }, place) => {
    if (!readouts[place]) return;
    const under = plot.cursor.left >= 0 ? valueAt(plot, raw) : null;
    const middle = under && valueAt(plot, median);
    readouts[place].element.textContent = under
      ? `step ${short(under[0])}: ${short(under[1])}${middle ? `, median ${short(middle[1])}` : ""}`
      : readouts[place].otherwise;
  });
  const shadeLastTenth = (plot) => {
    if (lone === null) return;
    const { ctx, bbox } = plot;
    const left = Math.max(bbox.left, plot.valToPos(lone, "x", true));
    if (left >= bbox.left + bbox.width) return;
    ctx.save();
    ctx.fillStyle = color(host, "--shade");
    ctx.fillRect(left, bbox.top, bbox.left + bbox.width - left, bbox.height);
    ctx.restore();
  };
  let placeLines = () => {};
  const y = log ? { distr: 3, range: () => logRange(tables) } : { range: (_, low, high) => plainRange(low, high) };
  const plot = chart(host, height, {
    padding: [marks.length ? LABEL_HEIGHT * marks.length : null, null, null, null],
    series, scales: { x: { time: false }, y }, legend: { show: false },
    axes: [
      axis(host, stepLabel(), { incrs: WHOLE, labelSize: 14, size: 26, labelGap: 0 }),
      axis(host, null, { size: 54, ...(log ? { filter: wholePowers, ...splitsOfPowers(tables) } : {}), values: log ? powers : (_, ticks, __, ___, step) => tickTexts(ticks, step) }),
    ],
    cursor: { sync: { key: "step" }, y: false, dataIdx: (self, at, row) => (at && self.data[at][row] == null ? nearest(self, at, row) : row) },
    hooks: { drawClear: [shadeLastTenth], draw: [() => placeLines()], setCursor: [showValues] },
  }, joined);
  placeLines = onsetLines(plot, marks);
  placeLines();
  return plot;
}

/** The chart in a finding, of its first curve. */
function evidenceOf(host, run, number, rank, name) {
  const one = chartOf(name);
  const drawn = element("div");
  const finding = run.findings[rank];
  const marks = finding.onset === null ? [] : [{ number, rank, finding }];
  const title = element("a", { href: `#${panelId(name)}` }, one.title);
  host.append(element("figcaption", {}, title, one.unit ? `, ${one.unit}` : ""), drawn);
  curveChart(drawn, name, { runs: [number], marks, height: 140, log: one.log });
}

/** A chart with its title, unit, and the first and last values of each run. */
function panel({ name, title, unit, log }, height = 175) {
  const runs = data.runs.map((_, number) => number).filter((number) => data.runs[number].curves[name]);
  const host = element("div");
  const readouts = runs.map((number) => {
    const { rows, first, last, values } = data.runs[number].curves[name];
    const part = rows >= 20 ? "first tenth" : "first";
    const otherwise = rows > 1 ? `${part} ${short(first)}, last ${short(last)}` : short(values[0]);
    return { element: element("span", { class: "value" }, otherwise), otherwise, number };
  });
  const zeros = log && runs.some((number) => data.runs[number].curves[name].values.some((y) => y <= 0));
  const several = data.runs.length > 1;
  const units = [unit, log ? `logarithmic axis${zeros ? ", drawn above 0" : ""}` : ""].filter(Boolean).join("; ");
  const figure = element("figure", { "data-panel": name, id: chartOf(name) ? panelId(name) : false },
    element("h3", { title }, title),
    element("div", { class: "readouts" }, several && units ? element("div", {}, units) : "",
      ...readouts.map(({ element: value, number }) => element("div", {},
        several ? element("i", { class: "dot", style: { "--run": `var(${hue(number)})` } }) : "",
        several ? `${labels[number]} ` : units ? `${units}: ` : "", value))),
    host);
  return { figure, draw: () => curveChart(host, name, { runs, marks: onsets(name, runs), height: height + LABEL_HEIGHT * onsets(name, runs).length, log, readouts }) };
}

/** A sentence about quantities that have a single value in each run. */
function constants() {
  const texts = data.constant.map(({ title, unit, values }) => {
    const known = values.map((value, number) => [value, number]).filter(([value]) => value !== null);
    const alike = new Set(known.map(([value]) => value)).size === 1;
    const text = alike ? short(known[0][0]) : known.map(([value, number]) => `${labels[number]} ${short(value)}`).join(", ");
    return `${title}${unit ? ` (${unit})` : ""} ${text}`;
  });
  return texts.length
    ? element("p", { class: "soft", id: "constant" }, `One value wherever it was logged, and so not drawn: ${texts.join("; ")}.`)
    : "";
}

/** An explanation of all curves: faint and strong lines, the shaded part, the points of long curves. */
function explanation() {
  const curves = data.runs.flatMap((run) => data.charts.map(({ name }) => run.curves[name])).filter(Boolean);
  const longest = curves.reduce((a, b) => (a.rows >= b.rows ? a : b));
  const sentences = [];
  if (curves.some(({ medians }) => medians.length)) sentences.push("Faint: as logged; strong: running median.");
  if (data.runs.length === 1 && data.runs[0].last_tenth !== null) sentences.push("Shaded: the last tenth of the run.");
  if (data.runs.some((run) => run.findings.some(({ onset }) => onset !== null))) {
    sentences.push("Vertical lines: where a finding begins, by its number above.");
  }
  if (longest.segments) {
    sentences.push(`Long curves are thinned: of ${longest.rows.toLocaleString("en")} values the least and the greatest of each of ${
      longest.segments.toLocaleString("en")} parts are drawn, so that no extreme is lost.`);
  }
  sentences.push("Point at a curve for its values; drag over it to look closer, double-click to go back.");
  return element("p", { class: "soft explained" }, sentences.join(" "));
}

/** The charts that are always open: reward, entropy, and what the clip blocks. */
const MAIN = [["reward"], ["entropy"], ["audit/blocked_mass_below_0.1", "clip_high", "clip"]];

function curves() {
  if (!data.charts.length && !data.constant.length) return;
  const mainNames = MAIN.map((names) => names.find(chartOf)).filter(Boolean);
  const open = mainNames.map(chartOf).map((one) => panel(one, 260));
  const others = data.charts.filter(({ name }) => !mainNames.includes(name)).map((one) => panel(one));
  const other = element("div", { class: "panels" });
  const choose = element("select", { onchange: (event) => {
    const name = event.target.value;
    if (!name) return other.replaceChildren();
    const { figure, draw } = panel({ name, title: name, unit: "", log: false });
    other.replaceChildren(figure);
    draw();
  } }, element("option", { value: "" }, `${data.others.length} more …`), ...data.others.map((name) => element("option", { value: name }, name)));
  if (open.length) main.append(explanation(), element("section", { class: "panels large" }, ...open.map(({ figure }) => figure)));
  foldedSection(others.length ? `All curves: ${others.length} more` : "All curves",
    others.length && !open.length ? explanation() : "",
    others.length ? element("div", { class: "panels" }, ...others.map(({ figure }) => figure)) : "",
    constants(),
    data.same_as_reward.length ? element("p", { class: "soft", id: "same" }, `All of the reward, and so not drawn again: ${data.same_as_reward.join("; ")}.`) : "",
    data.missing.length ? element("p", { class: "soft", id: "missing" }, `Not drawn, as no key that rlvet knows has it: ${data.missing.join("; ")}.`) : "",
    data.others.length ? element("div", { class: "controls" }, element("label", {}, "Another column", choose)) : "", other);
  [...open, ...others].forEach(({ draw }) => draw());
}
