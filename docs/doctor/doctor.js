/* The page on which a log is diagnosed in the browser. What a log holds is shown as text, and never read as HTML. */
"use strict";

(() => {
  const host = document.getElementById("doctor");
  const FOLDER = new URL("./", document.currentScript.src);
  const LARGEST = 100e6; // bytes of all files together
  const LONGEST_READING = 60; // seconds
  const LONGEST_SHARED = 2 ** 17; // characters of a verdict in a link
  const MOST_FILES = 2000;
  const FRAGMENT = "#verdict=";
  const HIDDEN = /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;
  const megabytes = (bytes) => `${(bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0)} MB`;
  const seconds = (since) => `${((performance.now() - since) / 1000).toFixed(1)} s`;

  let worker = null;
  let job = null; // what is being diagnosed: files, folder, names, runName, leftOut, began
  let turn = 0; // of what was asked for; what waited for the network while something else was asked for is not shown
  let limit = null; // the timer that ends the worker

  // --- Parts of the page ---

  const button = (text, onclick, primary) =>
    element("button", { type: "button", class: primary ? "md-button md-button--primary" : "md-button", onclick }, text);
  const files = element("input", { type: "file", multiple: true, hidden: true, "aria-label": "files", onchange: () => chosen(files) });
  const folder = element("input", { type: "file", webkitdirectory: true, hidden: true, "aria-label": "folder", onchange: () => chosen(folder) });
  const pasted = element("textarea", { rows: 6, spellcheck: "false", "aria-label": "pasted log", placeholder: "JSON lines, a CSV, a trainer_state.json, or the console output of TRL or verl" });
  const drop = element("div", { class: "drop" },
    element("p", { class: "invitation" }, "Drop a log here, or the folder of a run"),
    element("div", { class: "buttons" },
      button("Choose files", () => files.click(), true), button("Choose a folder", () => folder.click()),
      button("Try an example", example)),
    files, folder,
    element("details", { class: "paste" }, element("summary", {}, "Or paste it"), pasted,
      button("Diagnose the text", () => start(asFiles(pasted.value), ""))));
  const [bar, doing] = [element("progress", { max: 1 }), element("span")];
  const stop = button("Stop", () => { end(); say("Stopped."); });
  const status = element("div", { class: "status", role: "status" }, doing, bar, stop);
  const result = element("div", { class: "result" });

  function say(text, part) {
    doing.textContent = text;
    status.hidden = !text;
    bar.hidden = stop.hidden = !job;
    if (part === undefined) bar.removeAttribute("value");
    else bar.value = part;
  }

  // --- What is given ---

  function chosen(input) {
    const given = [...input.files].map((content) => ({ path: content.webkitRelativePath || content.name, content }));
    input.value = "";
    if (given.length) start(given);
  }

  /** A pasted text as a file whose name says what it looks like. */
  function asFiles(text) {
    const begins = text.trimStart()[0];
    let name = begins === "{" ? "pasted.jsonl" : "pasted.txt";
    try {
      if (begins === "{" || begins === "[") {
        JSON.parse(text);
        name = "pasted.json";
      }
    } catch {
      // Not one JSON value: JSON lines, or console output.
    }
    return [{ path: name, content: new Blob([text]) }];
  }

  async function example() {
    // The verdict was computed when the site was made, by the Python that the worker runs, which takes seconds to load.
    end();
    const mine = turn;
    const responses = await Promise.all(["example.jsonl", "example.json"].map((name) => fetch(new URL(name, FOLDER)))).catch(() => []);
    if (mine !== turn) return;
    if (!responses.length || !responses.every(({ ok }) => ok)) return refuse("The example cannot be loaded from this site.");
    const [content, answer] = await Promise.all([responses[0].blob(), responses[1].json()]);
    if (mine !== turn) return;
    say("The verdict on the example was computed when this site was made. Python is loaded for a log of yours.");
    show(answer, { files: [{ path: "example.jsonl", content }], folder: "", names: {}, runName: "", leftOut: [] });
  }

  /** All files in what was dropped, those in folders too. */
  async function dropped(transfer) {
    const entries = [...transfer.items].map((item) => item.webkitGetAsEntry && item.webkitGetAsEntry()).filter(Boolean);
    if (!entries.length) return [...transfer.files].map((content) => ({ path: content.name, content }));
    const given = [];
    const walk = async (entry) => {
      if (entry.isFile) {
        const content = await new Promise((resolve, reject) => entry.file(resolve, reject));
        given.push({ path: entry.fullPath.replace(/^\/+/, ""), content });
        return;
      }
      const reader = entry.createReader();
      for (;;) {
        const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
        if (!some.length) return;
        for (const inner of some) await walk(inner);
      }
    };
    for (const entry of entries) await walk(entry);
    return given;
  }

  drop.addEventListener("dragover", (event) => { event.preventDefault(); drop.classList.add("over"); });
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", async (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    try {
      const text = event.dataTransfer.getData("text/plain");
      const given = await dropped(event.dataTransfer);
      if (given.length) start(given);
      else if (text) start(asFiles(text));
      else refuse("What was dropped holds no file.");
    } catch (error) {
      refuse(`What was dropped cannot be read: ${error.message}`);
    }
  });

  // --- From files to a verdict ---

  const matches = (name, pattern) => new RegExp(`^${pattern.split("*").map((part) => part.replace(/[.+^${}()|[\]\\]/g, "\\$&")).join(".*")}$`).test(name);

  /** Of several files those that are read in the folder of a run, and the others. One file is read whatever its name. */
  async function sorted(given) {
    if (given.length === 1) return { kept: given, leftOut: [] };
    const response = await fetch(new URL("settings.json", FOLDER));
    if (!response.ok) throw new Error(`settings.json is not on this site (status ${response.status})`);
    const { patterns } = await response.json();
    const isRead = ({ path }) => patterns.some((pattern) => matches(path.split("/").pop(), pattern));
    const kept = given.filter(isRead);
    return { kept: kept.slice(0, MOST_FILES), leftOut: given.filter((one) => !isRead(one)).concat(kept.slice(MOST_FILES)) };
  }

  async function start(given) {
    const began = performance.now();
    end();
    const mine = turn;
    if (location.hash.startsWith(FRAGMENT)) history.replaceState(null, "", location.pathname + location.search);
    let chosenFiles;
    try {
      chosenFiles = await sorted(given);
    } catch (error) {
      if (mine === turn) refuse(`A part of this page cannot be loaded: ${error.message}`);
      return;
    }
    if (mine !== turn) return;
    const { kept, leftOut } = chosenFiles;
    if (!kept.length) {
      return refuse(`None of the ${given.length} files has the name of a log: ${listed(given.map(({ path }) => path))}. A record of tokens is diagnosed by the command, rlvet diagnose FOLDER.`);
    }
    const size = kept.reduce((sum, { content }) => sum + content.size, 0);
    if (size > LARGEST) {
      const what = kept.length === 1 ? `${kept[0].path} has` : `The ${kept.length} files have`;
      return refuse(`${what} ${megabytes(size)}. This page reads at most ${megabytes(LARGEST)}, because a browser's memory is small. Give the part with the metrics, or use the command: rlvet diagnose LOG.`);
    }
    if (!size) return refuse("There is nothing in it: the log is empty.");
    const paths = kept.map(({ path }) => path.split("/").filter((part) => part && part !== "." && part !== ".."));
    const top = kept.length > 1 || paths[0].length > 1 ? paths[0][0] : "";
    const shared = top && paths.every((path) => path.length > 1 && path[0] === top);
    return run({
      files: kept.map(({ content }, number) => ({ path: (shared ? paths[number].slice(1) : paths[number]).join("/"), content })),
      folder: shared ? top : top && "these-files",
      names: {}, runName: "", leftOut, began,
    });
  }

  function run(task) {
    job = task;
    result.replaceChildren();
    say("Loading Python …");
    try {
      // A worker that is made from a text takes over the policy of this page, by which nothing leaves the browser.
      const source = new Blob([`import ${JSON.stringify(new URL("worker.js", FOLDER).href)};`], { type: "text/javascript" });
      worker ||= new Worker(URL.createObjectURL(source), { type: "module" });
    } catch (error) {
      return refuse(`This browser cannot start a worker: ${error.message}`);
    }
    worker.onmessage = ({ data }) => {
      if (!job) return;
      if (data.kind === "progress") say(`Loading Python: ${megabytes(data.received)} of ${megabytes(data.total)} …`, data.received / data.total);
      if (data.kind === "reading") {
        job.loaded = performance.now();
        say("Reading the log …");
        limit = setTimeout(() => refuse(`Reading was ended after ${LONGEST_READING} seconds, the limit of this page. Give the part with the metrics, or use the command: rlvet diagnose LOG.`), LONGEST_READING * 1000);
      }
      if (data.kind === "failure") refuse(inWords(data.message));
      if (data.kind === "answer") finish(data.answer);
    };
    worker.onerror = (event) => {
      event.preventDefault();
      refuse(`The part of this page that runs Python cannot be loaded${event.message ? `: ${event.message}` : ""}. Reload the page; the browser must be of 2023 or newer.`);
    };
    const { files: given, folder: top, names, runName } = job;
    worker.postMessage({ files: given, folder: top, names, runName });
  }

  function inWords(message) {
    if (/MemoryError|out of memory|Array buffer allocation/i.test(message)) return "The log needs more memory than this browser gives a page. Give a part of it, or use the command: rlvet diagnose LOG.";
    return `Python failed on this log, which is an error of this page or of rlvet: ${message.trim().split("\n").slice(-1)[0]}`;
  }

  /** End what is under way; the next log starts a new worker if one was at work. */
  function end() {
    turn += 1;
    clearTimeout(limit);
    if (job && worker) {
      worker.terminate();
      worker = null;
    }
    job = null;
    say("");
  }

  function refuse(message) {
    end();
    result.replaceChildren(element("div", { class: "refusal", role: "alert" }, element("p", {}, message)));
  }

  function finish(answer) {
    const task = job;
    job = null;
    clearTimeout(limit);
    const loading = (task.loaded - task.began) / 1000;
    const part = loading < 0.1 ? "" : `, ${loading.toFixed(1)} s of it to load Python`;
    say(`Done in ${seconds(task.began)}${part}. Nothing was uploaded.`);
    show(answer, task);
  }

  // --- What is shown ---

  const listed = (names, most = 12) => names.slice(0, most).join(", ") + (names.length > most ? ` and ${names.length - most} more` : "");
  const row = (name, text) => (text ? [element("dt", {}, name), element("dd", {}, text)] : []);
  const badge = (severity) => element("span", { class: `severity ${severity}` }, severity);

  function findingShown(finding) {
    return element("li", { class: finding.severity },
      element("p", { class: "cause" }, badge(finding.severity), " ", element("code", {}, finding.code), " ", finding.cause),
      element("dl", {}, ...row("what to do", finding.advice), ...row("since", finding.since), ...row("since then", finding.cost),
        ...row("evidence", finding.evidence)));
  }

  /** The quantities that were read with their keys, and what was not read. */
  function readingShown(answer, leftOut) {
    const rows = Object.entries(answer.read).map(([quantity, keys]) =>
      element("tr", {}, element("td", {}, quantity), element("td", {}, keys.join(", "))));
    const untested = Object.entries(answer.untested).map(([name, how]) => (how ? `${name} (${how})` : name));
    return element("details", { class: "reading" }, element("summary", {}, answer.counts),
      element("div", { class: "scrolling" }, element("table", {}, element("tr", {}, element("th", {}, "quantity"), element("th", {}, "key of the log")), ...rows)),
      element("dl", {}, ...row("not read", answer.unread.join(", ") || "every key was read"), ...row("passed", answer.passed.join("; ")),
        ...row("undecided", untested.join("; ")), ...row("files left out", listed(leftOut.map(({ path }) => path)))));
  }

  /** A form by which the user says under which key the log has a quantity; the command has --map for it. */
  function namesForm(task, keys, quantities, open) {
    if (!keys.length) return "";
    const option = (name) => element("option", { value: name }, name);
    const quantity = element("select", { "aria-label": "quantity" }, ...quantities.map(option));
    quantity.value = "reward";
    const key = element("select", { "aria-label": "key" }, ...keys.map(option));
    const apply = button("Read it so", () => run({ ...task, names: { ...task.names, [quantity.value]: key.value }, began: performance.now() }), open);
    const named = Object.entries(task.names).map((pair) => pair.join("="));
    return element("details", { class: "names", open },
      element("summary", {}, open ? "Which key is the reward?" : "Name a key that was not read"),
      element("p", {}, "The log's key ", key, " is the quantity ", quantity, " ", apply),
      named.length ? element("p", { class: "named" }, `Named so far: ${named.join(", ")}`) : "");
  }

  function runsForm(task, names) {
    return element("div", { class: "runs" }, element("p", {}, "Which run is meant?"),
      element("div", { class: "buttons" }, ...names.map((name) => button(name, () => run({ ...task, runName: name, began: performance.now() })))));
  }

  function sharingShown(answer) {
    const box = element("textarea", { class: "copied", rows: 3, readonly: true, hidden: true, "aria-label": "text to copy" });
    const told = element("span", { class: "told", role: "status" });
    const copy = async (text, done) => {
      box.value = text;
      box.hidden = false;
      box.select();
      try {
        await navigator.clipboard.writeText(text);
        told.textContent = done;
      } catch {
        told.textContent = "Copy it from here:";
      }
    };
    const link = async () => {
      const address = location.href.replace(/#.*$/, "") + FRAGMENT + await packed(answer.text);
      copy(address, "Copied. The link itself holds the text of the verdict, with keys and file name of the log.");
    };
    return element("div", { class: "sharing" },
      element("div", { class: "buttons" }, button("Copy as Markdown", () => copy(answer.markdown, "Copied.")),
        button("Link to the verdict as text", link)), told, box);
  }

  const printed = (text) => element("pre", {}, element("code", {}, text));

  function show(answer, task) {
    const notes = [...answer.warnings, ...(answer.notes || [])].map((note) => element("p", { class: "note" }, note));
    if (answer.error) {
      const choices = answer.choices;
      const forms = answer.code === "several-runs" ? (choices.length ? runsForm(task, choices) : "") : namesForm(task, choices, answer.quantities, true);
      result.replaceChildren(element("div", { class: "refusal", role: "alert" }, element("p", {}, answer.error)), forms, ...notes);
      return;
    }
    const severity = answer.no_verdict ? "note" : answer.severity || "ok";
    const about = [answer.basis, answer.setup && `the run: ${answer.setup}`].filter(Boolean).join("; ");
    result.replaceChildren(
      element("div", { class: `headline ${severity}` }, element("p", {}, answer.headline)),
      element("p", { class: "basis" }, about), ...notes,
      answer.has_reward ? "" : namesForm(task, answer.unread, answer.quantities, true),
      element("ol", { class: "findings" }, ...answer.findings.map(findingShown)),
      sharingShown(answer),
      readingShown(answer, task.leftOut),
      answer.has_reward ? namesForm(task, answer.unread, answer.quantities, false) : "",
      element("details", { class: "printed", open: true }, element("summary", {}, "As rlvet diagnose prints it"), printed(answer.text)));
  }

  // --- A verdict in a link ---

  const through = (bytes, stream) => new Blob([bytes]).stream().pipeThrough(stream);

  async function packed(text) {
    const bytes = new Uint8Array(await new Response(through(text, new CompressionStream("deflate-raw"))).arrayBuffer());
    const letters = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
    return btoa(letters).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
  }

  async function unpacked(word) {
    const letters = atob(word.replace(/-/g, "+").replace(/_/g, "/"));
    const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
    const reader = through(bytes, new DecompressionStream("deflate-raw")).pipeThrough(new TextDecoderStream("utf-8", { fatal: true })).getReader();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return text;
      text += value;
      if (text.length > LONGEST_SHARED) {
        await reader.cancel();
        throw new Error("it is longer than a verdict");
      }
    }
  }

  /** The text of a link. Nothing is computed from it. */
  async function showShared() {
    if (!location.hash.startsWith(FRAGMENT)) return;
    try {
      const text = await unpacked(location.hash.slice(FRAGMENT.length));
      const visible = text.replace(HIDDEN, (letter) => `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`);
      result.replaceChildren(
        element("div", { class: "shared" }, element("p", {}, "This text came with the link. It was not computed here, and whoever made the link may have changed it.")),
        printed(visible));
    } catch {
      refuse("The link holds no verdict that can be read: it may have been cut off. Ask for it again.");
    }
  }

  host.append(drop, status, result);
  say("");
  showShared();
  addEventListener("hashchange", showShared);
})();
