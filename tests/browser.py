"""Runs pages in Chromium, and scripts in node or in it; what needs them is skipped where they are not installed."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from html.parser import HTMLParser

import pytest

from pages import ROOT

PAGE = ROOT / "packages/rlvet/src/rlvet/report/assets"
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
    """Load a page, run its scripts and ``then``, and return the document; the browser's profile is in ``folder``."""
    shown = folder / f"then-{file.name}"
    shown.write_text(file.read_text() + f"<script>{then}</script>")
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command = [CHROMIUM, *quiet, "--virtual-time-budget=3000", "--dump-dom", shown.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return Document(run.stdout)


def calculated(expression, folder):
    """Evaluate an expression with bounds.js and return it by JSON, with infinities as text."""
    plain = "(_, x) => typeof x === 'number' && !Number.isFinite(x) ? String(x) : x"
    code = (PAGE / "bounds.js").read_text() + f"\nconst said = JSON.stringify({expression}, {plain});"
    if NODE:
        (folder / "code.js").write_text(code + "console.log(said);")
        run = subprocess.run([NODE, folder / "code.js"], capture_output=True, text=True, check=True)
        return json.loads(run.stdout)
    page = folder / "code.html"
    page.write_text(f"<pre></pre><script>{code}document.querySelector('pre').textContent = said;</script>")
    return json.loads(opened(page, folder).text)


class Chromium:
    """Chromium without a window, driven by its DevTools protocol through two pipes.

    Args:
        folder: For a profile of its own.
    """

    def __init__(self, folder):
        commands_out, self._commands = os.pipe()
        self._answers, answers_in = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        command = [CHROMIUM, *flags, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        # Chromium reads commands from its third file and writes answers to its fourth.
        shell = ["bash", "-c", f'exec "$@" 3<&{commands_out} 4>&{answers_in} 2>/dev/null', "bash", *command]
        self._process = subprocess.Popen(shell, pass_fds=(commands_out, answers_in))
        os.close(commands_out)
        os.close(answers_in)
        self._unread = b""
        self._number = 0
        self.events = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method, session=None, **parameters):
        """Send a command, and return its result; what happened meanwhile is added to ``events``."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        if session:
            command["sessionId"] = session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            message = self._next_message()
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                return message["result"]
            self.events.append(message)

    def _next_message(self):
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], 60)
            assert ready, "Chromium has not answered for a minute"
            part = os.read(self._answers, 2**20)
            assert part, "Chromium has ended"
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def open(self, address, width=1280, height=900, dark=False):
        """Open an address in a tab of its own, whose workers can be reached too."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            tab.call(f"{domain}.enable")
        tab.call("Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=False, flatten=True)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        tab.call("Emulation.setDeviceMetricsOverride", **size)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", features=[theme])
        tab.call("Page.navigate", url=address)
        tab.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")
        return tab


class Tab:
    """A page in Chromium."""

    def __init__(self, browser, session):
        self.browser = browser
        self.session = session

    def call(self, method, **parameters):
        return self.browser.call(method, self.session, **parameters)

    def evaluate(self, expression, session=None):
        """Return what an expression is, which may be a promise, by way of JSON."""
        parameters = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        answer = self.browser.call(
            "Runtime.evaluate", session or self.session, userGesture=True, **parameters
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition, seconds=120):
        """Wait until an expression is true, and return it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = self.evaluate(condition)
            if value:
                return value
            time.sleep(0.05)
        raise AssertionError(
            f"not true within {seconds} s: {condition}\n{self.evaluate('document.body.innerText')}"
        )

    def drop(self, selector, *paths):
        """Drop files and folders of this machine on an element, as a mouse does."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{element}.scrollIntoView({{block: 'center'}})")
        place = self.evaluate(
            f"(({{x, y, width}}) => [x + width / 2, y + 10])({element}.getBoundingClientRect())"
        )
        data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=place[0], y=place[1], data=data)

    def choose(self, selector, *paths):
        """Choose files of this machine in an input for files."""
        node = self.call("Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})")
        files = [str(path) for path in paths]
        self.call("DOM.setFileInputFiles", files=files, objectId=node["result"]["objectId"])

    def worker(self, seconds=30):
        """Return the session of the newest worker that the page made from a text, and wait for one.

        The site's search runs in a worker too, which was made from an address.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            # A worker that started while the page changed its process is not always announced. Attaching anew announces
            # all workers that run.
            for attach in (False, True):
                self.call(
                    "Target.setAutoAttach", autoAttach=attach, waitForDebuggerOnStart=False, flatten=True
                )
            # Events are taken in while an answer is waited for.
            self.evaluate("1")
            sessions = self._running_workers()
            if sessions:
                return sessions[-1]
            time.sleep(0.5)
        raise AssertionError(f"no worker within {seconds} s")

    def _running_workers(self):
        """Return the sessions of the page's workers that have not ended, in the order of their start."""
        ended = {
            event["params"]["sessionId"]
            for event in self.browser.events
            if event["method"] == "Target.detachedFromTarget"
        }
        return [
            event["params"]["sessionId"]
            for event in self.browser.events
            if event["method"] == "Target.attachedToTarget"
            and event.get("sessionId") == self.session
            and event["params"]["targetInfo"]["type"] == "worker"
            and event["params"]["targetInfo"]["url"].startswith("blob:")
            and event["params"]["sessionId"] not in ended
        ]

    def complaints(self):
        """Return errors that the page logged or did not catch."""
        texts = []
        for event in self.browser.events:
            parameters = event.get("params", {})
            if event["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
                texts.append(parameters["entry"]["text"])
            if event["method"] == "Runtime.exceptionThrown":
                texts.append(str(parameters["exceptionDetails"]))
        return texts

    def picture(self, file):
        """Write a picture of the whole page."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(picture["data"]))
