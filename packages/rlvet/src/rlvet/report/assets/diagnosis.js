/* The diagnosis of each run: its findings with evidence and advice, and the data that were checked. */
"use strict";

const MARKS = { fault: "✗", look: "!", ok: "✓", none: "?" };
const SHOWN_UNREAD = 12;

const mark = (run) => element("span", { class: `state ${run.state}` }, `${MARKS[run.state]} `);

/** The id of a finding's element. */
const findingId = (number, rank) => `run-${number + 1}-finding-${rank + 1}`;

/** The figure of a finding, with its name, its error, the number of values and the steps. */
function figureOf(finding) {
  const [from, to] = finding.steps ?? [];
  const steps = !finding.steps ? "" : from === to ? `, step ${short(from)}` : `, steps ${short(from)} to ${short(to)}`;
  return `${finding.evidence}${steps}`;
}

/** A line of a finding: a bold label and a text. */
const line = (word, text, kind = "") => element("div", { class: kind }, element("b", {}, `${word} `), text);

function findingItem(run, number, finding, rank) {
  const codes = [finding.code, ...finding.or_else].join(" or ");
  const since = finding.onset === null ? "" : element("span", { class: "since" }, `since step ${short(finding.onset)}`);
  const shown = finding.quantities.find((name) => run.curves[name] && chartOf(name));
  const evidence = shown && finding.severity !== "note" ? element("figure", { class: "evidence" }) : "";
  // The chart beside the text is a link to the first curve; these are links to the others.
  const links = finding.quantities.filter((name) => chartOf(name) && name !== shown).flatMap((name, place) => [
    place ? ", " : "", element("a", { href: `#${panelId(name)}` }, chartOf(name).title)]);
  // The headline is the cause of the first finding, unless it is cut, or the finding is a note on a healthy run.
  const isTold = run.headline === `${codes}: ${finding.cause}`;
  const cause = !isTold && element("p", { class: "cause" }, finding.cause);
  const item = element("li", { class: `finding ${finding.severity}`, id: findingId(number, rank) },
    element("div", { class: "told" },
      element("div", { class: "kind" }, element("span", { class: "badge" }, finding.severity), element("strong", {}, codes), since),
      cause || "",
      line("Do:", finding.advice),
      finding.cost ? line("Since then:", finding.cost) : "",
      finding.evidence ? line("Measured:", figureOf(finding), "soft") : "",
      finding.settings.length ? line("Configuration:", finding.settings.join("; "), "soft") : "",
      links.length ? element("div", { class: "soft" }, element("b", {}, "See also: "), ...links) : ""),
    evidence);
  return { item, draw: () => evidence && evidenceOf(evidence, run, number, rank, shown) };
}

/** The findings of `rlvet lint` in the configuration of a run. */
function configuration(run) {
  const findings = run.configuration ? run.configuration.findings : [];
  if (!findings.length) return "";
  const items = findings.map((one) => element("li", { class: `finding lone ${one.severity}` },
    element("div", { class: "told" },
      element("div", { class: "kind" }, element("span", { class: "badge" }, one.severity), element("strong", {}, one.title)),
      element("p", { class: "cause" }, one.happens),
      line("Do:", one.fix),
      line("See:", `${one.source} (${one.id}${one.line ? `, line ${one.line}` : ""})`, "soft"))));
  return element("div", {}, element("h3", {}, "In its configuration"), element("ol", { class: "findings" }, ...items));
}

function folded(title, items) {
  return items.length
    ? element("details", {}, element("summary", {}, title), element("ul", {}, ...items.map((x) => element("li", {}, x))))
    : "";
}

/** The basis of a diagnosis: the data that were read, the keys that were not, and the checks that passed. */
function basis(run) {
  const untested = Object.entries(run.untested).map(([what, how]) => (how ? `${what} (${how})` : what));
  const passed = [...new Set(run.passed)];
  const unread = run.unread.length <= SHOWN_UNREAD
    ? [run.unread.length ? line("Not read:", run.unread.join(", "), "soft") : ""]
    : [line("Not read:", `${run.unread.slice(0, SHOWN_UNREAD).join(", ")} and ${run.unread.length - SHOWN_UNREAD} more`, "soft"),
       folded(`All ${run.unread.length} keys that were not read`, run.unread)];
  return element("div", { class: "basis" },
    data.runs.length > 1 ? element("h3", {}, run.name) : "",
    ...[run.coverage_text, run.basis].filter(Boolean).map((text) => element("div", { class: "soft" }, text)),
    ...run.notes.map((note) => element("div", { class: "soft" }, note)),
    ...unread,
    run.setup || run.method ? line("The run:", run.setup || run.method, "soft") : "",
    folded(`Passed${run.covered_part ? ` in ${run.covered_part}` : ""}: ${passed.length}`, passed),
    folded(`Undecided: ${untested.length}`, untested),
    folded(`Warnings while reading: ${run.warnings.length}`, run.warnings));
}

/** The names of the runs, with the verdict of each if there are several. */
function title() {
  if (data.runs.length === 1) return;
  main.append(element("h1", {}, `Report on ${data.runs.length} runs`),
    element("ul", { class: "summary" }, ...data.runs.map((run, number) => element("li", { style: { "--run": `var(${hue(number)})` } },
      element("a", { href: `#run-${number + 1}` }, labels[number]), " ", mark(run), run.headline))));
}

/** The verdict on each run, with its findings. */
function diagnosis() {
  data.runs.forEach((run, number) => {
    const items = run.findings.map((finding, rank) => findingItem(run, number, finding, rank));
    const verdict = element("div", { class: "verdict" },
      element("div", { class: "name" }, run.name),
      element("div", { class: "headline" }, mark(run), run.headline),
      run.expected_fall ? element("p", { class: "fall" }, run.expected_fall) : "",
      ...run.remarks.map((text) => element("p", { class: "fall" }, text)),
      run.order_text ? element("p", { class: "fall order" }, run.order_text) : "",
      items.length ? element("ol", { class: "findings" }, ...items.map(({ item }) => item)) : "",
      configuration(run),
      run.how_sure ? element("p", { class: "soft legend" }, run.how_sure) : "",
      run.legend ? element("p", { class: "soft legend" }, run.legend) : "");
    main.append(element("section", { class: "run", id: `run-${number + 1}`, style: { "--run": `var(${hue(number)})` } }, verdict));
    items.forEach(({ draw }) => draw());
  });
}

/** The data on which the verdicts rest. */
function restsOn() {
  foldedSection("What this rests on", ...data.runs.map(basis));
}
