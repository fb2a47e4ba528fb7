"""What a submitted job takes along: launch.sh and Ray's own client, against a server that keeps the package."""

import io
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs the extra bandpo[verl]")

from typer.testing import CliRunner

from bandpo_lab.cli.app import app
from bandpo_lab.cli.recipes import SHIPPED
from pages import ROOT

LARGE = (
    ".git",
    ".venv",
    ".venv-verl",
    "build",
    "data",
    "models",
    "runs",
    "outputs",
    "checkpoints",
    "wandb",
)
"""Folders that stay behind."""
RECIPES = sorted(path.relative_to(SHIPPED).as_posix() for path in SHIPPED.rglob("*") if path.is_file())


class Head(BaseHTTPRequestHandler):
    """The head of a cluster: takes a package, and refuses the job."""

    package = b""

    def log_message(self, *_: object) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        import ray

        found = self.path == "/api/version"
        self.answer(200 if found else 404, json.dumps({"ray_version": ray.__version__}).encode())

    def do_PUT(self) -> None:
        type(self).package = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(500, b"the tests start no job")

    def answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def head():
    """The class that has the package, and the address of its server."""
    handler = type("OneHead", (Head,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield handler, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
def test_a_job_from_a_clone_takes_the_recipes_and_a_reward_and_leaves_what_is_large(
    head, tmp_path, monkeypatch
):
    if shutil.which("ray", path=Path(sys.executable).parent) is None:
        pytest.skip("the command `ray` is not installed")
    handler, address = head
    monkeypatch.chdir(tmp_path)
    # Ray leaves out what the .gitignore of the folder names.
    shutil.copy(ROOT / ".gitignore", tmp_path)
    for name in LARGE:
        (tmp_path / name).mkdir()
        (tmp_path / name / "large.bin").write_bytes(b"x")
    (tmp_path / "my_reward.py").write_text("def compute_score(*_, **__):\n    return 0.0\n")
    assert CliRunner().invoke(app, ["recipes"]).exit_code == 0
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_ADDRESS": address,
    }
    command = ["recipes/launch.sh", "submit", "qwen2.5-3b-instruct", "band-kl"]
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert "the tests start no job" in job.stdout + job.stderr
    with zipfile.ZipFile(io.BytesIO(handler.package)) as package:
        taken = {name for name in package.namelist() if not name.endswith("/")}
    assert taken == {".gitignore", "my_reward.py", *(f"recipes/{name}" for name in RECIPES)}


def test_a_run_whose_recipes_are_not_here_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["run", "verl", "--model", "qwen2.5-3b-instruct", "--method", "band-kl", "--dry-run"]
    job = CliRunner().invoke(app, [*words, "--config-dir", "recipes"])
    assert "--config-dir recipes: there is no such folder" in str(job.exception)
    assert ".gitignore" in str(job.exception)
