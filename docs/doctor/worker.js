/* Diagnoses logs by rlvet's own Python, in a worker so that the page stays responsive. doctor.js starts it. */
const FOLDER = new URL("./", import.meta.url);
const HOME = "/logs";
let python; // a promise of Python with rlvet in it

/** A file of the site. */
async function file(name) {
  const response = await fetch(new URL(name, FOLDER));
  if (!response.ok) throw new Error(`${name} is not on this site (status ${response.status})`);
  return response;
}

/**
 * Have every answer to `fetch` counted as it arrives: Pyodide itself tells no progress. A copy is counted, because the
 * browser keeps compiled WebAssembly only for an answer as it came.
 */
function countFetchedBytes(total) {
  const plainFetch = self.fetch;
  let received = 0;
  const count = async (body) => {
    const reader = body.getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      received += value.byteLength;
      postMessage({ kind: "progress", received: Math.min(received, total), total });
    }
  };
  self.fetch = async (...request) => {
    const response = await plainFetch(...request);
    if (!response.ok) throw new Error(`${response.url} cannot be loaded (status ${response.status})`);
    count(response.clone().body).catch(() => {}); // who reads the answer itself learns of a failure
    return response;
  };
}

async function load() {
  const settings = await (await file("settings.json")).json();
  countFetchedBytes(settings.bytes);
  const { loadPyodide } = await import(new URL("pyodide/pyodide.mjs", FOLDER));
  const loaded = await loadPyodide({ indexURL: new URL("pyodide/", FOLDER).href });
  const [rlvet, code] = await Promise.all([file("rlvet.zip"), file("verdict.py")]);
  loaded.unpackArchive(await rlvet.arrayBuffer(), "zip", { extractDir: "/packages" });
  loaded.FS.mkdirTree("/packages");
  loaded.FS.writeFile("/packages/verdict.py", await code.text());
  loaded.runPython("import sys; sys.path.insert(0, '/packages'); from verdict import verdict");
  return loaded;
}

/** Put the files where Python finds them, and return the path that is to be read. */
async function store({ FS }, files, folder) {
  for (const { path, content } of files) {
    const name = `${HOME}/${folder ? `${folder}/` : ""}${path}`;
    FS.mkdirTree(name.slice(0, name.lastIndexOf("/")));
    FS.writeFile(name, new Uint8Array(await content.arrayBuffer()));
  }
  FS.chdir(HOME);
  return folder || files[0].path;
}

onmessage = async ({ data: { files, folder, names, runName } }) => {
  try {
    python ||= load();
    const loaded = await python;
    postMessage({ kind: "reading" });
    loaded.runPython(`import os, shutil; os.chdir("/"); shutil.rmtree("${HOME}", ignore_errors=True)`);
    const path = await store(loaded, files, folder);
    const verdict = loaded.globals.get("verdict");
    const answer = verdict(path, loaded.toPy(names), runName);
    verdict.destroy();
    postMessage({ kind: "answer", answer: JSON.parse(answer) });
  } catch (error) {
    postMessage({ kind: "failure", message: String(error && error.message ? error.message : error) });
  }
};
