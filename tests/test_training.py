import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from bandpo.training.arguments import parse, reward_functions
from bandpo.training.card import card
from bandpo.training.run_folder import RunFolder
from bandpo.training.train import train

# The embedded task, made small: three batches of two updates.
SMALL = [
    "--per_device_train_batch_size=8",
    "--num_generations=4",
    "--steps_per_generation=2",
    "--num_iterations=1",
    "--max_steps=6",
    "--save_steps=2",
    "--logging_steps=1",
    "--max_completion_length=8",
    "--train_prompts=32",
    "--eval_prompts=2",
    "--eval_samples=4",
]
CPU = ["--use_cpu", "--bf16=False"]


def small(folder, *more):
    return parse([*SMALL, "--output_dir", str(folder), *more])


def settings(arguments):
    """All of them but those of the place and the moment."""
    run, training, model, mixture = arguments
    every = vars(run) | training.to_dict() | vars(model) | vars(mixture)
    return {k: v for k, v in every.items() if k not in ("output_dir", "logging_dir", "run_name")}


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()


def test_a_run_leaves_everything_behind(tmp_path):
    folder = train(small(tmp_path / "run"))
    config = yaml.safe_load((folder.path / "config.yaml").read_text())
    assert config["arguments"]["clip"] == "Band(divergence=KL(), radius=0.05, max_ratio=10.0)"
    assert config["versions"]["trl"]
    assert [row["step"] for row in folder.history()] == [1, 2, 3, 4, 5, 6]
    assert {"reward", "entropy", "clip_ratio/high_mean"} <= folder.history()[0].keys()
    scores = json.loads(folder.evaluation.read_text())
    assert scores.keys() == {"before", "after"}
    assert scores["before"].keys() == {"mean@4", "pass@4", "reward"}
    assert 0 <= scores["before"]["mean@4"] <= scores["before"]["pass@4"] <= 1
    assert folder.curves.read_bytes().startswith(b"\x89PNG")
    assert weights(folder.path)
    readme = (folder.path / "README.md").read_text()
    assert "None" not in readme
    assert "`multiplication`, trained by `bandpo train` with GRPO on `multiplication`" in readme
    assert "| clip rule | `Band(divergence=KL(), radius=0.05, max_ratio=10.0)` |" in readme
    assert f"| mean@4 | {scores['before']['mean@4']:.3f} | {scores['after']['mean@4']:.3f} |" in readme
    for name in re.findall(r"^\| `([\w./*-]+)` \| .* \|$", readme.partition("| file |")[2], re.M):
        assert list(folder.path.glob(name)), name
    # A second call with --resume finds it finished and touches nothing.
    stamp = folder.metrics.stat().st_mtime_ns
    train(small(tmp_path / "run", "--resume"))
    assert folder.metrics.stat().st_mtime_ns == stamp


def test_the_readme_of_a_run_names_a_model_of_a_hub_as_a_hub_wants_it(tmp_path):
    named = parse(
        ["--model_name_or_path=org/model", "--dataset_name=org/data", "--reward_funcs=accuracy_reward", *CPU]
    )
    assert "base_model: org/model\n" in card(named, RunFolder(tmp_path))
    ours = card(small(tmp_path, "--save_strategy=no"), RunFolder(tmp_path))
    assert "base_model" not in ours
    assert "checkpoint" not in ours


def test_scores_in_between_are_logged_and_change_nothing(tmp_path):
    plain, scored = train(small(tmp_path / "plain")), train(small(tmp_path / "scored", "--eval_every=4"))
    rows = [row for row in scored.history() if "mean@4" in row]
    assert [row["step"] for row in rows] == [4]
    assert rows[0].keys() == {"step", "mean@4", "pass@4"}
    assert all(
        torch.equal(a, b)
        for a, b in zip(weights(plain.path).values(), weights(scored.path).values(), strict=True)
    )


def test_other_methods_by_name(tmp_path):
    """DPPO and GSPO from the command line, and what the audit logs of them."""
    dppo = ["--clip", "Band(TotalVariation, 0.15, inf)", "--objective", "Masked(20)"]
    folder = train(small(tmp_path / "dppo", *dppo, "--max_steps=2", "--eval_prompts=0"))
    config = yaml.safe_load((folder.path / "config.yaml").read_text())["arguments"]
    assert config["objective"] == "Masked(max_weight=20)"
    assert {"audit/clip_high", "audit/if/Band/clip_high", "audit/radius_used"} <= folder.history()[-1].keys()
    gspo = small(tmp_path / "gspo", "--clip=FixedClip(3e-4, 4e-4)", "--importance_sampling_level=sequence")
    assert gspo.training.importance_sampling_level == "sequence"
    with pytest.raises(ValueError, match="did you mean Masked"):
        small(tmp_path / "typo", "--objective=Mask")


def test_resumes_to_the_same_trajectory(tmp_path):
    """Killed outright in the middle, then resumed: the same weights, bit for bit, and no log row twice.

    With a controller, whose state is in the checkpoint too.
    """
    steered = "--clip=Band(KL(), HoldClipRate(0.2, 0.05, gain=0.5))"
    whole = train(small(tmp_path / "whole", steered))
    radii = [row["radius"] for row in whole.history()]
    assert len(set(radii)) == 3
    assert radii[::2] == radii[1::2]  # one for each batch
    argv = [*SMALL, steered, "--output_dir", str(tmp_path / "cut")]
    code = (
        "import sys; from bandpo.training import arguments, train; train.train(arguments.parse(sys.argv[1:]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 300
    while not (tmp_path / "cut" / "checkpoint-2" / "trainer_state.json").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    cut = train(parse([*argv, "--resume"]))
    assert [row["step"] for row in cut.history()] == [1, 2, 3, 4, 5, 6]
    for ours, theirs in zip(cut.history(), whole.history(), strict=True):
        assert {**ours, "step_time": 0} == {**theirs, "step_time": 0}
    expected = weights(whole.path)
    assert all(torch.equal(value, expected[name]) for name, value in weights(cut.path).items())


def test_refuses_a_used_folder_and_other_settings(tmp_path):
    train(small(tmp_path / "run", "--max_steps=2", "--eval_prompts=0"))
    with pytest.raises(ValueError, match="already used; add --resume"):
        train(small(tmp_path / "run", "--max_steps=2", "--eval_prompts=0"))
    with pytest.raises(ValueError, match=r"other settings.*learning_rate: 0.0001 → 0.001"):
        train(
            small(tmp_path / "run", "--max_steps=2", "--eval_prompts=0", "--resume", "--learning_rate=1e-3")
        )


def test_refuses_an_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        train(small(tmp_path / "file" / "run"))


def test_refuses_a_checkpoint_in_the_middle_of_a_batch(tmp_path):
    with pytest.raises(ValueError, match="save_steps=3 would cut a batch's 2 updates"):
        train(small(tmp_path / "run", "--save_steps=3"))
    assert not (tmp_path / "run").exists()


def test_yaml_and_flags(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "dataset_name: multiplication\nmodel_name_or_path: multiplication\n"
        "reward_funcs: [accuracy_reward, bandpo.tasks.multiplication.reward]\n"
        "clip: FixedClip(0.2, 0.28)\nlearning_rate: 3.0e-5\nuse_cpu: true\nbf16: false\n"
    )
    arguments = parse(["--config", str(tmp_path / "run.yaml"), "--learning_rate", "2e-5"])
    assert arguments.training.clip == "FixedClip(low=0.2, high=0.28)"
    assert arguments.training.learning_rate == 2e-5
    assert arguments.training.num_generations == 8  # TRL's default, not the embedded task's
    assert [f.__name__ for f in reward_functions(arguments.run)] == ["accuracy_reward", "reward"]


def test_a_file_that_names_neither_model_nor_data_stands_on_the_embedded_task(tmp_path):
    (tmp_path / "run.yaml").write_text("clip: FixedClip(0.2)\n")
    ours = parse(["--config", str(tmp_path / "run.yaml"), "--max_steps=8"])
    plain = parse(["--clip=FixedClip(0.2)", "--max_steps=8"])
    assert settings(ours) == settings(plain)
    assert ours.training.num_generations == 16  # the embedded task's, not TRL's default


@pytest.mark.parametrize("flag", ["--config=run.yaml", "--config run.yaml"])
def test_a_file_may_follow_an_equals_sign(flag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("clip: FixedClip(0.2)\n")
    assert parse(flag.split()).training.clip == "FixedClip(low=0.2, high=0.2)"


def test_flags_may_be_written_with_hyphens():
    with pytest.raises(ValueError, match="no data: give --dataset_name"):  # not trained on the embedded task
        parse(["--model-name-or-path=x", *CPU])
    one = parse(["--num-iterations", "3", "--learning-rate=2e-5", "--clip=Band(KL(), 0.04)"])
    other = parse(["--num_iterations", "3", "--learning_rate=2e-5", "--clip=Band(KL(), 0.04)"])
    assert settings(one) == settings(other)
    assert one.training.num_iterations == 3


def test_the_config_of_a_run_makes_the_run_again(tmp_path):
    first = parse([*SMALL, "--clip=FixedClip(0.2, 0.28)", "--seed=7", f"--output_dir={tmp_path}/run"])
    folder = RunFolder(tmp_path / "run")
    folder.open(first)
    config = str(tmp_path / "run" / "config.yaml")
    again = parse(["--config", config, "--output_dir", str(tmp_path / "again")])
    assert settings(again) == settings(first)
    assert again.training.output_dir == str(tmp_path / "again")
    changed = parse(["--config", config, "--output_dir", str(tmp_path / "again"), "--seed=8"])
    assert (changed.training.seed, changed.training.clip) == (8, first.training.clip)


@pytest.mark.parametrize(
    ("content", "argv", "message"),
    [
        (None, ["--clipp=Band"], "unknown option --clipp; did you mean --clip?"),
        (None, ["--clip=Bnd"], "unknown name 'Bnd'; did you mean Band?"),
        (None, ["--config", "missing.yaml"], "there is no such file"),
        (None, ["--config"], "needs the path"),
        (None, ["--config="], "needs the path"),
        (None, ["--eval_samples=0"], "eval_samples must be at least 1, got 0"),
        (None, ["--model_name_or_path=x", *CPU], "no data: give --dataset_name"),
        (None, ["--dataset_name=x", *CPU], "no model: give --model_name_or_path"),
        (
            None,
            ["--dataset_name=x", "--model_name_or_path=y", *CPU],
            "no reward: give --reward_funcs",
        ),
        ("clip: [", [], "is no valid YAML"),
        ("- clip", [], "must hold `option: value` lines"),
        ("env: x", [], "env must hold `NAME: value` lines, got 'x'"),
        ("clipp: Band", [], "run.yaml: unknown option clipp; did you mean clip?"),
        ("model-name-or-path: x", [], "unknown option model-name-or-path; did you mean model_name_or_path?"),
    ],
)
def test_refuses_bad_arguments(content, argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "run.yaml").write_text(content)
        argv = ["--config", "run.yaml", *CPU]
    with pytest.raises(ValueError, match=message.replace("?", r"\?").replace("[", r"\[")):
        parse(argv)


def test_refuses_a_reward_that_leads_nowhere():
    arguments = parse(["--reward_funcs", "no_such.module.reward"])
    with pytest.raises(
        ValueError, match=r"reward_funcs: 'no_such.module.reward' is neither one of TRL's nor"
    ):
        reward_functions(arguments.run)


def test_a_missing_model_is_named(tmp_path):
    argv = ["--reward_funcs=bandpo.tasks.multiplication.reward", "--save_strategy=no", *CPU]
    names = ["--dataset_name=multiplication", f"--model_name_or_path={tmp_path}/nothing"]
    arguments = parse([*names, f"--output_dir={tmp_path}/run", *argv])
    with pytest.raises((OSError, ValueError), match="nothing"):
        train(arguments)
