"""A stranger's model, data, evaluation, study or run is data to the lab's commands: nothing in it is run."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
from helpers.frameworks import needs

needs("trl")
pytest.importorskip("math_verify")

from bandpo_lab.evals.run import SAMPLES, SETTINGS, _digest
from bandpo_lab.files.validation import with_seal
from bandpo_lab.files.writing import seal
from bandpo_lab.tasks.multiplication import base_model_path
from helpers.forks import ForkServer
from helpers.hostile import check_nothing_ran, own_environment, planted, read_result

pytestmark = pytest.mark.slow

GRADER = ("math_worker.py",)
"""The process of `bandpo-lab eval` that grades."""

FONTS = ("fc-list",)
"""The program that matplotlib asks for fonts."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


class Bomb:
    """What leaves a file behind when it is read_pickle."""

    def __reduce__(self):
        return (open, ("ran-pickle", "w"))


MODULES = ("bandpo_lab.training.train", "bandpo_lab.evals.run", "bandpo_lab.cli.app")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A process that imported in a stranger's folder what most of the commands take, and was watched."""
    folder = planted(tmp_path_factory.mktemp("server") / "strange")
    server = ForkServer(folder, MODULES, watched=True, environment=own_environment(folder) | OFFLINE)
    yield server
    server.close()
    assert [file.name for file in folder.rglob("ran*")] == []


@pytest.fixture(scope="module")
def lab(server):
    """Run a command of the lab within a folder; return what it imported, started and wrote, and what it printed."""

    def run(folder: Path, *command: str) -> dict:
        job = server.start(folder, ["bandpo-lab", *map(str, command)], **own_environment(folder))
        job.wait()
        return read_result(job.text)

    return run


@pytest.fixture
def folder(tmp_path):
    return planted(tmp_path / "strange")


def model_of_a_stranger(folder: Path, *, weights: str) -> Path:
    """Copy the embedded model; its configuration names code in its folder, and its weights may be a pickle."""
    model = folder / "model"
    shutil.copytree(base_model_path(), model)
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "evilmod.Config",
        "AutoModelForCausalLM": "evilmod.Model",
        "AutoTokenizer": "evilmod.Tokenizer",
    }
    (model / "config.json").write_text(json.dumps(config))
    shutil.copy(folder / "evilmod.py", model / "evilmod.py")
    if weights == "pickle":
        (model / "model.safetensors").unlink()
        torch.save({"weight": torch.zeros(2)}, model / "pytorch_model.bin")
    return model


@pytest.mark.parametrize("weights", ["safetensors", "pickle"])
def test_eval_of_a_stranger_s_model(weights, folder, lab):
    model_of_a_stranger(folder, weights=weights)
    row = {"prompt": "1+1=", "answer": "evilmod.__doc__()", "data_source": "[red]evilmod.Rule()"}
    (folder / "data.jsonl").write_text(json.dumps(row) + "\n")
    arguments = ("--n", "1", "--max-new-tokens", "2", "--data", "data.jsonl", "--output-dir", "out")
    result = lab(folder, "eval", "model", *arguments)
    check_nothing_ran(folder, result, GRADER)
    if weights == "pickle":
        assert "error: model cannot be loaded as a model" in result["output"]
        assert "safetensors" in result["output"]
    else:
        assert (folder / "out" / "report.json").exists()
        assert any(GRADER[0] in event for event in result["events"])  # what is looked for would be seen


def test_training_of_a_stranger_s_pickled_model(folder, lab):
    model_of_a_stranger(folder, weights="pickle")
    result = lab(
        folder, "train", "--model_name_or_path", "./model", "--dataset_name", "multiplication",
        "--reward_funcs", "bandpo_lab.tasks.multiplication.reward", "--output_dir", "out", "--use_cpu",
        "--num_iterations", "2",
    )  # fmt: skip
    check_nothing_ran(folder, result)
    assert "error: " in result["output"]
    assert "safetensors" in result["output"]


def evaluation_of_a_stranger(folder: Path) -> None:
    """Write an evaluation whose texts are hostile, with seals that fit."""
    folder.mkdir()
    row = {
        "problem": "evilmod.__doc__()", "sample": 0, "data_source": "[red]evilmod[/red]\x1b[31m", "score": 1.0,
        "answer": "evilmod.Rule()", "reason": "right", "finish": "stop", "tokens": 3,
        "completion": "\\boxed{__import__('os').system('touch ran')}", "gold": "evilmod.__doc__()",
    }  # fmt: skip
    rows = [row, row | {"problem": "other", "score": 0.0}]
    (folder / SAMPLES).write_text("".join(json.dumps({**r, "sha256": _digest(r)}) + "\n" for r in rows))
    (folder / SETTINGS).write_text(json.dumps(with_seal({"n": 1, "problems": 2, "model": "evilmod"})))


def test_comparison_of_a_stranger_s_evaluations(folder, lab):
    for name in ("a", "b"):
        evaluation_of_a_stranger(folder / name)
    for command in (["compare-evals", "a", "b"], ["eval", "--regrade", "--output-dir", "a"]):
        result = lab(folder, *command)
        check_nothing_ran(folder, result, GRADER)
        assert "error" not in result["output"]


def test_comparison_of_methods_in_a_stranger_s_folder(folder, lab):
    options = ["--task", "random", "--batches", "2", "--lag", "0", "--workers", "1"]
    result = lab(folder, "compare", "DAPO()", "FixedClip(0.2)", *options)
    check_nothing_ran(folder, result, FONTS)
    assert "error" not in result["output"]


STUDY = """
title: "[red]t[/red] \\e[31m"
question: q
primary: mean@2
stopping: s
baseline: a
arms:
  a: {method: "evilmod.__doc__()"}
  b: {method: "Band(evilmod.Rule(), 0.1)"}
options: {reward_funcs: [evilmod.Rule]}
experiments:
  main: {question: q, seeds: [0]}
"""


def test_page_of_a_stranger_s_study(folder, lab):
    names = ("reward", "entropy", "clip_high", "clip_low", "rare_wins", "rare_blocked")
    curves = {name: [0.1] for name in names}
    scores = {"mean@2": 0.5, "pass@2": 0.5}
    runs = [
        {
            "experiment": "main", "arm": arm, "seed": 0, "tuning": None, "seconds": 1.0, "before": scores,
            "after": scores, "curves": curves, "by_bin": {},
        }
        for arm in "ab"
    ]  # fmt: skip
    results = {
        "study": STUDY, "runs": runs, "failed": [], "chosen": {}, "versions": {"evilmod": "1"}, "machine": "[red]m",
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(with_seal(results)))
    result = lab(folder, "study", "page", ".")
    check_nothing_ran(folder, result, FONTS)
    assert (folder / "report.html").exists(), result["output"]


def test_recipes_in_a_stranger_s_folder(folder, lab):
    (folder / "console.log").write_text(
        "(x pid=1) step:1 - \x1b[31mactor/entropy:__import__('evilmod')\n" * 3
    )
    check_nothing_ran(folder, lab(folder, "recipes", "copy", "mine"))
    check_nothing_ran(folder, lab(folder, "recipes", "summary", "console.log"))


TRAIN = (
    "train",
    "--max_steps",
    "8",
    "--save_steps",
    "8",
    "--eval_prompts",
    "0",
    "--use_cpu",
    "--report_to",
    "none",
)


def bomb_in_the_optimizer(run: Path) -> None:
    checkpoint = run / "checkpoint-8"
    for name in ("optimizer.pt", "rng_state.pth", "scheduler.pt", "training_args.bin"):
        (checkpoint / name).write_bytes(pickle.dumps(Bomb()))
    seal(
        checkpoint,
        [file for file in checkpoint.rglob("*") if file.is_file() and file.name != "manifest.json"],
    )


def state_without_a_step(run: Path) -> None:
    checkpoint = run / "checkpoint-8"
    (checkpoint / "trainer_state.json").write_text("[]")
    seal(
        checkpoint,
        [file for file in checkpoint.rglob("*") if file.is_file() and file.name != "manifest.json"],
    )


def settings_with_a_tag(run: Path) -> None:
    (run / "config.yaml").write_text("!!python/object/apply:os.system ['touch ran-yaml']\n")
    seal(run, [run / "config.yaml"])


def settings_of_another_form(run: Path) -> None:
    (run / "config.yaml").write_text("[1, 2]\n")
    seal(run, [run / "config.yaml"])


def scores_of_another_form(run: Path) -> None:
    (run / "evaluation.json").write_text("[1, 2]\n")
    seal(run, [run / "config.yaml", run / "evaluation.json"])


def names_of_files_elsewhere(run: Path) -> None:
    """Name files outside of the folder, and digests that are no texts, in the manifest of a checkpoint."""
    manifest = {"../../../../../../../../etc/passwd": "0" * 64, "/dev/zero": 3, "model.safetensors": None}
    (run / "checkpoint-8" / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, lab):
    """A run of one step."""
    folder = tmp_path_factory.mktemp("trained")
    result = lab(folder, *TRAIN, "--output_dir", "run")
    assert (folder / "run" / "checkpoint-8").is_dir(), result["output"]
    return folder / "run"


HOSTILE = (
    bomb_in_the_optimizer, state_without_a_step, settings_with_a_tag, settings_of_another_form,
    scores_of_another_form, names_of_files_elsewhere,
)  # fmt: skip


@pytest.mark.parametrize("change", HOSTILE)
def test_resuming_a_stranger_s_run(change, trained, folder, lab):
    run = folder / "run"
    shutil.copytree(trained, run)
    for file in ("manifest.json", "metrics.jsonl"):  # an unfinished run, whose checkpoint is loaded
        (run / file).unlink(missing_ok=True)
    seal(run, [run / "config.yaml"])
    change(run)
    result = lab(folder, *TRAIN, "--output_dir", "run", "--resume")
    check_nothing_ran(folder, result)
