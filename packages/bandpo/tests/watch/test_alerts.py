"""Alerts, against a server on this machine and stand-ins with the trackers' signatures."""

import http.server
import json
import sys
import threading
import time
import types

import pytest

from bandpo.core.errors import BandWarning
from bandpo.watch import alerts
from bandpo.watch.alerts import Alerts
from bandpo.watch.run_watch import RunWatch


class Receiver(http.server.BaseHTTPRequestHandler):
    """Answers as the server's ``behaviour`` says, and keeps what it got."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, dict(self.headers), json.loads(body)))
        behaviour = self.server.behaviour
        if behaviour == "hang":
            self.server.may_end.wait(60)
            return
        if behaviour == "trickle":
            self.wfile.write(b"HTTP/1.0 200 OK\r\nX: ")
            while not self.server.may_end.wait(0.05):
                self.wfile.write(b"x")
            return
        self.send_response(behaviour)
        if behaviour == 302:
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/elsewhere")
        self.end_headers()

    def do_GET(self):
        self.server.received.append((self.path, {}, None))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    server.daemon_threads = True
    server.behaviour = 200
    server.received = []
    server.may_end = threading.Event()
    server.address = f"http://127.0.0.1:{server.server_port}/services/SECRET"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.may_end.set()
    server.shutdown()
    thread.join()
    server.server_close()


def collapse(watch, count=40):
    """Log steps whose entropy is lost, without a higher reward."""
    for k in range(count):
        watch({"entropy": 1.2 * 0.9**k, "reward": 0.1 + 0.01 * (k % 2), "rewards/<!channel>/mean": 0.5})


def test_a_web_address_gets_the_findings_and_nothing_else(server):
    with pytest.warns(BandWarning) as announced:
        collapse(RunWatch(alerts=[server.address]))
    ((path, headers, body),) = server.received
    assert (path, headers["Content-Type"], list(body)) == ("/services/SECRET", "application/json", ["text"])
    title, *lines = body["text"].splitlines()
    assert title == "bandpo: entropy-collapse"
    assert [line.replace("&lt;", "<").replace("&gt;", ">") for line in lines] == [
        str(warning.message) for warning in announced
    ]


def test_slack_takes_no_name_of_a_log_for_a_call_to_everyone(server):
    assert Alerts([server.address]).send("a & b", "<!channel>", is_grave=False) == {}
    assert server.received[0][2] == {"text": "a &amp; b\n&lt;!channel&gt;"}


@pytest.mark.parametrize(
    ("behaviour", "problem"),
    [
        (500, "the server answered 500 Internal Server Error"),
        (302, "the server answered 302 Found"),
        ("hang", "no answer within 0.3 seconds|timed out"),
        ("trickle", "no answer within 0.3 seconds"),
    ],
)
def test_a_failure_is_named_once_and_ends_nothing(server, behaviour, problem, monkeypatch, caplog):
    if isinstance(behaviour, str):  # an answer may take longer than this on a busy machine
        monkeypatch.setattr(alerts, "TIMEOUT", 0.3)
    server.behaviour = behaviour
    watch = RunWatch(alerts=[server.address])
    begin = time.monotonic()
    with pytest.warns(BandWarning):
        collapse(watch)
    watch._send("another", "text", is_grave=True)
    assert time.monotonic() - begin < 50  # less than the server hangs, on a busy machine
    while len(server.received) < 2 and time.monotonic() - begin < 50:
        time.sleep(0.01)
    failures = [message for message in caplog.messages if "an alert by" in message]
    assert len(failures) == 1
    assert "an alert by http://127.0.0.1 failed" in failures[0]
    assert any(part in failures[0] for part in problem.split("|"))
    assert "SECRET" not in caplog.text
    assert [path for path, *_ in server.received] == ["/services/SECRET"] * 2  # no redirect is followed


def test_a_server_that_is_not_there(server):
    address = server.address
    closed = http.server.HTTPServer(("127.0.0.1", 0), Receiver)
    port = closed.server_port
    closed.server_close()
    failures = Alerts([address, f"http://localhost:{port}/x"]).send("title", "text", is_grave=False)
    assert list(failures) == ["http://localhost"]
    assert "refused" in failures["http://localhost"]
    assert len(server.received) == 1


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["slack"],
            "alerts cannot be sent by 'slack'; pass 'wandb', 'trackio' or an address such as",
        ),
        (["wandbb"], "alerts cannot be sent by 'wandbb'; did you mean wandb"),
        (
            ["http://hooks.slack.com/services/SECRET"],
            "http://hooks.slack.com for alerts must begin with https",
        ),
        (["http://localhost.evil.org/SECRET"], "http://localhost.evil.org for alerts must begin with https"),
        (["ftp://127.0.0.1/SECRET"], "ftp://127.0.0.1 for alerts must begin with https"),
        (["https:///SECRET"], "for alerts must begin with https"),
        ("wandb", r"alerts must be a list, got the text 'wandb'; write \['wandb'\]"),
    ],
)
def test_what_is_no_way_is_refused(names, message):
    with pytest.raises(ValueError, match=message) as refused:
        RunWatch(alerts=names)
    assert "SECRET" not in str(refused.value)


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="needs trackio: pip install trackio"):
        Alerts(["trackio"])


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_title_text_and_level(name, monkeypatch):
    """With the names that wandb 0.31 and trackio 0.43 have."""
    tracker = types.ModuleType(name)
    tracker.__spec__ = types.SimpleNamespace(name=name)
    tracker.run = None
    tracker.AlertLevel = types.SimpleNamespace(ERROR="an error", WARN="a warning")
    received = []
    tracker.alert = lambda title, text, level: received.append((title, text, level))
    monkeypatch.setitem(sys.modules, name, tracker)
    if name == "wandb":
        (problem,) = Alerts([name]).send("title", "text", is_grave=True).values()
        assert "no wandb run is active: set report_to='wandb'" in problem
        tracker.run = object()
    ways = Alerts([name])
    assert ways.send("t" * 80, "text", is_grave=True) == ways.send("title", "more", is_grave=False) == {}
    assert received == [("t" * 63, "text", "an error"), ("title", "more", "a warning")]


def test_an_error_of_a_tracker_ends_nothing(monkeypatch):
    tracker = types.ModuleType("trackio")
    tracker.__spec__ = types.SimpleNamespace(name="trackio")
    tracker.AlertLevel = types.SimpleNamespace(ERROR="error", WARN="warn")

    def alert(**_):
        raise RuntimeError("Call trackio.init() before trackio.alert().")

    tracker.alert = alert
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    failures = Alerts(["trackio"]).send("title", "text", is_grave=True)
    assert failures == {"trackio": "RuntimeError: Call trackio.init() before trackio.alert()."}
