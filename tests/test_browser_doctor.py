"""The page that diagnoses a log in the browser says what `rlvet diagnose` says, and sends nothing anywhere."""

import base64
import gzip
import http.server
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
import zlib
from functools import partial

import pytest

import fetch_pyodide
from browser import CHROMIUM, Chromium, needs_browser
from pages import ROOT
from rlvet import diagnose
from rlvet.runs.logs import UnreadableLog, read_log

pytest.importorskip("typer")
from typer.testing import CliRunner

from rlvet.cli.app import app

PYODIDE = ROOT / "build/pyodide"
needs_site = pytest.mark.skipif(
    not (PYODIDE / "pyodide.asm.wasm").is_file() or importlib.util.find_spec("mkdocs") is None,
    reason="build/pyodide or mkdocs is not here: make docs",
)


def in_browser(test):
    """Mark a test that opens the page in Chromium."""
    return needs_browser(needs_site(pytest.mark.slow(test)))


NAVIGATION = [{"Start": "index.md"}, {"What is wrong with a run": "diagnose.md"}]
RESULT = "document.querySelector('#doctor .result').innerText"
TEXT = "document.querySelector('#doctor .printed pre')?.textContent"
HOSTILE = "<img src=x onerror=window.hacked=1>"
ELEMENTS_OF_A_LOG = "document.querySelectorAll('#doctor .result :is(img, script, iframe)').length"


def simulated(steps=60, reward="reward", **more):
    """Return a log whose reward rises, as JSON lines."""
    rows = (
        {"step": n, reward: n / steps, "entropy": 1 - n / 200, "kl": n / 1000} | more
        for n in range(1, steps + 1)
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


class Requests(http.server.SimpleHTTPRequestHandler):
    """Serves a folder to pages of any host, and keeps what was asked for in ``server.asked``."""

    def do_GET(self):
        self.server.asked.append(self.path)
        super().do_GET()

    def do_POST(self):
        self.server.asked.append(self.path)
        self.send_error(405)

    def end_headers(self):
        self.send_header("Access-Control-Allow-Origin", "*")
        super().end_headers()

    def log_message(self, *_):
        pass


def served(folder):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Requests, directory=folder))
    server.asked = []
    server.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build a site with only this page, with the theme and the hooks of the full site."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    docs = folder / "docs"
    docs.mkdir(parents=True)
    (docs / "index.md").write_text(f"# Start\n\n```text\n{'a printed sentence, ' * 20}\n```\n")
    page = (ROOT / "docs/diagnose.md").read_text()
    # The other pages are not here.
    (docs / "diagnose.md").write_text(re.sub(r"\]\([\w./-]+\.md(#[\w-]+)?", "](index.md", page))
    shutil.copytree(ROOT / "docs/doctor", docs / "doctor")
    shutil.copy(ROOT / "docs/extra.css", docs)
    changes = {
        "repo_url": "https://github.com/example/bandpo",
        "docs_dir": str(docs),
        "site_dir": str(folder / "site"),
        "nav": NAVIGATION,
        "plugins": ["search"],
    }
    build(load_config(str(ROOT / "mkdocs.yml"), **changes))
    server = served(folder / "site")
    server.folder = folder / "site"
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="module")
def loaded_tab(site, browser):
    """Open the page, whose Python is loaded once for all tests that read a log."""
    return browser.open(f"{site.address}/diagnose/")


@pytest.fixture
def tab(loaded_tab):
    """Return the page in its initial state."""
    loaded_tab.evaluate("document.querySelector('#doctor .result').replaceChildren()")
    return loaded_tab


def press(tab, text):
    buttons = "[...document.querySelectorAll('#doctor button')]"
    tab.evaluate(f"{buttons}.find((button) => button.textContent === {json.dumps(text)}).click()")


def paste(tab, text):
    tab.evaluate(f"document.querySelector('#doctor .paste textarea').value = {json.dumps(text)}; 0")
    press(tab, "Diagnose the text")


def printed_by_command(path, *options):
    """Return what `rlvet diagnose` prints."""
    result = CliRunner().invoke(app, ["diagnose", str(path), *options])
    assert result.exit_code in (0, 1, 2)
    return result.stdout.removesuffix("\n")


# --- In Chromium ---


@in_browser
def test_the_example_is_diagnosed_as_by_the_command_and_all_comes_from_the_site(site, browser):
    # A page of its own, in which Python is not loaded yet.
    browser.events.clear()
    tab = browser.open(f"{site.address}/diagnose/")
    press(tab, "Try an example")
    text = tab.wait_for(TEXT)
    assert text == printed_by_command(site.folder / "doctor/example.jsonl")
    assert text.startswith("engine-mismatch")
    # The verdict of the example is made with the site. Python computes the same.
    tab.choose("#doctor [aria-label=files]", site.folder / "doctor/example.jsonl")
    tab.wait_for("document.querySelector('#doctor .status').textContent.includes('to load Python')")
    assert tab.wait_for(TEXT) == text

    shown = tab.evaluate(RESULT)
    findings = diagnose(site.folder / "doctor/example.jsonl").findings
    assert [finding.code for finding in findings] == ["engine-mismatch", "collapse"]
    for finding in findings:
        assert finding.cause in shown
        assert finding.advice in shown
        assert f"step {finding.onset:g}" in shown
        assert finding.evidence in shown

    addresses = [
        event["params"]["request"]["url"]
        for event in tab.browser.events
        if event["method"] == "Network.requestWillBeSent"
    ]
    others = [address for address in addresses if not address.startswith((site.address, "blob:", "data:"))]
    assert others == []
    assert tab.complaints() == []


@in_browser
def test_the_page_is_shown_before_python_is_loaded(site, browser):
    # The requests and complaints of this page alone.
    site.asked.clear()
    browser.events.clear()
    tab = browser.open(f"{site.address}/diagnose/")
    tab.wait_for("document.querySelector('#doctor .invitation').textContent")
    assert [path for path in site.asked if "pyodide" in path or "rlvet.zip" in path] == []
    press(tab, "Try an example")
    assert tab.wait_for(TEXT).startswith("engine-mismatch")
    # Nor does the example need it.
    assert [path for path in site.asked if "pyodide" in path or "rlvet.zip" in path] == []
    assert tab.complaints() == []
    tab.call("Page.close")


@in_browser
def test_an_example_that_comes_late_does_not_end_what_was_asked_for_since(tab):
    tab.evaluate(
        "window.plainFetch = fetch; window.waiting = []; "
        "window.fetch = (...asked) => new Promise((done) => waiting.push(() => done(plainFetch(...asked)))); 0"
    )
    try:
        press(tab, "Try an example")
        paste(tab, simulated())
        assert tab.evaluate("waiting.length") == 2
        tab.evaluate("new Promise((done) => { waiting.forEach((come) => come()); setTimeout(done, 300); })")
    finally:
        tab.evaluate("window.fetch = plainFetch; 0")
    tab.wait_for("document.querySelector('#doctor .status').textContent.startsWith('Done in')")
    assert "60 log steps" in tab.evaluate(RESULT)


@in_browser
def test_reading_that_takes_too_long_is_ended(site, browser, tmp_path):
    """Reading the log takes seconds, and the time limit is shortened from a minute to a fifth of a second."""
    (tmp_path / "metrics.jsonl").write_text(simulated(steps=200_000))
    tab = browser.open(f"{site.address}/diagnose/")
    tab.evaluate(
        "window.limits = []; window.plain = setTimeout; "
        "window.setTimeout = (task, wait) => "
        "{ window.limits.push(wait); return window.plain(task, Math.min(wait, 200)); }; 0"
    )
    tab.choose("#doctor [aria-label=files]", tmp_path / "metrics.jsonl")
    shown = tab.wait_for("document.querySelector('#doctor .refusal')?.innerText")
    assert shown.startswith("Reading was ended after 60 seconds, the limit of this page.")
    assert tab.evaluate("window.limits.includes(60000)")
    tab.evaluate("window.setTimeout = window.plain; 0")
    # The next log is read by a new worker, whose time limit is not that of the one before.
    paste(tab, simulated())
    assert tab.wait_for(TEXT)
    tab.call("Page.close")


@in_browser
def test_once_python_is_loaded_the_site_is_asked_for_nothing_more(site, tab, tmp_path):
    paste(tab, simulated())
    tab.wait_for(TEXT)
    asked = len(site.asked)
    (tmp_path / "metrics.jsonl").write_text(simulated(steps=80))
    tab.choose("#doctor [aria-label=files]", tmp_path / "metrics.jsonl")
    tab.wait_for(f"{RESULT}.includes('80 log steps')")
    assert site.asked[asked:] == []


@in_browser
def test_a_run_s_folder_is_dropped_with_its_configuration(tab, tmp_path):
    """The configuration is YAML, which takes a package; a log in gzip; other files are left out."""
    length = {"completions/mean_length": 1000.0}
    run = tmp_path / "my run"
    (run / "inside").mkdir(parents=True)
    (run / "inside/log.jsonl.gz").write_bytes(gzip.compress(simulated(**length).encode()))
    (run / "config.yaml").write_text(
        "num_generations: 8\nmax_completion_length: 1024\nbeta: 0.0\nloss_type: grpo\nsteps_per_generation: 4\n"
    )
    (run / "model.safetensors").write_bytes(b"weights")
    tab.drop("#doctor .drop", run)
    text = tab.wait_for(TEXT)
    assert text == printed_by_command(run)
    assert "configuration: max_completion_length=1024 (config.yaml)" in text
    assert "model.safetensors" in tab.evaluate("document.querySelector('#doctor .reading').textContent")


@in_browser
def test_several_files_are_dropped_together(tab, tmp_path):
    (tmp_path / "train.jsonl").write_text(simulated(reward="score_of_mine"))
    (tmp_path / "bandpo-names.json").write_text('{"reward": "score_of_mine"}')
    tab.drop("#doctor .drop", tmp_path / "train.jsonl", tmp_path / "bandpo-names.json")
    assert tab.wait_for(TEXT) == printed_by_command(tmp_path)


@in_browser
@pytest.mark.parametrize("name", ["console.log", "trainer_state.json", "table.csv"])
def test_other_kinds_of_logs(name, tab, tmp_path):
    rows = [json.loads(line) for line in simulated().splitlines()]
    content = {
        "console.log": "".join(
            f"(pid=1) step:{row['step']} - critic/score/mean:{row['reward']:.3f}\n" for row in rows
        ),
        "trainer_state.json": json.dumps({"log_history": rows}, indent=1),
        "table.csv": "step,reward\n" + "".join(f"{row['step']},{row['reward']}\n" for row in rows),
    }[name]
    (tmp_path / name).write_text(content)
    tab.choose("#doctor [aria-label=files]", tmp_path / name)
    text = tab.wait_for(TEXT)
    assert text == printed_by_command(tmp_path / name)
    # Pasted, it has no name that tells what it is.
    tab.evaluate("document.querySelector('#doctor .result').replaceChildren()")
    paste(tab, content)
    assert tab.wait_for(TEXT).splitlines()[0] == text.splitlines()[0]


@in_browser
def test_the_user_names_the_key_of_the_reward(tab, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(simulated(reward="score_of_mine", other=0.5))
    tab.choose("#doctor [aria-label=files]", tmp_path / "metrics.jsonl")
    text = tab.wait_for(TEXT)
    assert text.startswith("no verdict: no key of the log is known to be the reward")
    keys = tab.evaluate(
        "[...document.querySelectorAll('#doctor [aria-label=key] option')].map((o) => o.value)"
    )
    assert keys == ["score_of_mine", "other"]
    assert tab.evaluate("document.querySelector('#doctor .names').open")
    press(tab, "Read it so")
    tab.wait_for(f"{TEXT}?.startsWith('ok')")
    assert tab.evaluate(TEXT) == printed_by_command(
        tmp_path / "metrics.jsonl", "--map", "reward=score_of_mine"
    )
    assert "reward=score_of_mine" in tab.evaluate("document.querySelector('#doctor .names').textContent")


@in_browser
def test_a_log_that_seems_to_be_of_other_training_is_read_once_its_reward_is_named(tab, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(simulated(reward="mean_token_accuracy", loss=1.0))
    tab.choose("#doctor [aria-label=files]", tmp_path / "metrics.jsonl")
    tab.wait_for(f"{RESULT}.includes('thought to be of supervised training')")
    tab.evaluate("document.querySelector('#doctor [aria-label=key]').value = 'mean_token_accuracy'; 0")
    press(tab, "Read it so")
    named = "reward=mean_token_accuracy"
    assert tab.wait_for(TEXT) == printed_by_command(tmp_path / "metrics.jsonl", "--map", named)


@in_browser
def test_one_of_several_runs_is_chosen(tab, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(simulated() + simulated(steps=70))
    tab.choose("#doctor [aria-label=files]", tmp_path / "metrics.jsonl")
    tab.wait_for(f"{RESULT}.includes('holds 2 runs')")
    press(tab, "2")
    assert tab.wait_for(TEXT) == printed_by_command(tmp_path / "metrics.jsonl", "--run-name", "2")


@in_browser
def test_texts_of_a_log_are_never_read_as_html(tab, tmp_path):
    """In keys, in names of runs and files, in what is read and not read, and in an error."""
    hostile = {
        f"my/{HOSTILE}": 0.5,
        f"rewards/{HOSTILE}/mean": 0.0,
        "</code></pre><script>window.hacked=1</script>": 1,
    }
    file = tmp_path / f"{HOSTILE}.jsonl"
    file.write_text(simulated(**hostile))
    tab.choose("#doctor [aria-label=files]", file)
    assert tab.wait_for(TEXT) == printed_by_command(file)
    assert HOSTILE in tab.evaluate("document.querySelector('#doctor .reading').textContent")
    assert tab.evaluate(ELEMENTS_OF_A_LOG) == 0

    runs = [
        json.loads(line) | {"run_name": name} for name in (HOSTILE, "b") for line in simulated().splitlines()
    ]
    paste(tab, "".join(json.dumps(row) + "\n" for row in runs))
    tab.wait_for(f"{RESULT}.includes('holds 2 runs')")
    assert tab.evaluate(ELEMENTS_OF_A_LOG) == 0
    press(tab, HOSTILE)
    tab.wait_for(TEXT)
    assert tab.evaluate(ELEMENTS_OF_A_LOG) == 0

    paste(tab, f"{{{HOSTILE}\n")
    tab.wait_for(f"{RESULT}.includes('not a JSON object')")
    assert HOSTILE[:20] in tab.evaluate(RESULT)
    assert tab.evaluate(ELEMENTS_OF_A_LOG) == 0
    assert tab.evaluate("window.hacked ?? null") is None


@in_browser
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("curves.png", b"\x89PNG\r\n\x1a\n" + bytes(50), "thought to be an image (PNG)"),
        ("metrics.jsonl", b'{"step": 1, "rew\n{"step": 2}\n', "line 1: not a JSON object"),
        ("empty.jsonl", b"", "the log is empty"),
        ("notes.txt", b"Training went well.\n", "thought to be a text"),
        ("run.db", b"SQLite format 3\0" + bytes(200), "or a damaged one"),
        ("tokens-0.arrow", b"ARROW1" + bytes(50), "A record of tokens is diagnosed by the command"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(name, content, message, tab, tmp_path):
    (tmp_path / name).write_bytes(content)
    tab.choose("#doctor [aria-label=files]", tmp_path / name)
    tab.wait_for(f"{RESULT}.includes({json.dumps(message)})")
    assert "Traceback" not in tab.evaluate(RESULT)
    # The page goes on.
    paste(tab, simulated())
    tab.wait_for(TEXT)


@in_browser
def test_a_file_that_is_too_large_is_refused(tab, tmp_path):
    with (tmp_path / "large.jsonl").open("wb") as file:
        file.truncate(100_000_001)
    tab.choose("#doctor [aria-label=files]", tmp_path / "large.jsonl")
    tab.wait_for(f"{RESULT}.includes('large.jsonl has 100 MB. This page reads at most 100 MB')")


@in_browser
def test_the_last_line_of_a_run_still_at_work_is_left_out_with_a_note(tab):
    paste(tab, simulated() + '{"step": 61, "rew')
    tab.wait_for(TEXT)
    assert "the last line is cut off and is left out" in tab.evaluate(RESULT)


@in_browser
def test_a_verdict_is_copied_as_markdown_and_shared_as_a_link(site, tab, browser, tmp_path):
    log = tmp_path / f"{HOSTILE}.jsonl"
    log.write_text(simulated())
    tab.choose("#doctor [aria-label=files]", log)
    text = tab.wait_for(TEXT)
    press(tab, "Copy as Markdown")
    copied = "document.querySelector('#doctor .copied').value"
    assert tab.wait_for(copied) == diagnose(log).as_markdown()
    press(tab, "Link to the verdict as text")
    address = tab.wait_for(f"{copied}.startsWith('http') && {copied}")
    assert address.startswith(f"{site.address}/diagnose/#verdict=")
    assert re.fullmatch(r"[\w-]+", address.partition("#verdict=")[2])

    asked = len(site.asked)
    shared = browser.open(address)
    shown = shared.wait_for("document.querySelector('#doctor .result pre')?.textContent")
    assert shown == text
    assert HOSTILE in shown
    assert shared.evaluate(ELEMENTS_OF_A_LOG) == 0
    assert "It was not computed here" in shared.evaluate(RESULT)
    # Nothing that runs Python was loaded for it.
    assert [path for path in site.asked[asked:] if "pyodide" in path or "worker.js" in path] == []
    shared.call("Page.close")


def fragment_of(text):
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = compressor.compress(text.encode()) + compressor.flush()
    return "#verdict=" + base64.urlsafe_b64encode(packed).decode().rstrip("=")


@in_browser
@pytest.mark.parametrize(
    "fragment",
    ["#verdict=", "#verdict=!!", "#verdict=AAAA", fragment_of("a verdict")[:-4], fragment_of("x" * 2**24)],
    ids=["empty", "other letters", "no deflate", "cut off", "a bomb"],
)
def test_a_link_without_a_verdict_is_refused(fragment, site, browser):
    opened = browser.open(f"{site.address}/diagnose/{fragment}")
    opened.wait_for(f"{RESULT}.includes('The link holds no verdict that can be read')")
    opened.call("Page.close")


@in_browser
def test_hidden_characters_of_a_shared_text_are_shown(site, browser):
    fragment = fragment_of("ok: \u202egnorw\u0007")
    opened = browser.open(f"{site.address}/diagnose/{fragment}")
    shown = opened.wait_for("document.querySelector('#doctor .result pre')?.textContent")
    assert shown == r"ok: \u202egnorw\u0007"
    opened.call("Page.close")


@in_browser
def test_neither_the_page_nor_its_worker_can_reach_another_host(site, tab, tmp_path):
    elsewhere = served(tmp_path)
    ask = f"fetch('{elsewhere.address}/log', {{method: 'POST', body: 'x'}}).then(() => 'sent', (e) => 'refused: ' + e)"
    paste(tab, simulated())
    tab.wait_for(TEXT)
    assert tab.evaluate(ask).startswith("refused")
    assert tab.evaluate(ask, tab.worker()).startswith("refused")
    picture = (
        "new Promise((done) => { const image = new Image(); image.onload = image.onerror = () => done(1);"
        f"image.src = '{elsewhere.address}/image.png'; }})"
    )
    tab.evaluate(picture)
    assert elsewhere.asked == []
    # The same request is possible where the policy does not hold.
    plain = tab.browser.open(f"{site.address}/404.html")
    plain.evaluate(f"fetch('{elsewhere.address}/log').then(() => 1)")
    assert elsewhere.asked == ["/log"]
    plain.call("Page.close")
    elsewhere.shutdown()
    elsewhere.server_close()


@in_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_fits_its_window_and_can_be_read(width, dark, site, browser):
    opened = browser.open(f"{site.address}/diagnose/", width=width, dark=dark)
    press(opened, "Try an example")
    opened.wait_for(TEXT)
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    # Contrast of the texts with the page behind them, as WCAG has it: at least 4.5.
    contrast = """(() => {
      const bright = (color) => {
        const c = color.match(/[\\d.]+/g).slice(0, 3).map((x) => x / 255)
          .map((x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
        return 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2];
      };
      const page = bright(getComputedStyle(document.body).backgroundColor);
      return [...document.querySelectorAll("#doctor :is(.severity, .sharing .md-button)")].map((e) => {
        const text = bright(getComputedStyle(e).color);
        return (Math.max(text, page) + 0.05) / (Math.min(text, page) + 0.05);
      });
    })()"""
    assert min(opened.evaluate(contrast)) >= 4.5
    opened.call("Page.close")


@in_browser
def test_on_a_phone_a_row_of_a_table_is_a_card_and_no_button_lies_over_code(site, browser):
    opened = browser.open(f"{site.address}/diagnose/", width=390)
    cells = """JSON.stringify([...document.querySelectorAll(".md-typeset td[data-label]")].map((cell) => [
      cell.getBoundingClientRect().right, cell.dataset.label, getComputedStyle(cell, "::before").content]))"""
    for right, label, shown in json.loads(opened.evaluate(cells)):
        assert right <= 390
        assert shown == (json.dumps(label) if label else "none")
    overlaps = """[...document.querySelectorAll("pre")].filter((pre) => {
      const icon = pre.querySelector(".md-clipboard, .md-code__nav");
      const code = pre.querySelector("code");
      const first = code.getBoundingClientRect().top + parseFloat(getComputedStyle(code).paddingTop);
      return icon && icon.getBoundingClientRect().bottom > first + 1;
    }).length"""
    assert opened.evaluate(overlaps) == 0
    assert opened.evaluate("document.querySelectorAll('pre :is(.md-clipboard, .md-code__nav)').length") > 3
    opened.call("Page.close")


@in_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_what_a_program_prints_is_read_to_its_end(width, site, browser):
    opened = browser.open(f"{site.address}/", width=width)
    widths = """JSON.stringify([...document.querySelectorAll(".language-text code")].map(
      (code) => [code.scrollWidth, code.clientWidth]))"""
    blocks = json.loads(opened.evaluate(widths))
    assert len(blocks) == 1
    assert all(needed <= shown for needed, shown in blocks)
    opened.call("Page.close")


# --- Without a browser ---


@pytest.mark.skipif(not os.environ.get("CI"), reason="CI is not set: this is not continuous integration")
def test_continuous_integration_has_chromium_and_pyodide():
    """Without them the tests above would be skipped there."""
    assert CHROMIUM
    assert (PYODIDE / "pyodide.asm.wasm").is_file()


def module_at(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_choices_are_the_runs_or_the_keys(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(simulated() + simulated(70))
    with pytest.raises(UnreadableLog) as raised:
        read_log(tmp_path / "metrics.jsonl")
    assert raised.value.choices == ("1", "2")
    (tmp_path / "other.jsonl").write_text(json.dumps({"step": 1, "a": 1.0, "b": 2.0, "text": "x"}) + "\n")
    with pytest.raises(UnreadableLog) as raised:
        read_log(tmp_path / "other.jsonl")
    assert raised.value.choices == ("a", "b")


def test_pyodide_of_another_hash_is_refused(tmp_path, monkeypatch):
    (tmp_path / "npm").write_text('#!/bin/sh\necho tampered >"$5/pyodide-$VERSION.tgz"\n')
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("VERSION", fetch_pyodide.VERSION)
    with pytest.raises(
        fetch_pyodide.FetchProblem, match=r"has the hash sha512-.*, not sha512-.* was not unpacked"
    ):
        fetch_pyodide.fetch(tmp_path / "pyodide")
    assert not (tmp_path / "pyodide" / "pyodide.mjs").exists()


def test_without_npm_the_build_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        fetch_pyodide.FetchProblem, match=r"npm is not installed, .* pyodide \d.*: install Node\.js"
    ):
        fetch_pyodide.fetch(tmp_path / "pyodide")


def test_the_site_is_not_built_without_pyodide(tmp_path, monkeypatch):
    pytest.importorskip("mkdocs")
    hook = module_at(ROOT / "docs/extensions/browser_doctor.py")
    monkeypatch.setattr(hook, "PYODIDE", tmp_path)
    with pytest.raises(Exception, match=r"lacks pyodide\.mjs, .*make docs.*fetch_pyodide\.py"):
        hook.on_files([], {})


def test_the_archive_diagnoses_in_a_python_without_packages(tmp_path):
    pytest.importorskip("mkdocs")
    hook = module_at(ROOT / "docs/extensions/browser_doctor.py")
    archive = hook.rlvet_archive()
    assert archive == hook.rlvet_archive()
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        opened.extractall(tmp_path)
    (tmp_path / "example.jsonl").write_text(hook.example_log())
    code = f"""
import sys
sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / "docs/doctor")!r}]
import verdict, yaml
print(verdict.verdict({str(tmp_path / "example.jsonl")!r}, {{}}, ""))"""
    # -S leaves out the packages that are installed, and -B writes nothing beside verdict.py.
    run = subprocess.run([sys.executable, "-I", "-S", "-B", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["text"] == str(diagnose(tmp_path / "example.jsonl"))
