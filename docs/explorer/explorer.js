/* What a rule allows a token, for the first page: drag its size, choose method and divergence, click for a token. */
"use strict";

(() => {
  const host = document.getElementById("explorer");
  const CLIP = bandpo.fixed(0.2, 0.2);
  const BAND = { name: "radius", divergence: true };
  const METHODS = {
    "BandAbove: clip 0.2 below, Band above": { color: "--rule-band-above", ...BAND, rule: (size, divergence) => bandpo.sides(CLIP, bandpo.band(divergence, size)) },
    "BandPO: Band on both sides": { color: "--rule-band", ...BAND, rule: (size, divergence) => bandpo.band(divergence, size) },
    "DPPO: Band without a cap": { color: "--rule-dppo", ...BAND, rule: (size, divergence) => bandpo.band(divergence, size, Infinity) },
    "DCPO: low 0.16, high of yours": { color: "--rule-dcpo", name: "high", size: 0.2, rule: (size) => bandpo.dcpo(0.16, size) },
    "PPO, GRPO: one clip": { color: "--rule-clip", name: "ε", size: 0.2, most: 0.95, rule: (size) => bandpo.fixed(size, size) },
    "DAPO: low 0.2, high of yours": { color: "--rule-clip-higher", name: "high", size: 0.28, rule: (size) => bandpo.fixed(0.2, size) },
  };
  const P = Array.from({ length: 241 }, (_, k) => Math.min(10 ** (-4 + k / 60), 1 - 1e-6));
  const [RATIOS, AFTERWARDS] = [[0.02, 50], [1e-6, 1]]; // that are drawn
  const state = { method: Object.keys(METHODS)[0], divergence: "KL", size: 0.05, p: 0.08, ratio: 2 };
  const round = (x) => (x < 1e-3 && x > 0 ? x.toExponential(1) : String(Number(x.toPrecision(3))));
  const inside = (x, [low, high]) => Math.min(10 * high, Math.max(low / 10, x)); // lines may leave the chart
  const rule = () => METHODS[state.method].rule(state.size, state.divergence);
  const ratios = (judge) => P.map(judge).map(({ lower, upper }) => [Math.exp(lower), Math.exp(upper)]);
  const hue = () => METHODS[state.method].color;
  const clipHue = () => "--rule-clip";
  const line = (name, width, dash) => ({ stroke: () => color(host, name()), width, dash, points: { show: false } });
  const shade = { series: [2, 1], fill: () => `color-mix(in srgb, ${color(host, hue())} 15%, transparent)` };

  /** A chart over p whose y runs between two ends, with a point where the token is. */
  function over(place, label, ends, read) {
    const token = { stroke: () => color(host, "--mark"), paths: () => null, points: { show: true, size: 10, width: 2, fill: () => color(host, "--mark") } };
    const plot = chart(place, 240, {
      scales: { x: { time: false, distr: 3, range: () => [1e-4, 1] }, y: { distr: 3, range: () => ends } },
      series: [{}, line(hue, 2), line(hue, 2), line(clipHue, 1.5, [5, 4]), line(clipHue, 1.5, [5, 4]), token],
      bands: [shade],
      axes: [axis(host, "old probability p", { values: powers }), axis(host, label, { size: 64, values: powers })],
      cursor: { drag: { x: false, y: false } },
    }, [P, P, P, P, P, P]);
    plot.over.style.cursor = "crosshair";
    plot.over.addEventListener("click", () => {
      const p = Math.min(0.9999, plot.posToVal(plot.cursor.left, "x"));
      set({ p, ratio: read(plot.posToVal(plot.cursor.top, "y"), p) });
    });
    return plot;
  }

  const option = (name, chosen) => element("option", { value: name, selected: name === chosen }, name);
  const method = element("select", { "aria-label": "method", onchange: () => choose() }, ...Object.keys(METHODS).map((name) => option(name, state.method)));
  const divergence = element("select", { "aria-label": "divergence", onchange: () => choose() }, ...Object.keys(bandpo.divergences).map((name) => option(name, state.divergence)));
  const slider = element("input", { type: "range", min: -3, max: 0, step: 0.01, "aria-label": "size", oninput: () => set({ size: 10 ** Number(slider.value) }) });
  const [sizeName, size, told] = [element("span"), element("output"), element("div")];
  const [allowed, move] = [element("div"), element("div")];
  const number = (key, more) => element("input", { type: "number", step: "any", "aria-label": key, ...more, oninput: (event) => {
    const x = Number(event.target.value);
    if (x > 0 && x <= more.max) set({ [key]: x }, event.target);
  } });
  const [p, ratio] = [number("p", { min: 0, max: 0.9999 }), number("ratio", { min: 0, max: 1e6 })];
  const byDivergence = element("label", {}, "Divergence", divergence);

  function choose() {
    const its = METHODS[method.value];
    const same = its.divergence && METHODS[state.method].divergence && divergence.value === state.divergence;
    const start = its.divergence ? bandpo.divergences[divergence.value].radius : its.size;
    slider.max = Math.log10(its.most || 1);
    set({ method: method.value, divergence: divergence.value, size: same ? state.size : start });
  }

  /** What the rule, and clip 0.2 beside it, make of the token. */
  function verdict() {
    const said = (judge, advantage) => {
      const bound = bandpo.blocked(judge, state.p, state.ratio, advantage);
      return bound ? element("span", { class: "blocked" }, `blocked by the ${bound} bound`) : "kept";
    };
    const rows = [[state.method.split(":")[0], rule()], ["clip 0.2", CLIP]].map(([name, judge]) => {
      const [low, high] = [judge(state.p).lower, judge(state.p).upper].map(Math.exp);
      const ends = `${round(low)} … ${round(high)}`;
      const reach = `${round(state.p * low)} … ${round(Math.min(1, state.p * high))}`;
      return element("tr", {}, ...[name, ends, reach, said(judge, 1), said(judge, -1)].map((cell) => element("td", {}, cell)));
    });
    const head = ["", "ratio", "p may become", "its gradient, A > 0", "A < 0"].map((cell) => element("th", {}, cell));
    told.replaceChildren(element("table", { class: "verdict" }, element("tr", {}, ...head), ...rows));
  }

  function set(change, typed) {
    Object.assign(state, change);
    if (typed !== p) p.value = round(state.p);
    if (typed !== ratio) ratio.value = round(state.ratio);
    slider.value = Math.log10(state.size);
    size.textContent = round(state.size);
    sizeName.textContent = METHODS[state.method].name;
    byDivergence.hidden = !METHODS[state.method].divergence;
    byDivergence.style.display = byDivergence.hidden ? "none" : "";
    const [mine, clip] = [ratios(rule()), ratios(CLIP)];
    const nearest = P.reduce((best, x, k) => (Math.abs(Math.log(x / state.p)) < Math.abs(Math.log(P[best] / state.p)) ? k : best), 0);
    const at = (y) => P.map((_, k) => (k === nearest ? y : null));
    const ends = (found, end, read) => found.map((pair, k) => read(pair[end], P[k]));
    const draw = (plot, read) => plot.setData([P, ends(mine, 0, read), ends(mine, 1, read), ends(clip, 0, read), ends(clip, 1, read), at(read(state.ratio, state.p))]);
    draw(plots[0], (r) => inside(r, RATIOS));
    draw(plots[1], (r, x) => inside(Math.min(1, r * x), AFTERWARDS));
    verdict();
  }

  const picture = host.nextElementSibling;
  if (picture && picture.querySelector("img[src*='allowed_change']")) picture.remove();
  host.append(
    element("div", { class: "controls" }, element("label", {}, "Method", method), byDivergence,
      element("label", {}, sizeName, slider, size)),
    element("div", { class: "panels" },
      element("figure", {}, element("h4", {}, "Ratios that keep their gradient"), allowed),
      element("figure", {}, element("h4", {}, "What p may become in one batch"), move)),
    element("div", { class: "caption" }, "Shaded: what the method allows. Dashed: clip 0.2. Dot: the token. A gradient is dropped that would push beyond a bound."),
    element("div", { class: "controls" }, element("span", {}, "A token of yours, typed or clicked:"),
      element("label", {}, "p", p), element("label", {}, "ratio", ratio)),
    told);
  const plots = [
    over(allowed, "ratio", RATIOS, (y) => y),
    over(move, "p afterwards", AFTERWARDS, (y, x) => y / x),
  ];
  set({});
  new MutationObserver(redraw).observe(document.body, { attributes: true, attributeFilter: ["data-md-color-scheme"] });
})();
