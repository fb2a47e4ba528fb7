"""The page that diagnoses a log in the browser says what `bandpo diagnose` says, and sends nothing anywhere."""

import http.server
import importlib.util
import json
import shutil
import threading
from functools import partial
from pathlib import Path

import pytest

from bandpo.doctor import diagnose
from browser import Chromium, needs_browser
from pages import ROOT

PYODIDE = ROOT / "build/pyodide"
needs_site = pytest.mark.skipif(
    not (PYODIDE / "pyodide.asm.wasm").is_file() or importlib.util.find_spec("mkdocs") is None,
    reason="build/pyodide or mkdocs is not here: make docs",
)


def in_browser(test):
    """Mark a test that opens the page in Chromium."""
    return needs_browser(needs_site(pytest.mark.slow(test)))


NAVIGATION = [{"Start": "index.md"}, {"Diagnose a log in the browser": "diagnose-in-browser.md"}]
FINISHED = "document.querySelector('#doctor .result').textContent"
TEXT = "document.querySelector('#doctor .printed pre').textContent"
HOSTILE = "<img src=x onerror=window.hacked=1>"


def simulated(steps=60, **more):
    """Return a log whose reward rises, as JSON lines."""
    rows = (
        {"step": n, "reward": n / steps, "entropy": 1 - n / 200, "kl": n / 1000} | more
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
    """The page in a site of its own, with the theme and the hooks of the whole one."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    docs = folder / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("# Start\n")
    page = (ROOT / "docs/diagnose-in-browser.md").read_text()
    (docs / "diagnose-in-browser.md").write_text(page.replace("](diagnose.md)", "](index.md)"))
    shutil.copytree(ROOT / "docs/doctor", docs / "doctor")
    shutil.copy(ROOT / "docs/extra.css", docs)
    own = {"docs_dir": str(docs), "site_dir": str(folder / "site"), "nav": NAVIGATION, "plugins": ["search"]}
    build(load_config(str(ROOT / "mkdocs.yml"), **own))
    server = served(folder / "site")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture
def tab(site, browser):
    browser.events.clear()
    tab = browser.open(f"{site.address}/diagnose-in-browser/")
    yield tab
    tab.call("Page.close")


def press(tab, text):
    tab.evaluate(
        f"[...document.querySelectorAll('#doctor button')].find((b) => b.textContent === {json.dumps(text)}).click()"
    )


def paste(tab, text):
    tab.evaluate(f"document.querySelector('#doctor .paste textarea').value = {json.dumps(text)}; 0")
    press(tab, "Diagnose the text")


@in_browser
def test_the_example_is_diagnosed_as_by_the_command(site, tab, tmp_path):
    press(tab, "Try an example")
    text = tab.wait_for(f"{FINISHED} && {TEXT}")
    with open(tmp_path / "example.jsonl", "wb") as file:
        file.write(
            (Path(site.RequestHandlerClass.keywords["directory"]) / "doctor/example.jsonl").read_bytes()
        )
    assert text == str(diagnose(tmp_path / "example.jsonl"))
