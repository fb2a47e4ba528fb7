"""Runs that lie elsewhere: clients that have the signatures of the real ones, since there is no network."""

import inspect
import json
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from rlvet.cli.app import app
from rlvet.errors import InvalidValue, MissingPackage
from rlvet.runs.addresses import download_run

ROWS = [
    {"_step": step, "train/reward": 0.1 + 0.002 * step, "train/kl": 0.001 * step, "table": {"a": 1}}
    for step in range(60)
]


def wandb_with(rows=ROWS, error=None):
    class Api:
        def run(self, path=""):
            if error is not None:
                raise error
            assert path == "team/project/abc"
            return SimpleNamespace(scan_history=lambda **_: iter(rows))

    return SimpleNamespace(Api=Api)


def test_the_history_of_a_wandb_run_is_diagnosed(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", wandb_with())
    result = CliRunner().invoke(app, ["diagnose", "wandb://team/project/abc"])
    assert result.exit_code in (0, 1), result.output
    assert "in 60 log steps, from step 0 to 59" in result.output


def test_a_repository_of_the_hub_is_diagnosed(monkeypatch):
    asked = {}

    def snapshot_download(
        repo_id, *, repo_type=None, revision=None, local_dir=None, allow_patterns=None, ignore_patterns=None
    ):
        asked.update(repo_id=repo_id, repo_type=repo_type, revision=revision)
        rows = [json.dumps({"step": row["_step"], "reward": row["train/reward"]}) for row in ROWS]
        (local_dir / "metrics.jsonl").write_text("\n".join(rows) + "\n")
        return str(local_dir)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    result = CliRunner().invoke(app, ["diagnose", "hub://datasets/owner/name@v2"])
    assert result.exit_code in (0, 1), result.output
    assert "in 60 log steps" in result.output
    assert asked == {"repo_id": "owner/name", "repo_type": "dataset", "revision": "v2"}


@pytest.mark.slow  # imports wandb and the client of the hub
def test_the_real_clients_take_what_is_given():
    hub = pytest.importorskip("huggingface_hub")
    taken = inspect.signature(hub.snapshot_download).parameters
    assert {"repo_id", "repo_type", "revision", "local_dir", "allow_patterns", "ignore_patterns"} <= {*taken}
    public = pytest.importorskip("wandb.apis.public")
    assert "path" in inspect.signature(public.Api.run).parameters
    assert hasattr(public.Run, "scan_history")


def test_what_a_client_cannot_do_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", wandb_with(error=OSError("no network\n\x1b[31mat all")))
    with pytest.raises(InvalidValue, match=r"^wandb://team/project/abc cannot be read: no network$"):
        download_run("wandb://team/project/abc", tmp_path)


@pytest.mark.parametrize("address", ["wandb://team/project", "wandb://a//b", "hub://name", "hub://a/b/c"])
def test_an_address_of_another_form_is_refused(address, tmp_path):
    with pytest.raises(InvalidValue, match=r"write (wandb|hub)://"):
        download_run(address, tmp_path)


def test_a_missing_client_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingPackage, match="pip install wandb"):
        download_run("wandb://team/project/abc", tmp_path)
