/* What rules do to the tokens of runs: sections are made of the data, and drawn anew where a control changes. */
"use strict";

/** A step of an audit, or the steps that are put together in a row of it. */
function stepsOf(run, row) {
  const { steps, together } = run.audit;
  if (together === 1) return `step ${short(steps[row])}`;
  return row + 1 < steps.length ? `steps ${short(steps[row])} to below ${short(steps[row + 1])}` : `from step ${short(steps[row])} on`;
}

/** The rules that a run tells of, its own first. */
function rulesOf(run) {
  if (run.rules) return Object.keys(run.rules);
  const named = Object.keys(run.audit.columns).map((key) => /^audit\/if\/(.+)\/blocked_mass_below_0\.1$/.exec(key));
  const others = named.filter(Boolean).map((match) => match[1]);
  return "audit/clip_high" in run.audit.columns || others.length ? ["the run", ...others] : [];
}

/** Reads a run's audit of a rule: pairs (part, whole) of each step that has them, or of one step. */
function pairs(run, rule, share, over, row) {
  const own = rule === rulesOf(run)[0];
  const column = (name) => run.audit.columns[`audit/${own ? "" : `if/${rule}/`}${name}`];
  const [shares, wholes] = [column(share), column(over) || run.audit.columns[`audit/${over}`]];
  if (!shares || !wholes) return [];
  const rows = row === null ? run.audit.steps.map((_, k) => k) : [row];
  return rows.filter((k) => shares[k] !== null && wholes[k]).map((k) => [shares[k] * wholes[k], wholes[k]]);
}

const FEW = 10; // steps below which they do not show how much steps differ

/** A share with its interval: over steps where there are enough, and no narrower than Wilson's of n tokens. Of gradient,
    a few tokens carry most: without enough steps there is no interval. */
function measured(found, n, ofGradient = false) {
  if (!found.length) return null;
  const over = bandpo.shareOver(found);
  if (ofGradient && found.length < FEW) return { share: over.share, low: null, high: null };
  const [low, high] = bandpo.wilson(over.share, n ?? over.whole);
  if (found.length < FEW) return { ...over, low, high };
  return { ...over, low: Math.min(low, over.low), high: Math.max(high, over.high) };
}

function bars(rows) {
  // Of few tokens hardly anything is known: their interval may reach beyond the edge.
  const ends = (told) => told.map(({ found }) => (found ? found.high ?? found.share : 0));
  const many = rows.filter(({ n }) => n >= 50);
  const most = Math.max(...ends(many.length ? many : rows), ...rows.map(({ found }) => (found ? found.share : 0)), 1e-9);
  const scale = (x) => `${(100 * x) / most}%`;
  return element("div", { class: "bars" }, ...rows.flatMap(({ label, found, n, chosen }) => [
    element("span", { class: chosen ? "chosen" : "" }, label),
    found
      ? element("div", { class: "track" },
          element("div", { class: "bar", style: { "--share": scale(found.share) } }),
          found.low === null ? "" : element("div", { class: "spread", style: { "--low": scale(found.low), "--high": scale(found.high) } }))
      : element("div", { class: "track" }),
    element("span", { class: "figure" }, ...(found
      ? [percent(found.share), element("small", {}, found.low === null ? "" : `${percent(found.low)} – ${percent(found.high)}`)]
      : ["–"]), element("small", {}, n ? `n = ${Math.round(n).toLocaleString("en")}` : "no token")),
  ]));
}

const sum = (found) => found.reduce((total, [, n]) => total + n, 0);

function barsByBin(run, rule, row, side) {
  const [share, over] = side > 0 ? ["clip_high", "tokens_positive"] : ["clip_low", "tokens_negative"];
  return Object.entries(data.bins).map(([bin, label]) => {
    const found = pairs(run, rule, `${share}/${bin}`, `${over}/${bin}`, row);
    return { label: `p ${label}`, found: measured(found), n: sum(found) };
  });
}

function barsByRule(run, chosen, row) {
  return rulesOf(run).map((rule) => {
    const found = pairs(run, rule, "blocked_mass_below_0.1", "mass_positive_below_0.1", row);
    const tokens = (name) => pairs(run, name, "clip_high_below_0.1", "tokens_positive_below_0.1", row);
    const n = sum(tokens(rule)) || (run.rules ? 0 : sum(tokens(rulesOf(run)[0])));
    return { label: rule, found: n ? measured(found, n, true) : null, n, chosen: rule === chosen };
  });
}

const OWN_BAND = "a Band of yours";

/** The tokens that moved most: their ratio over their old probability, by what a rule does to them. */
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
    table[0][k] = k && p <= table[0][k - 1] ? table[0][k - 1] * (1 + 1e-12) : p; // each place once
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
      dots(`kept: ${count(3)}`, "--c5", 4), dots(`softened: ${count(4)}`, "--c4", 5),
      dots(`blocked, A > 0: ${count(5)}`, "--c1", 6), dots(`blocked, A < 0: ${count(6)}`, "--c0", 6),
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
  const told = data.runs.map((run, number) => [run, number]).filter(([run]) => rulesOf(run).length);
  if (!told.length) return;
  const silent = data.runs.map((run, number) => [run, number]).filter(([run]) => run.lacks);
  const why = silent.map(([run, number]) =>
    element("p", { class: "soft lacks" }, `${labels[number]} has no picture of single tokens: ${run.lacks}.`));
  const state = { run: told[0][0], rule: null, step: 0, divergence: "KL", radius: 0.05 };
  const controls = element("div", {});
  const drawn = element("div", { class: "panels" });
  const bySteps = (run) => run.audit.steps.map((_, row) => row).filter((row) =>
    Object.values(run.audit.columns["audit/clip_high"] || {})[row] != null || (run.tokens && run.tokens[run.audit.steps[row]]));

  function draw() {
    const { run, rule } = state;
    const rows = bySteps(run);
    const row = state.step ? rows[state.step - 1] : null;
    const when = row === null ? "all steps" : stepsOf(run, row);
    const mine = rule === OWN_BAND;
    const figures = [];
    const sides = [[1, "winners (A > 0)"], [-1, "losers (A < 0)"]].map(([side, who]) => [barsByBin(run, rule, row, side), who]);
    for (const [found, who] of mine ? [] : sides) {
      if (found.some(({ n }) => n)) {
        figures.push(element("figure", {}, element("h3", {}, `Clipped share of ${who}, by old probability`), bars(found),
          element("figcaption", {}, `${rule}, ${when}. Lines: 95 % interval, over steps from ${FEW} on, at least Wilson's of n tokens.`)));
      }
    }
    if (!mine && !figures.length) {
      figures.push(element("p", { class: "soft" }, `The log of this run does not tell what ${rule} clips by probability; with all metrics of the audit, or a record, it would.`));
    }
    const compared = barsByRule(run, rule, row);
    if (compared.some(({ found }) => found)) {
      figures.push(element("figure", {}, element("h3", {}, "Gradient of rare winners blocked (A > 0, p < 0.1)"), bars(compared),
        element("figcaption", {}, `Every rule on the same tokens, ${when}; n counts a token at each update on it. Lines: 95 % interval, over steps from ${FEW} on.`)));
    }
    let host = null;
    const tokens = !run.tokens ? [] : row === null ? Object.values(run.tokens).flat() : run.tokens[run.audit.steps[row]] || [];
    if (tokens.length) {
      host = element("div", {});
      figures.push(element("figure", { style: { "grid-column": "1 / -1" } },
        element("h3", {}, `What ${mine ? `Band, ${state.divergence} ${short(state.radius)},` : rule} does to the tokens that moved most`), host,
        element("figcaption", {}, `${tokens.length.toLocaleString("en")} tokens with the largest moves, ${when}. ${
          mine || run.rules[rule].limits ? "Shaded: what the rule allows." : "The rule's bounds are not drawn: they are of sequences, or depend on more than p."}`)));
    }
    drawn.replaceChildren(...figures);
    if (host) scatter(host, run, rule, tokens, mine ? bandpo.band(state.divergence, state.radius) : null);
  }

  function control() {
    const { run } = state;
    const rows = bySteps(run);
    const names = [...rulesOf(run), ...(run.tokens ? [OWN_BAND] : [])];
    if (!names.includes(state.rule)) state.rule = names[0];
    state.step = Math.min(state.step, rows.length);
    const text = (name) => (run.rules && run.rules[name] && name === names[0] ? `${name}: ${run.rules[name].method}` : name);
    const said = element("output", {});
    const say = () => (said.textContent = state.step ? stepsOf(run, rows[state.step - 1]) : "all");
    say();
    const slider = element("input", {
      type: "range", min: 0, max: rows.length, value: state.step, id: "step",
      oninput: (event) => { state.step = Number(event.target.value); say(); draw(); },
    });
    const parts = [];
    if (told.length > 1) {
      const options = told.map(([one, number]) => element("option", { value: number, selected: one === run }, labels[number]));
      parts.push(element("label", {}, "Run", element("select", {
        onchange: (event) => { state.run = data.runs[event.target.value]; control(); draw(); },
      }, ...options)));
    }
    parts.push(choices("rule", names.map((name) => [name, text(name)]), state.rule, (value) => { state.rule = value; control(); draw(); }));
    if (rows.length > 1) parts.push(element("label", {}, "Step", slider, said));
    if (state.rule === OWN_BAND) {
      const radius = element("output", {}, short(state.radius));
      parts.push(
        element("label", {}, "Divergence", element("select", {
          onchange: (event) => { state.divergence = event.target.value; state.radius = bandpo.divergences[state.divergence].radius; control(); draw(); },
        }, ...Object.keys(bandpo.divergences).map((name) => element("option", { value: name, selected: name === state.divergence }, name)))),
        element("label", {}, "Radius", element("input", {
          type: "range", min: -3, max: 0, step: 0.02, value: Math.log10(state.radius),
          oninput: (event) => { state.radius = 10 ** Number(event.target.value); radius.textContent = short(state.radius); draw(); },
        }), radius));
    }
    controls.replaceChildren(element("div", { class: "controls" }, ...parts));
  }

  section("What each rule would have blocked", controls, drawn, ...why);
  control();
  draw();
}

// ---- Words

function words() {
  const told = data.runs.map((run, number) => [run, number]).filter(([run]) => run.words && run.words.length);
  if (!told.length) return;
  const inside = told.flatMap(([run, number]) => [
    told.length > 1 ? element("h3", {}, labels[number]) : "",
    element("ol", { class: "words" }, ...run.words.map((word) => element("li", {},
      element("p", { class: "text" }, word.text[0], " ", element("mark", {}, word.text[1]), " ", word.text[2]),
      element("p", { class: "soft" }, `${word.step === null ? "" : `step ${word.step}: `}p ${short(word.p)}, ratio ${short(word.ratio)}, A ${word.advantage > 0 ? "+" : ""}${short(word.advantage)}`),
      element("div", { class: "kept" }, ...Object.entries(word.kept).map(([rule, share]) => element("span", {}, `${rule} `,
        share <= 0 ? element("b", {}, "blocks") : share < 0.99999 ? `keeps ${percent(share, 0)}` : "keeps"))))))]);
  section("Words that were blocked",
    element("p", { class: "soft" }, "Those whose dropped gradient was largest, in their answers, and what other rules would have done to them."),
    ...inside);
}

/** The tokens to which engine and trainer gave different probabilities, in their answers. */
function wordsApart() {
  const told = data.runs.map((run, number) => [run, number]).filter(([run]) => run.apart && run.apart.length);
  if (!told.length) return;
  const inside = told.flatMap(([run, number]) => [
    told.length > 1 ? element("h3", {}, labels[number]) : "",
    element("ol", { class: "words" }, ...run.apart.map((word) => element("li", {},
      element("p", { class: "text" }, word.text[0], " ", element("mark", {}, word.text[1]), " ", word.text[2]),
      element("p", { class: "soft" }, `${word.step === null ? "" : `step ${word.step}: `}p ${short(word.p)} in the trainer, ${short(word.p_engine)} in the engine`))))]);
  section("Words on which engine and trainer disagree",
    element("p", { class: "soft" }, "Those whose log-probabilities are farthest apart before updates, by 0.1 nats at least, in their answers."),
    ...inside);
}

/** Why a page has no figures on single tokens, or no words, in a sentence. */
function withoutTokens() {
  if (!data.runs.some((run) => rulesOf(run).length)) {
    return element("p", { class: "soft" },
      "What other clip rules would have blocked is not shown, as no run logs what its clip did by probability. In TRL one import adds it: ",
      element("code", {}, "from bandpo.integrations.trl import AuditedGRPOTrainer as GRPOTrainer"), ".");
  }
  if (data.runs.some((run) => run.words && run.words.length)) return "";
  return element("p", { class: "soft" }, data.runs.some((run) => run.tokens)
    ? "Words that were blocked are not shown: no token whose id is recorded was blocked."
    : "Words that were blocked are not shown: only a record keeps the ids of tokens.");
}
