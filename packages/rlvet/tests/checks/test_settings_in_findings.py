"""Findings of a log read the configuration of the run, and name the settings that they rest on."""

import json
import math
import re

import pytest
import yaml
from typer.testing import CliRunner

from rlvet import diagnose
from rlvet.cli.app import app
from rlvet.records.catalogue import KINDS
from rlvet.runs.setup import ALTERNATIVES, Setup

TRL = {"importance_sampling_level": "token", "learning_rate": 1e-6, "num_generations": 8, "beta": 0.04}
"""Some settings of TRL, as wandb's config.yaml has them."""


def verl(*, rate=1e-6, lora_rank=0, group=8, cap=1024):
    """Return a configuration of verl as hydra writes it."""
    return {
        "actor_rollout_ref": {
            "actor": {"optim": {"lr": rate}, "policy_loss": {"loss_mode": "vanilla"}},
            "model": {"path": "Qwen/Qwen2.5-7B", "lora_rank": lora_rank},
            "rollout": {"n": group},
        },
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"max_response_length": cap, "train_batch_size": 1024},
    }


def write_run(folder, settings, *, adapter=None, steps=40, **metrics):
    """Write a log of verl or TRL with a rising reward, and the configuration beside it.

    Args:
        folder: Where to write them.
        settings: The configuration; None for none.
        adapter: The settings in the adapter's ``adapter_config.json``; None for none.
        steps: Log steps.
        **metrics: Functions of the part of the run that is over, by their keys with ``__`` for ``/``.
    """
    rows = []
    for step in range(1, steps + 1):
        row = {"step": step, "reward": step / steps}
        for key, function in metrics.items():
            row[key.replace("__", "/")] = function(step / steps)
        rows.append(json.dumps(row))
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    if settings is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    if adapter is not None:
        checkpoint = folder / "checkpoint-40"
        checkpoint.mkdir()
        (checkpoint / "adapter_config.json").write_text(json.dumps(adapter))
    return folder


def finding_of(diagnosis, code):
    """Return the finding with a code."""
    return next(finding for finding in diagnosis.findings if finding.code == code)


LORA = {"peft_type": "LORA", "r": 16, "base_model_name_or_path": "Qwen/Qwen2.5-7B"}


@pytest.mark.parametrize(
    ("settings", "adapter", "where"),
    [
        (TRL, LORA, "r=16 (checkpoint-40/adapter_config.json)"),
        (verl(lora_rank=32), None, "actor_rollout_ref.model.lora_rank=32 (config.yaml)"),
    ],
)
def test_a_kl_at_the_first_step_with_lora_is_to_the_base_model(settings, adapter, where, tmp_path):
    diagnosis = diagnose(write_run(tmp_path, settings, adapter=adapter, kl=lambda t: 0.48))
    finding = finding_of(diagnosis, "reference-kl")
    assert "KL to the reference is 0.48 at step 1" in finding.cause
    assert "the adapter that training began with" in finding.cause
    assert "the reference is the base model" in finding.cause
    assert where in finding.settings
    assert where in str(diagnosis)


def test_without_lora_the_reference_is_another_model(tmp_path):
    finding = finding_of(diagnose(write_run(tmp_path, TRL, kl=lambda t: 0.48)), "reference-kl")
    assert "another model" in finding.cause
    assert not any("lora" in text.lower() for text in finding.settings)
    assert "beta=0.04 (config.yaml)" in finding.settings


@pytest.mark.parametrize("group", [2, 4])
def test_dead_groups_come_with_their_size(group, tmp_path):
    run = write_run(tmp_path, TRL | {"num_generations": group}, frac_reward_zero_std=lambda t: 0.8)
    finding = finding_of(diagnose(run), "no-signal")
    assert f"groups of {group} answers" in finding.cause
    assert f"num_generations={group} (config.yaml)" in finding.settings


def test_cut_answers_come_with_the_cap(tmp_path):
    run = write_run(tmp_path, verl(cap=512), response_length__clip_ratio=lambda t: 0.9)
    finding = finding_of(diagnose(run), "truncated")
    assert "at the cap of 512 tokens" in finding.cause
    assert "data.max_response_length=512 (config.yaml)" in finding.settings


def test_a_mean_length_near_the_cap_is_cut_where_the_cap_is_known(tmp_path):
    """Their share is not logged, and no mean is the cap itself."""
    metrics = {"response_length__mean": lambda t: 240.5 + 5 * (t % 0.1)}
    run = write_run(tmp_path, verl(cap=256), **metrics)
    finding = finding_of(diagnose(run), "truncated")
    assert "the mean length is 241 tokens in the later half, 94% of the cap of 256 tokens" in finding.cause
    assert finding.quantities == ("length",)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(verl(cap=1024)))
    assert [finding.code for finding in diagnose(tmp_path).findings] == []


def test_a_collapse_names_a_learning_rate_outside_that_of_published_runs(tmp_path):
    run = write_run(
        tmp_path, verl(rate=5e-4), actor__entropy=lambda t: max(0.01, 1 - 3 * t), reward=lambda t: 0.3
    )
    finding = finding_of(diagnose(run), "entropy-collapse")
    (text,) = [text for text in finding.settings if "lr" in text]
    assert text == (
        "actor_rollout_ref.actor.optim.lr=0.0005 (config.yaml), above 1e-05, the largest that counts as usual for "
        "all weights of a model of 7 billion parameters"
    )


def test_a_usual_learning_rate_is_no_evidence(tmp_path):
    run = write_run(
        tmp_path, verl(rate=1e-6), actor__entropy=lambda t: max(0.01, 1 - 3 * t), reward=lambda t: 0.3
    )
    assert finding_of(diagnose(run), "entropy-collapse").settings == ()


def test_the_rate_of_lora_is_compared_with_that_of_lora(tmp_path):
    drift = {"kl": lambda t: 4 * max(0.0, t - 0.4)}
    run = write_run(tmp_path, TRL | {"learning_rate": 1e-4}, adapter=LORA, **drift)
    diagnosis = diagnose(run)
    assert finding_of(diagnosis, "kl-drift").settings == ("beta=0.04 (config.yaml)",)
    assert "learning-rate" not in [finding.id for finding in diagnosis.configuration.findings]
    (tmp_path / "checkpoint-40/adapter_config.json").unlink()
    diagnosis = diagnose(run)
    assert "learning_rate=0.0001 (config.yaml), above 3e-05, the largest" in str(diagnosis)
    assert "learning-rate" in [finding.id for finding in diagnosis.configuration.findings]


@pytest.mark.parametrize(
    ("rate", "end"),
    [
        (1e-4, "above 3e-05, the largest that counts as usual for all weights (LoRA adapters: 0.0002)"),
        (
            5e-4,
            "above 3e-05, the largest that counts as usual for all weights, and above 0.0002, the largest for LoRA "
            "adapters",
        ),
    ],
)
def test_a_rate_is_compared_with_both_where_it_is_not_known_whether_lora_is_used(tmp_path, rate, end):
    run = write_run(tmp_path, TRL | {"learning_rate": rate}, kl=lambda t: 4 * max(0.0, t - 0.4))
    assert (
        finding_of(diagnose(run), "kl-drift").settings[-1] == f"learning_rate={rate:g} (config.yaml), {end}"
    )


# --- The rules of lint ---


def test_the_rules_of_lint_are_applied_to_the_run_s_configuration(tmp_path):
    run = write_run(tmp_path, TRL | {"num_generations": 2, "epsilon": 0.3, "loss_type": "dapo"})
    diagnosis = diagnose(run)
    assert diagnosis.healthy
    assert diagnosis.headline.startswith("ok: ")
    assert [finding.id for finding in diagnosis.configuration.findings] == ["clip-cannot-act", "group-of-two"]
    text = str(diagnosis)
    number = (tmp_path / "config.yaml").read_text().splitlines().index("num_generations: 2") + 1
    assert f"config.yaml:{number}: note: two answers to each prompt [group-of-two]" in text
    assert "set: num_generations=2" in text
    assert "see: Liu et al." in text
    assert diagnosis.as_json()["configuration"]["findings"][1]["settings"] == {"num_generations": 2}
    assert "group-of-two" in diagnosis.as_markdown()
    assert CliRunner().invoke(app, ["diagnose", str(run)]).exit_code == 0
    assert CliRunner().invoke(app, ["diagnose", str(run), "--fail-on", "note"]).exit_code == 0


def test_without_a_configuration_nothing_is_said(tmp_path):
    diagnosis = diagnose(write_run(tmp_path, None))
    assert diagnosis.configuration is None
    assert "configuration" not in str(diagnosis)
    assert "onfiguration" not in diagnosis.as_markdown()
    assert diagnosis.as_json()["configuration"] is None


@pytest.mark.parametrize("content", ["a: [1", "[" * 5000, "\x00"])
def test_a_broken_configuration_is_one_line(content, tmp_path):
    run = write_run(tmp_path, None)
    (tmp_path / "config.yaml").write_text(content)
    diagnosis = diagnose(run)
    assert diagnosis.healthy
    (line,) = [line for line in str(diagnosis).splitlines() if "config.yaml" in line]
    assert line.startswith("config.yaml was not read: ")
    assert diagnosis.as_json()["notes"] == [line]


@pytest.mark.parametrize("content", ["&a [*a, *a]", "actor_rollout_ref: {actor: 3}", "3", ""])
def test_a_configuration_that_tells_nothing_changes_nothing(content, tmp_path):
    run = write_run(tmp_path, None)
    (tmp_path / "config.yaml").write_text(content)
    assert diagnose(run).headline == diagnose(write_run(tmp_path, None)).headline
    assert diagnose(run).healthy


def test_a_configuration_of_another_program_is_not_used(tmp_path):
    run = write_run(tmp_path, TRL | {"num_generations": 1}, actor__pg_clipfrac=lambda t: 0.01)
    diagnosis = diagnose(run)
    assert diagnosis.setup.framework == "verl"
    assert diagnosis.configuration is None


def test_a_rate_of_sgd_is_not_compared_with_those_of_adam(tmp_path):
    collapse = {"entropy": lambda t: max(0.001, 1 - 3 * t), "reward": lambda t: 0.5}
    settings = TRL | {"learning_rate": 1e-3}
    assert finding_of(diagnose(write_run(tmp_path, settings, **collapse)), "entropy-collapse").settings
    folder = tmp_path / "sgd"
    folder.mkdir()
    write_run(folder, settings | {"optim": "sgd"}, **collapse)
    assert finding_of(diagnose(folder), "entropy-collapse").settings == ()


# --- Alternatives that the settings exclude ---


def advice(folder, settings, code, **metrics):
    return finding_of(diagnose(write_run(folder, settings, **metrics)), code).advice


ONE_UPDATE = {"num_iterations": 1, "steps_per_generation": 4, "gradient_accumulation_steps": 4}
TOO_FAST = {"kl": lambda t: 1.6 * min(1.0, 5 * (t - 0.025))}


@pytest.mark.parametrize(
    ("settings", "has_it"),
    [
        (ONE_UPDATE, False),
        (ONE_UPDATE | {"num_iterations": 2}, True),
        ({"num_iterations": 4}, True),
        (None, True),
    ],
)
def test_fewer_updates_than_one_are_not_proposed(settings, has_it, tmp_path):
    text = advice(tmp_path, None if settings is None else TRL | settings, "step-too-large", **TOO_FAST)
    assert text.startswith("use a learning rate ten times smaller")
    assert ("fewer updates" in text) == has_it
    heavy = advice(
        tmp_path,
        None if settings is None else TRL | settings,
        "clip-heavy",
        clip_ratio__region_mean=lambda t: 0.5,
    )
    assert heavy.startswith("make fewer updates" if has_it else "lower the learning rate")


@pytest.mark.parametrize(("temperature", "has_it"), [(0.7, True), (1.0, False), (1.2, False), (None, True)])
def test_a_high_temperature_is_not_to_be_raised(temperature, has_it, tmp_path):
    settings = TRL if temperature is None else TRL | {"temperature": temperature}
    text = advice(
        tmp_path,
        settings,
        "low-entropy",
        entropy=lambda t: 0.05,
        reward=lambda t: 0.4 + 0.01 * math.sin(300 * t),
    )
    assert ("temperature" in text) == has_it
    assert text.endswith("start from an earlier checkpoint of supervised fine-tuning")


@pytest.mark.parametrize(("group", "has_it"), [(1, True), (8, False)])
def test_groups_that_are_known_to_have_several_answers_are_not_proposed(group, has_it, tmp_path):
    same = {
        f"critic__{name}__{end}": lambda t, at=at: at + t
        for name in ("score", "rewards", "advantages")
        for end, at in (("max", 1.0), ("min", -0.5))
    }
    text = advice(tmp_path, verl(group=group), "no-baseline", **same)
    assert ("sample several answers" in text) == has_it
    assert text.endswith("use an estimator that has a baseline of its own")


@pytest.mark.parametrize(("coefficient", "has_it"), [(0, False), (0.0, False), (0.01, True), (None, True)])
def test_an_entropy_bonus_of_nothing_is_not_to_be_lowered(coefficient, has_it, tmp_path):
    settings = verl()
    if coefficient is not None:
        settings["actor_rollout_ref"]["actor"]["entropy_coeff"] = coefficient
    text = advice(
        tmp_path, settings, "entropy-rise", actor__entropy=lambda t: 0.5 + 4 * t, reward=lambda t: 0.3
    )
    assert ("entropy bonus" in text) == has_it
    assert "the learning rate (actor_rollout_ref.actor.optim.lr)" in text


def test_each_alternative_of_a_remedy_is_known():
    remedies = [kind.remedy for kind in KINDS if "|" in kind.remedy]
    used = {name for remedy in remedies for name in re.findall(r"\[([^|\]]+)\|", remedy)}
    assert used == ALTERNATIVES.keys()
    assert not any(set("|{}") & {*Setup("trl").fill(kind.remedy)} for kind in KINDS)


@pytest.mark.parametrize(
    ("rate", "advice"),
    [
        (
            5e-3,
            "use a learning rate of 1e-6, or 1e-5 with LoRA, as is usual, and of at most 3e-05, or 0.0002 with LoRA",
        ),
        (1e-4, "use a learning rate ten times smaller"),
    ],
)
def test_the_advice_on_large_steps_leads_to_a_usual_rate(tmp_path, rate, advice):
    run = write_run(tmp_path, TRL | {"learning_rate": rate}, kl=lambda t: 4.0 if t > 0.06 else 0.001)
    assert finding_of(diagnose(run), "step-too-large").advice.startswith(advice)


def test_a_fault_of_the_configuration_is_named_above_the_findings(tmp_path):
    run = write_run(
        tmp_path, TRL | {"num_generations": 1, "generation_kwargs": {"temperature": 0.5}, "temperature": 1.0}
    )
    diagnosis = diagnose(run)
    faults = [one.id for one in diagnosis.configuration.findings if one.severity in ("fix", "stop")]
    assert "engine-temperature" in faults
    line = (
        f"to fix in the configuration before the next run, whatever it did in this one: {', '.join(faults)}"
    )
    assert line in str(diagnosis).split("\n")[:4]


@pytest.mark.parametrize("strategy", ["no", "steps"])
def test_advice_to_resume_says_if_no_checkpoint_was_saved(tmp_path, strategy):
    run = write_run(tmp_path, TRL | {"save_strategy": strategy}, kl=lambda t: 4.0 if t > 0.4 else 0.001)
    text = finding_of(diagnose(run), "kl-drift").advice
    assert ("or begin again: by save_strategy=no, the trainer saved none" in text) == (strategy == "no")
