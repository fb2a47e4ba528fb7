"""What `bandpo-lab setup` downloads, from a hub on this machine that answers the hub's own libraries."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from bandpo_lab.cli.recipes import SHIPPED
from bandpo_lab.data.sets import HUB
from bandpo_lab.errors import FileProblem
from bandpo_lab.files import hub_digests
from bandpo_lab.files.hub_digests import Comparison, git_digest
from bandpo_lab.models.downloads import HubModel, changed_files, check_whole, downloaded_folder, hub_model
from helpers.hub import Hub, Repository, serving

pytest.importorskip("datasets", reason="needs the extra bandpo[trl]")

MODEL = hub_model("qwen2.5-3b-instruct", SHIPPED)
WEIGHTS = b"w" * 30_000_000
CARD = "---\nlicense: mit\nconfigs:\n- config_name: {}\n  data_files:\n  - split: {}\n    path: rows.parquet\n---\n"


def problems(name: str, first: int, count: int = 3) -> Repository:
    """A set of sums, of which no two are alike."""
    hub = HUB[name]
    numbers = range(first, first + count)
    words = ("apples", "pears", "plums", "nuts", "figs", "dates", "limes", "kiwis", "melons", "grapes")
    rows = {
        "problem": [f"{words[i % 10]} in {i} boxes of {i * i} {words[i * 7 % 10]} each?" for i in numbers],
        "answer": [str(i**3) for i in numbers],
    }
    if hub.levels:
        rows["level"] = [hub.levels[0]] * count
    file = io.BytesIO()
    pq.write_table(pa.table(rows), file)
    card = CARD.format(hub.config or "default", hub.split)
    return Repository(hub.revision, {"README.md": card.encode(), "rows.parquet": file.getvalue()}, "mit")


@pytest.fixture
def hub():
    names = ("dapo-math-17k", "math-3-5", "amc23", "aime24", "aime25")
    sets = {("datasets", HUB[name].repo): problems(name, 10 * k + 1) for k, name in enumerate(names)}
    files = {"config.json": b"{}", "model.safetensors": WEIGHTS, "original/consolidated.pth": b"left out"}
    with serving(Hub({("models", MODEL.repo): Repository(MODEL.revision, files), **sets})) as served:
        yield served


@pytest.fixture
def run(hub, tmp_path):
    def run(*words: str, **environment: str) -> subprocess.CompletedProcess:
        variables = os.environ | {
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(tmp_path / "cache"),
            **environment,
        }
        command = [sys.executable, "-m", "bandpo_lab", *words]
        return subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True)

    return run


SETUP = ("setup", "--model", "qwen2.5-3b-instruct")


@pytest.mark.slow
def test_one_command_makes_a_recipe_ready_and_goes_on_where_it_stopped(hub, run, tmp_path):
    shown = run(*SETUP, "--dry-run")
    assert f"model Qwen/Qwen2.5-3B-Instruct: to download\n      revision {MODEL.revision}" in shown.stdout
    assert f"data  aime24: to download\n      revision {HUB['aime24'].revision} (bandpo's)" in shown.stdout
    assert not (tmp_path / "data").exists()

    # The connection breaks in the middle of the weights, whose rest alone is asked for again.
    hub.broken_after = 12_000_000
    made = run(*SETUP)
    assert made.returncode == 0, made.stderr
    assert any(re.search(r"model\.safetensors bytes=\d{7,}-", request) for request in hub.requests)
    folder = tmp_path / "data/models/Qwen/Qwen2.5-3B-Instruct" / MODEL.revision
    assert sorted(file.name for file in folder.iterdir() if file.is_file()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
    ]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    manifest = json.loads((tmp_path / "data/manifest.json").read_text())
    assert {name: entry["origin"]["revision"] for name, entry in manifest.items()} == {
        name: HUB[name].revision for name in ("dapo-math-17k", "math-3-5", "amc23", "aime24", "aime25")
    }
    assert f"export BANDPO_DATA={tmp_path}/data BANDPO_OUTPUT={tmp_path}/runs" in made.stdout

    # What is here is not downloaded again, and is what a run is given.
    hub.requests.clear()
    again = run(*SETUP)
    assert again.returncode == 0, again.stderr
    assert "here" in again.stdout
    assert hub.requests == []
    command = run("run", "verl", "--model", "qwen2.5-3b-instruct", "--method", "band-kl", "--dry-run").stdout
    assert f"actor_rollout_ref.model.path={folder}" in command

    # A file that changed is named, with what to do.
    with (folder / "config.json").open("a") as file:
        file.write(" ")
    changed = run(*SETUP)
    assert (changed.returncode, "config.json is missing or has changed" in changed.stderr) == (2, True)


@pytest.mark.slow
def test_a_revision_that_the_hub_does_not_have_is_an_error_with_its_name(hub, run):
    hub.repositories["models", MODEL.repo].sha = "f" * 40
    found = run(*SETUP)
    assert found.returncode == 2
    assert f"Qwen/Qwen2.5-3B-Instruct, revision {MODEL.revision}, was not downloaded" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.slow
def test_a_model_with_another_bit_is_not_accepted_and_is_downloaded_again(hub, run, tmp_path):
    hub.flipped = "model.safetensors"
    found = run(*SETUP)
    assert found.returncode == 2
    assert "error: model.safetensors of Qwen/Qwen2.5-3B-Instruct, revision" in found.stderr
    assert "did not arrive as the hub has it" in found.stderr
    folder = tmp_path / "data/models/Qwen/Qwen2.5-3B-Instruct" / MODEL.revision
    assert not (folder / "model.safetensors").exists()
    assert not (folder / "manifest.json").exists()
    hub.flipped = "rows.parquet"  # each data set's
    found = run(*SETUP)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert "Qwen/Qwen2.5-3B-Instruct: 2 files have the digests that the hub states\n" in found.stderr
    assert found.returncode == 2
    assert re.search(
        r"error: rows\.parquet of \S+, revision \w+, did not arrive as the hub has it", found.stderr
    )
    hub.flipped = None
    made = run(*SETUP)
    assert made.returncode == 0, made.stderr
    assert "aime24: 2 files have the digests that the hub states\n" in made.stderr


@pytest.mark.slow
def test_a_hub_that_states_no_digests_is_named(hub, run):
    hub.repositories["models", MODEL.repo].states_digests = False
    made = run(*SETUP)
    assert made.returncode == 0, made.stderr
    assert "states none for config.json, model.safetensors, which are taken as they arrived" in made.stderr


def test_a_small_file_is_compared_by_the_digest_of_git(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_digests, "_stated_digests", lambda *_: {"a": (None, git_digest(tmp_path / "a"))})
    (tmp_path / "a").write_bytes(b"hello\n")
    assert git_digest(tmp_path / "a") == "ce013625030ba8dba906f756967f9e9ca394464a"  # git hash-object
    (tmp_path / "b").write_bytes(b"")
    assert hub_digests.compare_with_hub(tmp_path, ["a", "b"], "x/y", "0") == Comparison(1, ("b",))
    stated = git_digest(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"hallo\n")
    monkeypatch.setattr(hub_digests, "_stated_digests", lambda *_: {"a": (None, stated)})
    with pytest.raises(FileProblem, match="a of x/y, revision 0, did not arrive as the hub has it"):
        hub_digests.compare_with_hub(tmp_path, ["a"], "x/y", "0")
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_without_the_hub_it_says_so(run):
    found = run(*SETUP, HF_HUB_OFFLINE="1")
    assert found.returncode == 2
    assert "was not downloaded" in found.stderr
    assert "the same command goes on" in found.stderr


def whole(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    from bandpo_lab.files.writing import seal

    seal(folder, [folder / "config.json"])
    return folder


def test_the_revision_of_a_recipe_is_taken_and_no_other(tmp_path):
    other = HubModel("Qwen/Qwen3-4B")
    whole(MODEL.folder(tmp_path) / ("a" * 40))
    assert downloaded_folder(MODEL, tmp_path) is None
    here = whole(MODEL.folder(tmp_path) / MODEL.revision)
    assert downloaded_folder(MODEL, tmp_path) == here
    # A download that was stopped has no digests yet.
    (other.folder(tmp_path) / ("b" * 40)).mkdir(parents=True)
    assert downloaded_folder(other, tmp_path) is None
    first = whole(other.folder(tmp_path) / ("c" * 40))
    assert downloaded_folder(other, tmp_path) == first
    whole(other.folder(tmp_path) / ("d" * 40))
    with pytest.raises(ValueError, match="in several revisions: name a folder as the model"):
        downloaded_folder(other, tmp_path)
    (first / "config.json").write_text("[]")
    with pytest.raises(FileProblem, match=r"config.json is missing or has changed"):
        check_whole(first)


def test_a_data_file_that_changed_is_named(tmp_path):
    from bandpo_lab.data.prepare import prepare_data

    row = {"problem": "What is 20 + 3?", "answer": "23"}
    (tmp_path / "mine.jsonl").write_text(json.dumps(row))
    prepare_data([str(tmp_path / "mine.jsonl")], tmp_path / "data", golds="keep", role="eval")
    file = tmp_path / "data/verl/mine.parquet"
    assert changed_files([str(file), str(tmp_path / "data/verl/other.parquet")]) == []
    pq.write_table(pq.read_table(file).slice(0, 0), file)
    (words,) = changed_files([str(file)])
    assert words.startswith(f"{file} has changed since it was prepared")


def test_every_model_and_set_names_a_commit():
    models = [yaml.safe_load(file.read_text()) for file in sorted((SHIPPED / "paper/model").glob("*.yaml"))]
    revisions = [model["recipe"]["revision"] for model in models] + [hub.revision for hub in HUB.values()]
    assert all(re.fullmatch("[0-9a-f]{40}", revision) for revision in revisions)
    of_repository = {hub.repo: hub.revision for hub in HUB.values()}
    assert all(of_repository[hub.repo] == hub.revision for hub in HUB.values())
    assert len(set(revisions)) == len(models) + len(of_repository)
