"""Runs pages in Chromium, and scripts in node or in it; what needs them is skipped where they are not installed."""

import json
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from pages import ROOT

PAGE = ROOT / "src/bandpo/report/assets"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NODE = shutil.which("node")
needs_browser = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: apt install chromium")
needs_javascript = pytest.mark.skipif(not (CHROMIUM or NODE), reason="neither node nor Chromium here")


class Document(HTMLParser):
    """The text and the elements of a page as its scripts left it; what stands in scripts and styles is no text."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.text, self._inside = [], "", ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside not in ("script", "style"):
            self.text += data

    def having(self, attribute):
        return [attributes[attribute] for _, attributes in self.elements if attribute in attributes]


def opened(file, folder, then=""):
    """The page once its scripts have run, and one of ours after them; a profile of its own in ``folder``."""
    shown = folder / f"then-{file.name}"
    shown.write_text(file.read_text() + f"<script>{then}</script>")
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command = [CHROMIUM, *quiet, "--virtual-time-budget=3000", "--dump-dom", shown.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return Document(run.stdout)


def calculated(expression, folder):
    """What an expression over bounds.js is, by way of JSON, in which infinities are text."""
    plain = "(_, x) => typeof x === 'number' && !Number.isFinite(x) ? String(x) : x"
    code = (PAGE / "bounds.js").read_text() + f"\nconst said = JSON.stringify({expression}, {plain});"
    if NODE:
        (folder / "code.js").write_text(code + "console.log(said);")
        run = subprocess.run([NODE, folder / "code.js"], capture_output=True, text=True, check=True)
        return json.loads(run.stdout)
    page = folder / "code.html"
    page.write_text(f"<pre></pre><script>{code}document.querySelector('pre').textContent = said;</script>")
    return json.loads(opened(page, folder).text)
