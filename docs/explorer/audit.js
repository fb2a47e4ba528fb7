/* What `bandpo audit --json` printed, as sentences, words and tables. The file is read in the browser and sent nowhere. */
"use strict";

(() => {
  const host = document.getElementById("audit-summary");
  const LARGEST = 50e6; // bytes
  const MOST = 200; // rows of a table, and tokens
  const FEWEST = 30; // tokens of which shares are said
  const percent = (x) => (typeof x === "number" ? `${(100 * x).toFixed(1)} %` : "–");
  const plain = (x) => (typeof x === "number" ? String(Number(x.toPrecision(3))) : "–");
  const ROWS = [
    ["gradient on winners dropped, p < 0.1", "blocked_mass_below_0.1", percent, "tokens_positive_below_0.1"],
    ["gradient on winners dropped, p < 0.01", "blocked_mass_below_0.01", percent, "tokens_positive_below_0.01"],
    ["gradient on winners dropped", "blocked_mass", percent, "tokens"],
    ["clip-high rate", "clip_high", percent, "tokens"],
    ["clip-low rate", "clip_low", percent, "tokens"],
    ["gradient's cosine with the run's", "gradient_cosine", plain],
    ["effective sample size of its weights, A ≠ 0", "effective_sample_size", percent, "tokens"],
  ];

  /** Text in which control characters, and those that change the direction of writing, are escaped. */
  const visible = (text) => String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu, (letter) => `\\u{${letter.codePointAt(0).toString(16)}}`);
  const objects = (list) => (Array.isArray(list) ? list : []).filter((one) => one && typeof one === "object").slice(0, MOST);
  const entries = (object) => (object && typeof object === "object" ? Object.entries(object) : []);
  const cells = (kind, texts) => texts.map((text) => element(kind, {}, visible(text)));

  function table(header, rows) {
    if (!rows.length) return "";
    return element("div", { class: "wide" }, element("table", {}, element("tr", {}, ...cells("th", header)),
      ...rows.map((row) => element("tr", {}, ...cells("td", row)))));
  }

  /** The metrics of each rule. Those of a log are all the run's, with the other rules in their names. */
  function rulesOf(run) {
    const rules = entries(run.methods);
    if (rules.length !== 1) return rules;
    const [own, metrics] = rules[0];
    const others = {};
    for (const [key, value] of entries(metrics)) {
      const [, name, metric] = /^if\/(.+)\/(\w[\w.]*)$/.exec(key) || [];
      if (name) (others[name] ||= {})[metric] = value;
    }
    return [[own, metrics], ...Object.entries(others)];
  }

  function shown(name, run) {
    const rules = rulesOf(run);
    const kinds = objects(run.kinds);
    const names = kinds.length ? entries(kinds[0].dropped).map(([rule]) => rule) : [];
    const own = (rules[0] || [])[1] || {};
    const few = (key) => typeof own[key] === "number" && own[key] < FEWEST;
    const byRule = ROWS.map(([label, key, format, over]) => [label, ...rules.map(([, metrics]) => few(over) ? "–" : format((metrics || {})[key]))]);
    const fewRare = kinds.reduce((sum, row) => sum + (row.tokens || 0), 0) < FEWEST;
    const dropped = (row, rule) => row.tokens < FEWEST ? `${plain((row.dropped_tokens || {})[rule])} of ${row.tokens}` : percent((row.dropped || {})[rule]);
    return element("section", {},
      element("h4", {}, visible(name)),
      ...(Array.isArray(run.lines) ? run.lines : []).slice(0, MOST).map((line) => element("p", {}, visible(line))),
      element("ol", { class: "words" }, ...objects(run.tokens).map((token) => {
        const [before, word, after] = Array.isArray(token.text) ? token.text : ["", "", ""];
        const kept = entries(token.kept).map(([rule, share]) => `${rule} ${percent(share)}`).join(", ");
        return element("li", {},
          element("bdi", {}, visible(before)), " ", element("mark", {}, element("bdi", {}, visible(word))), " ", element("bdi", {}, visible(after)),
          element("p", { class: "caption" }, visible(`p ${plain(token.p)}, ratio ${plain(token.ratio)}, A ${plain(token.advantage)}; gradient kept by ${kept}`)));
      })),
      table(["rare winners by kind", "tokens", "of the gradient", ...names.map((rule) => `${rule} drops`)],
        kinds.map((row) => [row.kind, plain(row.tokens), fewRare ? "–" : percent(row.share), ...names.map((rule) => dropped(row, rule))])),
      table(["", ...rules.map(([rule]) => rule)], byRule.filter(([, ...values]) => values.some((value) => value !== "–"))));
  }

  const result = element("div", { class: "result" });

  function show(text) {
    let runs;
    try {
      runs = JSON.parse(text);
    } catch (error) {
      return refuse(`This is no JSON (${error.message}): give the output of bandpo audit RUN --json.`);
    }
    const known = entries(runs).filter(([, run]) => run && Array.isArray(run.lines) && run.methods);
    if (!known.length) return refuse("This is not the output of bandpo audit RUN --json: no entry has lines and methods.");
    result.replaceChildren(...known.map(([name, run]) => shown(name, run)));
  }

  const refuse = (message) => result.replaceChildren(element("p", { class: "refused" }, visible(message)));

  async function read(file) {
    if (!file) return;
    if (file.size > LARGEST) return refuse(`The file has ${Math.round(file.size / 1e6)} MB; the output of bandpo audit --json has less than one.`);
    show(await file.text());
  }

  const input = element("input", { type: "file", accept: ".json", "aria-label": "output of bandpo audit --json", onchange: () => read(input.files[0]) });
  const drop = element("div", { class: "drop",
    ondragover: (event) => event.preventDefault(),
    ondrop: (event) => { event.preventDefault(); read(event.dataTransfer.files[0]); } },
    "Drop the output of bandpo audit RUN --json here, or choose it: ", input);
  host.replaceChildren(drop, result);
  host.show = show;
})();
