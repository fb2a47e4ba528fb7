/* The effect of clip rules on the tokens of runs. The figures are drawn again when a control changes. */
"use strict";

/** The text for the step of a row in an audit, or for its steps if the row has several. */
function stepsOf(run, row) {
  const { steps, steps_per_row: stepsPerRow } = run.audit;
  if (stepsPerRow === 1) return `step ${short(steps[row])}`;
  return row + 1 < steps.length ? `steps ${short(steps[row])} to below ${short(steps[row + 1])}` : `from step ${short(steps[row])} on`;
}

/** The names of the rules in a run's data, its own method first. */
function rulesOf(run) {
  if (run.rules) return Object.keys(run.rules);
  const named = Object.keys(run.audit.columns).map((key) => /^audit\/if\/(.+)\/blocked_mass_below_0\.1$/.exec(key));
  const others = named.filter(Boolean).map((match) => match[1]);
  return "audit/clip_high" in run.audit.columns || others.length ? ["the run", ...others] : [];
}

/** The pairs (part, whole) of a share under a rule, one per step that has them, or of one row. */
function pairs(run, rule, share, over, row) {
  const own = rule === rulesOf(run)[0];
  const column = (name) => run.audit.columns[`audit/${own ? "" : `if/${rule}/`}${name}`];
  const [shares, wholes] = [column(share), column(over) || run.audit.columns[`audit/${over}`]];
  if (!shares || !wholes) return [];
  const rows = row === null ? run.audit.steps.map((_, k) => k) : [row];
  return rows.filter((k) => shares[k] !== null && wholes[k]).map((k) => [shares[k] * wholes[k], wholes[k]]);
}

const FEW = 10; // steps; fewer do not show the variance between steps

/** A share with its interval: over steps if there are enough, and at least as wide as Wilson's interval of n tokens.
    For a share of gradient, most of which a few tokens have, there is no interval with too few steps. */
function estimate(pairs, n, ofGradient = false) {
  if (!pairs.length) return null;
  const over = bandpo.shareOver(pairs);
  if (ofGradient && pairs.length < FEW) return { share: over.share, low: null, high: null };
  const [low, high] = bandpo.wilson(over.share, n ?? over.whole);
  if (pairs.length < FEW) return { ...over, low, high };
  return { ...over, low: Math.min(low, over.low), high: Math.max(high, over.high) };
}

function bars(rows) {
  // The scale ignores the wide intervals of few tokens, which may extend beyond the edge.
  const ends = (selected) => selected.map(({ estimate: e }) => (e ? e.high ?? e.share : 0));
  const many = rows.filter(({ n }) => n >= 50);
  const most = Math.max(...ends(many.length ? many : rows), ...rows.map(({ estimate: e }) => (e ? e.share : 0)), 1e-9);
  const scale = (x) => `${(100 * x) / most}%`;
  return element("div", { class: "bars" }, ...rows.flatMap(({ label, estimate: e, n, chosen, hue: rule }) => [
    element("span", { class: chosen ? "chosen" : "" }, label),
    e
      ? element("div", { class: "track" },
          element("div", { class: "bar", style: { "--share": scale(e.share), "--rule": `var(${rule})` } }),
          e.low === null ? "" : element("div", { class: "spread", style: { "--low": scale(e.low), "--high": scale(e.high) } }))
      : element("div", { class: "track" }),
    element("span", { class: "figure" }, ...(e
      ? [percent(e.share), element("small", {}, e.low === null ? "" : `${percent(e.low)} – ${percent(e.high)}`)]
      : ["–"]), element("small", {}, n ? `n = ${Math.round(n).toLocaleString("en")}` : "no token")),
  ]));
}

const sumOfWholes = (pairs) => pairs.reduce((total, [, whole]) => total + whole, 0);

function barsByBin(run, rule, row, side) {
  const [share, over] = side > 0 ? ["clip_high", "tokens_positive"] : ["clip_low", "tokens_negative"];
  return Object.entries(data.bins).map(([bin, label]) => {
    const pairsOfBin = pairs(run, rule, `${share}/${bin}`, `${over}/${bin}`, row);
    return { label: `p ${label}`, estimate: estimate(pairsOfBin), n: sumOfWholes(pairsOfBin), hue: ruleHue(run, rule) };
  });
}

function barsByRule(run, chosen, row) {
  return rulesOf(run).map((rule) => {
    const gradient = pairs(run, rule, "blocked_mass_below_0.1", "mass_positive_below_0.1", row);
    const tokens = (name) => pairs(run, name, "clip_high_below_0.1", "tokens_positive_below_0.1", row);
    const n = sumOfWholes(tokens(rule)) || (run.rules ? 0 : sumOfWholes(tokens(rulesOf(run)[0])));
    return { label: rule, estimate: n ? estimate(gradient, n, true) : null, n, chosen: rule === chosen, hue: ruleHue(run, rule) };
  });
}

const OWN_BAND = "a Band of yours";

/** A plot of the tokens with the largest ratios: ratio over old probability, with a colour for the effect of a rule. */
function scatter(host, run, rule, tokens, judge) {
  const column = rulesOf(run).indexOf(rule) + 3;
  const columns = { "kept": 3, "softened": 4, "blocked, A > 0": 5, "blocked, A < 0": 6 };
  const rows = tokens.map((token) => {
    const [p, ratio, advantage] = token;
    const kept = judge ? (bandpo.blocked(judge, p, ratio, advantage) ? 0 : 1) : token[column];
    return [p, ratio, kept <= 0 ? (advantage > 0 ? 5 : 6) : kept < 0.99999 ? 4 : 3];
  }).filter(([p]) => p > 0);
  const ratios = rows.map(([, ratio]) => ratio);
  const [lowest, highest] = [Math.max(1e-4, Math.min(0.5, ...ratios)), Math.min(1e4, Math.max(2, ...ratios))];
  const limits = judge
    ? data.grid.map((p) => judge(p)).map(({ lower, upper }) => [Math.exp(lower), Math.exp(upper)])
    : ((run.rules[rule].limits || [[], []])[0] || []).map((lower, k) => [lower, run.rules[rule].limits[1][k]]);
  limits.forEach(([lower, upper], k) => rows.push([data.grid[k], null, 0, lower ?? 0, upper ?? Infinity]));
  rows.sort((a, b) => a[0] - b[0]);
  const table = Array.from({ length: 7 }, () => new Array(rows.length).fill(null));
  rows.forEach(([p, ratio, where, lower, upper], k) => {
    table[0][k] = k && p <= table[0][k - 1] ? table[0][k - 1] * (1 + 1e-12) : p; // uPlot needs increasing values
    if (where) table[where][k] = Math.min(highest, Math.max(lowest, ratio));
    else [table[1][k], table[2][k]] = [Math.max(lowest / 1.2, lower), Math.min(highest * 1.2, upper)];
  });
  const dots = (label, name, size) => ({
    label, paths: () => null, value: (_, y) => short(y),
    points: { show: true, size, width: 0, stroke: () => color(host, name), fill: () => color(host, name) },
    stroke: () => color(host, name),
  });
  const line = (label) => ({
    label, stroke: () => color(host, "--soft"), width: 1.5, spanGaps: true, points: { show: false }, value: (_, y) => short(y),
  });
  const count = (where) => rows.filter((row) => row[2] === where).length;
  chart(host, 340, {
    scales: { x: { time: false, distr: 3 }, y: { distr: 3, range: () => [lowest / 1.2, highest * 1.2] } },
    series: [
      { label: "p", value: (_, p) => short(p) }, line("lower"), line("upper"),
      dots(`kept: ${count(3)}`, "--soft", 4), dots(`softened: ${count(4)}`, "--look", 5),
      dots(`blocked, A > 0: ${count(5)}`, "--stop", 6), dots(`blocked, A < 0: ${count(6)}`, "--mark", 6),
    ],
    bands: [{ series: [2, 1], fill: () => `color-mix(in srgb, ${color(host, "--soft")} 12%, transparent)` }],
    axes: [
      axis(host, "old probability of the token", { values: powers }),
      axis(host, "ratio", { size: 56, values: (_, ticks) => ticks.map((x) => (/^[125]/.test(String(x).replace(/[0.]/g, "")) ? short(x) : "")) }),
    ],
    cursor: { drag: { x: false, y: false } },
  }, table);
}

function rules() {
  const numbered = data.runs.map((run, number) => [run, number]);
  const runsWithRules = numbered.filter(([run]) => rulesOf(run).length);
  if (!runsWithRules.length) return;
  const reasons = numbered.filter(([run]) => run.no_tokens).map(([run, number]) =>
    element("p", { class: "soft" }, `${labels[number]} has no picture of single tokens: ${run.no_tokens}.`));
  const state = { run: runsWithRules[0][0], rule: null, step: 0, divergence: "KL", radius: 0.05 };
  const controls = element("div", {});
  const drawn = element("div", { class: "panels" });
  const bySteps = (run) => run.audit.steps.map((_, row) => row).filter((row) =>
    Object.values(run.audit.columns["audit/clip_high"] || {})[row] != null || (run.tokens && run.tokens[run.audit.steps[row]]));

  function draw() {
    const { run, rule } = state;
    const rows = bySteps(run);
    const row = state.step ? rows[state.step - 1] : null;
    const when = row === null ? "all steps" : stepsOf(run, row);
    const isOwnBand = rule === OWN_BAND;
    const figures = [];
    const sides = [[1, "winners (A > 0)"], [-1, "losers (A < 0)"]].map(([side, tokens]) => [barsByBin(run, rule, row, side), tokens]);
    for (const [rowsOfBins, tokens] of isOwnBand ? [] : sides) {
      if (rowsOfBins.some(({ n }) => n)) {
        figures.push(element("figure", {}, element("h3", {}, `Clipped share of ${tokens}, by old probability`), bars(rowsOfBins),
          element("figcaption", {}, `${rule}, ${when}. Lines: 95 % interval, over steps from ${FEW} on, at least Wilson's of n tokens.`)));
      }
    }
    if (!isOwnBand && !figures.length) {
      figures.push(element("p", { class: "soft" }, `The log of this run does not tell what ${rule} clips by probability; with all metrics of the audit, or a record, it would.`));
    }
    const compared = barsByRule(run, rule, row);
    if (compared.some(({ estimate: e }) => e)) {
      figures.push(element("figure", {}, element("h3", {}, "Gradient of rare winners blocked (A > 0, p < 0.1)"), bars(compared),
        element("figcaption", {}, `Every rule on the same tokens, ${when}; n counts a token at each update on it. Lines: 95 % interval, over steps from ${FEW} on.`)));
    }
    let host = null;
    const tokens = !run.tokens ? [] : row === null ? Object.values(run.tokens).flat() : run.tokens[run.audit.steps[row]] || [];
    if (tokens.length) {
      host = element("div", {});
      figures.push(element("figure", { style: { "grid-column": "1 / -1" } },
        element("h3", {}, `What ${isOwnBand ? `Band, ${state.divergence} ${short(state.radius)},` : rule} does to the tokens that moved most`), host,
        element("figcaption", {}, `${tokens.length.toLocaleString("en")} tokens with the largest moves, ${when}. ${
          isOwnBand || run.rules[rule].limits ? "Shaded: what the rule allows." : "The rule's bounds are not drawn: they are of sequences, or depend on more than p."}`)));
    }
    drawn.replaceChildren(...figures);
    if (host) scatter(host, run, rule, tokens, isOwnBand ? bandpo.band(state.divergence, state.radius) : null);
  }

  function control() {
    const { run } = state;
    const rows = bySteps(run);
    const names = [...rulesOf(run), ...(run.tokens ? [OWN_BAND] : [])];
    if (!names.includes(state.rule)) state.rule = names[0];
    state.step = Math.min(state.step, rows.length);
    const text = (name) => (run.rules && run.rules[name] && name === names[0] ? `${name}: ${run.rules[name].method}` : name);
    const stepText = element("output", {});
    const showStep = () => (stepText.textContent = state.step ? stepsOf(run, rows[state.step - 1]) : "all");
    showStep();
    const slider = element("input", {
      type: "range", min: 0, max: rows.length, value: state.step, id: "step",
      oninput: (event) => { state.step = Number(event.target.value); showStep(); draw(); },
    });
    const fields = [];
    if (runsWithRules.length > 1) {
      const options = runsWithRules.map(([option, number]) => element("option", { value: number, selected: option === run }, labels[number]));
      fields.push(element("label", {}, "Run", element("select", {
        onchange: (event) => { state.run = data.runs[event.target.value]; control(); draw(); },
      }, ...options)));
    }
    fields.push(choices("rule", names.map((name) => [name, text(name)]), state.rule, (value) => { state.rule = value; control(); draw(); }, (name) => (name === OWN_BAND ? "--rule-band" : ruleHue(run, name))));
    if (rows.length > 1) fields.push(element("label", {}, "Step", slider, stepText));
    if (state.rule === OWN_BAND) {
      const radius = element("output", {}, short(state.radius));
      fields.push(
        element("label", {}, "Divergence", element("select", {
          onchange: (event) => { state.divergence = event.target.value; state.radius = bandpo.divergences[state.divergence].radius; control(); draw(); },
        }, ...Object.keys(bandpo.divergences).map((name) => element("option", { value: name, selected: name === state.divergence }, name)))),
        element("label", {}, "Radius", element("input", {
          type: "range", min: -3, max: 0, step: 0.02, value: Math.log10(state.radius),
          oninput: (event) => { state.radius = 10 ** Number(event.target.value); radius.textContent = short(state.radius); draw(); },
        }), radius));
    }
    controls.replaceChildren(element("div", { class: "controls" }, ...fields));
  }

  foldedSection("What each rule would have blocked", controls, drawn, ...reasons);
  control();
  draw();
}

// ---- The opening, and kinds of tokens

/** What each rule dropped of the gradient on rare winners, in sentences, the first one large. */
function opening() {
  for (const [number, run] of data.runs.entries()) {
    if (!run.opening || !run.opening.length) continue;
    const [first, ...others] = run.opening;
    main.append(element("section", { class: "opening", style: { "--run": `var(${hue(number)})` } },
      data.runs.length > 1 ? element("div", { class: "name" }, labels[number]) : "",
      element("p", { class: "effect" }, first), ...others.map((line) => element("p", {}, line))));
  }
}

/** What rules dropped of the gradient on rare winners, by the kind of token. */
function kinds() {
  const runsWithKinds = data.runs.map((run, number) => [run, number]).filter(([run]) => run.kinds && run.kinds.length);
  if (!runsWithKinds.length) return;
  foldedSection("Rare winners by kind of token", ...runsWithKinds.flatMap(([run, number]) => [
    runsWithKinds.length > 1 ? element("h3", {}, labels[number]) : "",
    element("div", { class: "panels" }, ...rulesOf(run).filter((rule) => rule in run.kinds[0].dropped).slice(0, 2).map((rule) =>
      element("figure", {}, element("h3", {}, `Gradient of rare winners that ${rule} drops, by kind of token`),
        bars(run.kinds.map(({ kind, tokens, dropped }) => ({ label: kind, n: tokens, estimate: { share: dropped[rule], low: null, high: null }, hue: ruleHue(run, rule) }))))))]));
}

// ---- Words

function words() {
  const runsWithWords = data.runs.map((run, number) => [run, number]).filter(([run]) => run.words && run.words.length);
  if (!runsWithWords.length) return;
  const lists = runsWithWords.flatMap(([run, number]) => [
    runsWithWords.length > 1 ? element("h3", {}, labels[number]) : "",
    element("p", {}, `${run.words_title[0].toUpperCase()}${run.words_title.slice(1)}:`),
    element("ol", { class: "words" }, ...run.words.map((word) => element("li", {},
      element("p", { class: "text" }, word.text[0], " ", element("mark", {}, word.text[1]), " ", word.text[2]),
      element("p", { class: "soft" }, `${word.step === null ? "" : `step ${word.step}: `}p ${short(word.p)}, ratio ${short(word.ratio)}, A ${word.advantage > 0 ? "+" : ""}${short(word.advantage)}`),
      element("div", { class: "kept" }, ...Object.entries(word.kept).map(([rule, share]) => element("span", {}, `${rule} `,
        share <= 0 ? element("b", {}, "blocks") : share < 0.99999 ? `keeps ${percent(share, 0)}` : "keeps"))))))]);
  foldedSection("Words that were blocked",
    element("p", { class: "soft" }, "Those whose dropped gradient was largest, in their answers, and what other rules would have done to them."),
    ...lists);
}

/** The tokens to which engine and trainer gave different probabilities, in their answers. */
function disagreeingWords() {
  const runsWithWords = data.runs.map((run, number) => [run, number]).filter(([run]) => run.disagreeing && run.disagreeing.length);
  if (!runsWithWords.length) return;
  const lists = runsWithWords.flatMap(([run, number]) => [
    runsWithWords.length > 1 ? element("h3", {}, labels[number]) : "",
    element("ol", { class: "words" }, ...run.disagreeing.map((word) => element("li", {},
      element("p", { class: "text" }, word.text[0], " ", element("mark", {}, word.text[1]), " ", word.text[2]),
      element("p", { class: "soft" }, `${word.step === null ? "" : `step ${word.step}: `}p ${short(word.p)} in the trainer, ${short(word.p_engine)} in the engine`))))]);
  foldedSection("Words on which engine and trainer disagree",
    element("p", { class: "soft" }, "Those whose log-probabilities are farthest apart before updates, by 0.1 nats at least, in their answers."),
    ...lists);
}

/** A sentence with the reason why a page has no figures about tokens or no words; empty if it has them. */
function missingTokens() {
  if (!data.runs.some((run) => rulesOf(run).length)) {
    return element("p", { class: "soft" },
      "What other clip rules would have blocked is not shown, as no run logs what its clip did by probability.",
      ...data.audit_ways.flatMap(([clause, code]) => [` ${clause}: `, element("code", {}, code), "."]));
  }
  if (data.runs.some((run) => run.words && run.words.length)) return "";
  return element("p", { class: "soft" }, data.runs.some((run) => run.tokens)
    ? "Words that were blocked are not shown: no token whose id is recorded was blocked."
    : "Words that were blocked are not shown: only a record keeps the ids of tokens.");
}
