import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("httpx")

import httpx

from bandpo_lab.evals.generate import GenerationError, Sampling
from bandpo_lab.evals.server import ServerSampler

MESSAGES = [{"role": "user", "content": "hi"}]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((self.path, body, dict(self.headers)))
            status, answer = self.server.behave(self.path, body, len(self.server.requests))
        content = answer.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


def answer(path, body, count):
    text = f"seed {body['seed']}"
    choice = {"message": {"content": text}} if path.endswith("chat/completions") else {"text": text}
    choice["finish_reason"] = "stop"
    return 200, json.dumps({"choices": [choice], "usage": {"completion_tokens": 3}})


@pytest.fixture
def server(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.requests, server.behave, server.lock = [], answer, threading.Lock()
    thread = threading.Thread(target=server.serve_forever, args=[0.02])
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def generator(server, **options):
    return ServerSampler(f"http://127.0.0.1:{server.server_port}/v1/", "m", Sampling(7, 0.5, 0.9), **options)


def test_every_missing_position_is_asked_once_with_its_seed_and_the_key(server, monkeypatch):
    asked = generator(server, concurrency=4)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    got = dict(asked.stream([MESSAGES] * 20 + ["text"] * 5, [0, 7, 19, 22]))
    assert {headers["Authorization"] for *_, headers in server.requests} == {"Bearer secret"}
    assert {i: c.text for i, c in got.items()} == {i: f"seed {Sampling().seed_of(i)}" for i in (0, 7, 19, 22)}
    assert sorted(path for path, *_ in server.requests) == ["/v1/chat/completions"] * 3 + ["/v1/completions"]
    by_path = {path: body for path, body, _ in server.requests}
    chat, text = by_path["/v1/chat/completions"], by_path["/v1/completions"]
    assert chat["messages"] == MESSAGES
    assert text["prompt"] == "text"
    for body in (chat, text):
        assert (body["model"], body["max_tokens"], body["temperature"], body["top_p"]) == ("m", 7, 0.5, 0.9)
    completion = got[22]
    assert (completion.finish, completion.tokens) == ("stop", 3)


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_recovers_is_asked_again(server, status):
    server.behave = lambda path, body, count: (status, "busy") if count == 1 else answer(path, body, count)
    assert len(dict(generator(server, attempts=2).stream(["a"] * 3, range(3)))) == 3
    assert len(server.requests) == 4


def test_a_server_that_dies_leaves_what_it_answered_and_one_clear_error(server):
    server.behave = lambda path, body, count: answer(path, body, count) if count <= 5 else (503, "dying")
    got = []
    with pytest.raises(GenerationError, match="did not answer in 2 attempts; the last: status 503: dying"):
        got.extend(generator(server, concurrency=2, attempts=2).stream(["a"] * 50, range(50)))
    assert len(got) == 5
    assert len(server.requests) < 15


def test_a_server_that_is_not_there(server):
    url = f"http://127.0.0.1:{server.server_port + 1 if server.server_port < 65535 else 1}/v1"
    with pytest.raises(GenerationError, match="did not answer in 1 attempts; the last: ConnectError"):
        list(ServerSampler(url, "m", Sampling(5), attempts=1).stream(["a"], [0]))


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (404, "no such model", "refused the request, 404: no such model"),
        *((200, x, "not OpenAI's") for x in ("<", "{}", '{"choices": []}', '{"choices": [{"text": 1}]}')),
    ],
)
def test_a_refusal_or_an_answer_in_another_form_is_not_tried_again(server, status, content, message):
    server.behave = lambda *_: (status, content)
    with pytest.raises(GenerationError, match=message):
        list(generator(server).stream(["a"], [0]))
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "content", "expected"),
    [
        (400, "too long", ("", "refused, 400: too long", None)),
        (200, '{"choices": [{"text": "a", "finish_reason": null}]}', ("a", "unknown", None)),
    ],
)
def test_one_refusal_or_a_missing_figure_ends_no_run(server, status, content, expected):
    server.behave = lambda path, body, count: (status, content) if count == 1 else answer(path, body, count)
    first, second = dict(generator(server, concurrency=1).stream(["a"] * 2, range(2))).values()
    assert (first.text, first.finish, first.tokens) == expected
    assert second.finish == "stop"


def test_a_consumer_that_stops_is_not_kept_waiting(server):
    stream = generator(server, concurrency=1).stream(["a"] * 1000, range(1000))
    next(stream)
    stream.close()
    assert len(server.requests) < 1000


@pytest.mark.slow
def test_transformers_serve_answers_as_the_model_does_in_process(tmp_path):
    pytest.importorskip("openai", reason="transformers serve needs pip install 'transformers[serving]'")
    import byte_model
    from bandpo_lab.evals.generate import TransformersSampler

    folder = byte_model.save(tmp_path / "model")
    with ThreadingHTTPServer(("localhost", 0), Handler) as free:
        address = f"http://localhost:{free.server_port}"
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), "--device", "cpu"]
    command += ["--port", str(free.server_port)]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _wait_for(f"{address}/health", process, tmp_path / "log")
            asked, greedy = [MESSAGES, MESSAGES, "1+1?"], Sampling(max_new_tokens=12, temperature=0.0)
            served = ServerSampler(f"{address}/v1", str(folder), greedy, concurrency=2, attempts=2)
            local = TransformersSampler(byte_model.model(), byte_model.tokenizer(), greedy)
            assert dict(served.stream(asked, [0, 1])) == dict(local.stream(asked, [0, 1]))
        finally:
            process.terminate()


def _wait_for(url, process, log, seconds=180):
    for _ in range(seconds):
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    raise AssertionError(log.read_text())
