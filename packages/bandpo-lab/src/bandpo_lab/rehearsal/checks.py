"""Judge a rehearsal by the metrics and files that it wrote, and explain what would fail on a cluster."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from bandpo.core.methods import Method
from bandpo.core.rules import Unclipped
from bandpo_lab.cluster.modes import ModeName
from bandpo_lab.rehearsal import by_hand, files
from bandpo_lab.rehearsal.run import FATAL
from bandpo_lab.rehearsal.samples import Sample, Versions, read_samples
from rlvet.runs.files import read_jsonl

PROBABILITY_TOLERANCE = 2e-5
"""The largest accepted difference of a token's probability between sampler and trainer, in fp32.

2e-6 is usual; weights that are one step old give 1e-2.
"""


@dataclass(frozen=True)
class Check:
    """The result of one check, with the evidence or the cause."""

    name: str
    ok: bool
    detail: str
    warning: bool = False
    """True if the check passed with a limitation that the detail names."""


@dataclass(frozen=True)
class Expectations:
    """The behaviour that the full-size recipe asks of a run."""

    loss_mode: str
    method: Method | None
    """The method of the loss; None if the loss is known to verl or a plug-in only."""
    answers: dict[str, str]
    """The right answers planted among the responses, by prompt."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """The metrics that verl logs if it applies the recipe's settings, each with the setting that causes it."""
    makes_one_update: bool = False
    """True if each batch has one update, so that every ratio may be 1 and the clip rule may change nothing."""
    mode: ModeName = "sync"
    """The mode of verl's trainer."""
    has_samplers_anchor: bool = False
    """True if the old log-probabilities are the sampler's."""


def demanded_metrics(config: Any) -> dict[str, str]:
    """Return the metrics that verl must log in each step, each with the setting of the recipe that causes it.

    The metric of dynamic sampling is not among them: verl logs it only in a step that drops a group, and in a
    rehearsal each group has a right answer and a wrong one, so none is dropped.
    """
    from bandpo.integrations.verl.correction import metrics_of
    from bandpo.integrations.verl.settings import ACTOR, POLICY_LOSS, ROLLOUT, in_bypass_mode

    actor = config.actor_rollout_ref.actor
    is_bandpo_loss = str(actor.policy_loss.get("_target_")).startswith("bandpo.")
    # verl compares nothing if it uses the sampler's probabilities as the old ones.
    compares_sampler = config.actor_rollout_ref.rollout.calculate_log_probs and not in_bypass_mode(config)
    conditions = {
        ("actor/kl_loss", f"{ACTOR}use_kl_loss=true"): actor.use_kl_loss,
        ("actor/entropy_loss", f"{ACTOR}entropy_coeff={actor.entropy_coeff}"): actor.entropy_coeff != 0,
        ("actor/reward_kl_penalty", "algorithm.use_kl_in_reward=true"): config.algorithm.use_kl_in_reward,
        ("audit/tokens", f"{POLICY_LOSS}audit=true"): is_bandpo_loss and actor.policy_loss.get("audit", True),
        ("training/rollout_probs_diff_max", f"{ROLLOUT}calculate_log_probs=true"): compares_sampler,
    }
    metrics = {metric: setting for (metric, setting), is_set in conditions.items() if is_set}
    return metrics | dict.fromkeys(metrics_of(config), "algorithm.rollout_correction")


def first_run_checks(folder: Path, steps: int, expected: Expectations) -> list[Check]:
    """Return the checks of the first run, which trains from the initial weights, in order of the training stages.

    Args:
        folder: The folder of the rehearsal.
        steps: The number of steps that the run was to make.
        expected: The behaviour that the recipe asks for.
    """
    metrics = _metrics_by_step(folder, "first")
    if steps not in metrics:
        last_step = max(metrics, default=0)
        cause = explain(folder, "first")
        return [Check("training", False, f"stopped after step {last_step} of {steps}. {cause}")]
    checkpoint = folder / "checkpoints" / f"global_step_{steps}"
    saved = checkpoint.is_dir()
    losses = folder / files.LOSSES.format("first")
    return [
        Check("training", True, f"{steps} steps of rollout, reward, advantage and update"),
        Check("policy loss", *_check_loss(metrics, expected.loss_mode)),
        *_check_gradient_by_hand(metrics, losses, expected),
        *_check_demanded_metrics(metrics, expected.metrics),
        _check_reward(folder, expected),
        Check("gradient", *_check_gradient_norm(metrics)),
        Check("weight sync", *_check_weight_sync(metrics, folder, "first", expected)),
        *_check_old_data(metrics, folder, "first", expected),
        Check("validation", *_check_validation(metrics[steps])),
        Check("checkpoint", saved, f"{checkpoint} {'is' if saved else 'is not'} there"),
    ]


def resumed_run_check(folder: Path, steps: int, expected: Expectations) -> Check:
    """Check that the resumed run continued from the checkpoint: next step, same weights, sampler still in sync."""
    metrics = _metrics_by_step(folder, "resumed")
    if steps + 1 not in metrics:
        return Check("resume", False, explain(folder, "resumed"))
    if min(metrics) != steps + 1:
        problem = f"went on at step {min(metrics)}, not {steps + 1}: no checkpoint was found"
        return Check("resume", False, problem)
    # The last sync of the first run and the first sync of the resumed run follow the same step, so their weights must
    # be equal.
    checksums = [sync["checksum"] for sync in records(folder / files.SYNCS) if sync["version"] == steps]
    if expected.mode == "one_step_off":  # sends no weights after its last step
        checksums = [_checksum(folder / "checkpoints" / f"global_step_{steps}"), *checksums]
    if len(checksums) < 2 or not math.isclose(checksums[0], checksums[-1], rel_tol=1e-9):
        return Check(
            "resume", False, "the weights read from the checkpoint are not those that were written to it"
        )
    synced, detail = _check_weight_sync(metrics, folder, "resumed", expected)
    return Check("resume", synced, "the same weights, one more step" if synced else detail)


def _checksum(checkpoint: Path) -> float:
    """Return the checksum of the actor's weights in a checkpoint, as for the weights that a rollout server receives."""
    [path] = (checkpoint / "actor").glob("model_world_size_1_rank_*.pt")
    weights = torch.load(path, weights_only=False)  # of a DTensor, which the rehearsal itself has written
    shards = [getattr(weight, "_local_tensor", weight) for weight in weights.values()]
    return sum(shard.double().abs().sum().item() for shard in shards)


def records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSONL file; an empty list if the file does not exist."""
    return [row for _, row in read_jsonl(path)] if path.exists() else []


def _metrics_by_step(folder: Path, run: str) -> dict[int, dict[str, float]]:
    """Return the metrics of each step of a run that updated the model."""
    metrics: dict[int, dict[str, float]] = {}
    for row in records(folder / files.METRICS.format(run)):
        metrics.setdefault(row["step"], {}).update(row["data"])
    return {step: data for step, data in metrics.items() if "actor/grad_norm" in data}


# Each of the functions below returns whether the check passed, and its detail.


def _check_loss(steps: dict[int, dict[str, float]], loss_mode: str) -> tuple[bool, str]:
    """Check that the loss is finite and is the one of the recipe."""
    losses = [data.get("actor/pg_loss", math.nan) for data in steps.values()]
    if not all(map(math.isfinite, losses)):
        return False, f"the loss is not finite: {losses}"
    last = steps[max(steps)]
    if loss_mode == "band" and "actor/clip_high" not in last:
        return (
            False,
            "loss_mode is band, but the metric actor/clip_high is missing: another loss ran under that name",
        )
    metrics = ("actor/clip_high", "actor/clip_low", "actor/pg_clipfrac")
    values = ", ".join(f"{name} {last[name]:.2g}" for name in metrics if name in last)
    return True, f"{loss_mode} ran in the worker, in step {max(steps)} with {values}"


_NEVER_CLIPPED = (
    "A rule that never acts has not been tested: look at the learning rate that the trainer really uses"
)
_ONE_UPDATE = "the recipe makes one update for each batch, with every ratio at 1, so the rule was not tested"


def _check_gradient_by_hand(
    steps: dict[int, dict[str, float]], recorded: Path, expected: Expectations
) -> list[Check]:
    """Check that the rule clipped tokens, and that the worker's gradient is the one of the method.

    Args:
        steps: The metrics of each step.
        recorded: The folder with the recorded calls of the loss.
        expected: The behaviour that the recipe asks for.
    """
    method = expected.method
    if method is None:
        return _check_unknown_loss(steps, expected)
    calls = by_hand.load(recorded)
    if not calls:
        return [Check("clip", False, "the worker called no policy loss")]
    if not any(call["advantages"].any() for call in calls):  # the check of the reward names the cause
        return [Check("clip", True, "not checked: every advantage is 0", warning=True)]
    comparison = by_hand.compare(calls, method)

    if method.clip == Unclipped():
        clip = Check("clip", True, "the rule clips nothing")
    else:
        tokens = f"{comparison.clipped} of {comparison.tokens} tokens"
        share = f"the rule changed the gradient of {tokens} in the recorded losses, the dual clip not counted"
        clip = _judge_clip(comparison.clipped > 0, share, expected)

    reference = "the library itself, whose formula has no second version,"
    if comparison.independent:
        reference = "the formula"
    if comparison.difference <= by_hand.TOLERANCE:
        detail = f"{len(calls)} calls in the worker agree with {reference} in float64 to {comparison.difference:.1g}"
        return [clip, Check("loss by hand", True, detail)]
    detail = (
        f"the worker's gradient differs from {reference} in float64 for {method.clip!r} by "
        f"{comparison.difference:.2g} of its largest entry: the worker does not run the rule of the config"
    )
    return [clip, Check("loss by hand", False, detail)]


def _judge_clip(has_clipped: bool, detail: str, expected: Expectations) -> Check:
    """Return the check of the clip rule, which must act unless each batch has one update."""
    if has_clipped:
        return Check("clip", True, detail)
    if expected.makes_one_update:
        return Check("clip", True, f"{detail}: {_ONE_UPDATE}", warning=True)
    return Check("clip", False, f"{detail}. {_NEVER_CLIPPED}")


def _check_unknown_loss(steps: dict[int, dict[str, float]], expected: Expectations) -> list[Check]:
    """Check by verl's metric that a loss without a reference clipped tokens."""
    shares = [data.get("actor/pg_clipfrac", math.nan) for data in steps.values()]
    if any(map(math.isfinite, shares)):
        values = ", ".join(f"{share:.2g}" for share in shares)
        has_clipped = any(share > 0 for share in shares)
        clip = _judge_clip(has_clipped, f"actor/pg_clipfrac by step: {values}", expected)
    else:
        clip = Check(
            "clip", True, "not checked: this loss does not log the share of clipped tokens", warning=True
        )
    detail = "not compared: bandpo has no reference for this loss"
    return [clip, Check("gradient of the loss", True, detail, warning=True)]


def _check_demanded_metrics(steps: dict[int, dict[str, float]], demanded: Mapping[str, str]) -> list[Check]:
    """Check that verl logged each metric of `demanded` in each step; return no check if it is empty."""
    if not demanded:
        return []
    missing = {
        name: setting
        for name, setting in demanded.items()
        if not all(name in data for data in steps.values())
    }
    if missing:
        return [
            Check("metrics", False, f"the metric {name} is missing, so no code of verl applied {setting}")
            for name, setting in missing.items()
        ]
    last = steps[max(steps)]
    values = ", ".join(f"{name} {last[name]:.3g}" for name in demanded)
    return [Check("metrics", True, f"all that the recipe asks for: {values}")]


def _check_reward(folder: Path, expected: Expectations) -> Check:
    """Check that the right answers planted in every group score higher than random text."""
    if expected.mode == "one_step_off":
        detail = (
            "not checked: verl 0.9.1 cannot write the responses of this trainer (trainer.rollout_data_dir)"
        )
        return Check("reward", True, detail, warning=True)
    return Check("reward", *_compare_rewards(folder, expected.answers))


def _compare_rewards(folder: Path, answers: dict[str, str]) -> tuple[bool, str]:
    if not answers:
        return True, "ran, but was not checked: no prompt has a short reward_model.ground_truth"
    # A response is right if it contains one of the planted answers.
    planted = set(answers.values())
    right_scores: list[float] = []
    random_scores: list[float] = []
    for path in sorted((folder / files.ROLLOUTS).glob("*.jsonl")):
        for response in records(path):
            is_right = any(answer in response["output"] for answer in planted)
            scores = right_scores if is_right else random_scores
            scores.append(response["score"])
    if not right_scores or not random_scores:
        return (
            False,
            f"{len(right_scores)} right and {len(random_scores)} random responses: nothing to compare",
        )
    right_mean = mean(right_scores)
    random_mean = mean(random_scores)
    if right_mean > random_mean:
        return True, f"right answers score {right_mean:.3g}, random text {random_mean:.3g}"
    example = next(iter(planted)).replace("\n", "\\n")
    return False, (
        f"right answers such as {example!r} score {right_mean:.3g} on average and random text {random_mean:.3g}. "
        "Every group would have zero advantages, so training would change nothing: check the reward function "
        "and the form of answer that it looks for"
    )


def _check_gradient_norm(steps: dict[int, dict[str, float]]) -> tuple[bool, str]:
    """Check that the gradient's norm is finite and not 0."""
    norms = [data["actor/grad_norm"] for data in steps.values()]
    if all(math.isfinite(norm) and norm > 0 for norm in norms):
        return True, f"norm {min(norms):.2g} to {max(norms):.2g}"
    return False, (
        f"the gradient's norm is {norms} by step: an update that changes nothing, as when all rewards of a "
        "group are equal or the mask is empty"
    )


def _check_weight_sync(
    steps: dict[int, dict[str, float]], folder: Path, run: str, expected: Expectations
) -> tuple[bool, str]:
    """Check that the sampler has the trainer's weights: both must compute the same probabilities."""
    differences = [data.get("training/rollout_probs_diff_max", math.nan) for data in steps.values()]
    # verl compares nothing if it uses the sampler's probabilities as the old ones, or does not request them. If data is
    # old, it compares different weights.
    if expected.mode != "sync" or all(map(math.isnan, differences)):
        differences = _differences_by_version(steps, folder, run, expected.mode)
    if differences and all(d < PROBABILITY_TOLERANCE for d in differences):
        return True, f"sampler and trainer agree on probabilities to {max(differences):.1g}"
    return False, (
        f"sampler and trainer disagree on a token's probability by up to {max(differences, default=math.nan):.2g} "
        f"(by step: {', '.join(f'{d:.2g}' for d in differences)}; below {PROBABILITY_TOLERANCE:g} is expected). "
        "The sampler does not have the trainer's weights: on the cluster, training would continue and get worse"
    )


def _differences_by_version(
    steps: dict[int, dict[str, float]], folder: Path, run: str, mode: ModeName
) -> list[float]:
    """Compute, for each step, how far trainer and sampler are apart if both have the weights that the step begins with.

    The probabilities of all responses are computed again with the weights that the sampler received for that version,
    so the age of the data that the trainer uses does not matter.
    """
    calls = by_hand.calls_by_step(by_hand.load(folder / files.LOSSES.format(run)), len(steps))
    samples = read_samples(folder)
    versions = Versions(folder)
    return [
        by_hand.sync_difference(first_call, versions.score(_version(step, mode), samples))
        for step, (first_call, *_) in zip(sorted(steps), calls, strict=False)
    ]


def _version(step: int, mode: ModeName) -> int:
    """Return the version of the weights that a step begins with, as verl counts it when it sends them."""
    return step if mode == "one_step_off" else step - 1


STALENESS = "training/off_policy/trajectory_staleness/max"
"""verl's metric of the age of the oldest response of a step, in versions."""


def _check_old_data(
    steps: dict[int, dict[str, float]], folder: Path, run: str, expected: Expectations
) -> list[Check]:
    """Check that the old log-probabilities are the sampler's, and that an asynchronous run has trained on old data."""
    checks = []
    ages = {step: data[STALENESS] for step, data in steps.items() if STALENESS in data}
    if expected.has_samplers_anchor:
        calls = by_hand.calls_by_step(by_hand.load(folder / files.LOSSES.format(run)), len(steps))
        begins = {step: _version(step, expected.mode) for step in sorted(steps)}
        samples = read_samples(folder)
        if expected.mode == "one_step_off":  # sends its first weights as version 0, and again as version 1
            samples = [replace(sample, version=max(sample.version, 1)) for sample in samples]
        anchor, ages_of_rows = _check_anchor(calls, begins, samples)
        checks.append(anchor)
        if anchor.ok and ages and ages_of_rows != ages:
            detail = f"verl logs {STALENESS} {ages} by step, and the rows of its loss are {ages_of_rows} versions old"
            return [*checks, Check("age", False, detail)]
        ages = ages_of_rows
    if expected.mode != "sync":
        oldest = max(ages.values(), default=0)
        by_step = ", ".join(f"step {step}: {age:g}" for step, age in sorted(ages.items()))
        detail = f"versions between sampling and update, at most: {by_step}"
        if oldest <= 0:
            detail += (
                ". The trainer is asynchronous, and no data was old: this rehearsal has not tested old data"
            )
        checks.append(Check("age", oldest > 0, detail))
    return checks


def _check_anchor(
    calls: Sequence[Sequence[dict[str, Any]]], begins: Mapping[int, int], samples: Sequence[Sample]
) -> tuple[Check, dict[int, float]]:
    """Check that the old log-probabilities of each sequence are those that the sampler computed, bit for bit.

    Args:
        calls: The recorded calls of each step.
        begins: The version of the weights that each step begins with, by step.
        samples: The sampler's responses.

    Returns:
        The check, and the age in versions of the oldest sequence of each step.
    """
    versions = {torch.tensor(sample.log_probs).numpy().tobytes(): sample.version for sample in samples}
    ages: dict[int, float] = {}
    sequences = 0
    unknown = 0
    for (step, newest), calls_of_step in zip(begins.items(), calls, strict=False):
        for row in (row for call in calls_of_step for row in by_hand.rows(call, "old_log_prob")):
            sequences += 1
            version = versions.get(row.float().numpy().tobytes())
            if version is None:
                unknown += 1
            else:
                ages[step] = max(ages.get(step, 0), newest - version)
    if unknown or not sequences:
        return Check(
            "anchor",
            False,
            f"the old log-probabilities of {unknown} of {sequences} sequences are not the sampler's: the ratio refers "
            "to another policy than algorithm.rollout_correction.bypass_mode=true says",
        ), ages
    detail = f"the old log-probabilities of all {sequences} sequences are the sampler's, bit for bit"
    return Check("anchor", True, detail), ages


def _check_validation(data: dict[str, float]) -> tuple[bool, str]:
    """Check that the validation after the last step gave a score."""
    scores = [name for name in data if name.startswith("val-core/")]
    if not scores:
        return False, "no metric val-core/… after the last step: the validation set gave no score"
    return True, ", ".join(scores)


EXPLANATIONS = {
    r"Unsupported loss mode: (\S+)\. Supported": "The worker knows no policy loss named {0}. Check the spelling of "
    "actor_rollout_ref.actor.policy_loss.loss_mode; a loss of bandpo also needs bandpo installed on every node.",
    r"Reward function is not implemented for data_source=(.+)": "verl has no reward function for data_source {0}. "
    "Set reward.custom_reward_function.path, or correct the data_source column of the data.",
    r"No module named '(transfer_queue)'": "The package TransferQueue is missing ({0}). "
    "Install verl[verl-core], or the extra verl of bandpo.",
    r"weight sync sent no value for (.+)": "The trainer did not send the weights {0} to the sampler.",
    r"'OneStepOffRayTrainer' object has no attribute '_dump_executor'": "The one-step-off trainer of verl 0.9.1 cannot "
    "write responses: leave out trainer.rollout_data_dir.",
    r"_log\(\) got an unexpected keyword argument 'flush'": "verl 0.9.1 fails in trainer_mode=separate_async with "
    "actor_rollout_ref.hybrid_engine=false, at a log message: set VERL_LOGGING_LEVEL=WARNING, or leave out "
    "hybrid_engine=false.",
    rf"{files.FOLDER}: stopped after (.+ s)": "It took longer than {0} and was stopped, which happens "
    "on a busy machine. `bandpo-lab rehearse --timeout SECONDS` allows more; `bandpo-lab run` prints that command.",
}
"""The patterns of known errors in a log, each with its explanation; the first match is used."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Ray begins the lines of its workers with "(Name pid=7)".
_PREFIX = re.compile(r"^\([^)]*pid=\d+[^)]*\)\s?")
_EXCEPTION = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b(?!\S*\()[^|]*$")


def explain(folder: Path, run: str) -> str:
    """Return the most likely cause for the end of a run, from its log."""
    path = folder / files.LOG.format(run)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = [_PREFIX.sub("", line.rstrip()) for line in _COLOUR.sub("", text).splitlines()]
    text = "\n".join(lines)
    for pattern, explanation in EXPLANATIONS.items():
        match = re.search(pattern, text)
        if match:
            return explanation.format(*match.groups())
    exceptions = [line for line in lines if _EXCEPTION.match(line) and "RayTaskError" not in line]
    if not exceptions:
        return f"No exception is in its log, {path}."
    if FATAL.search(text):
        return f"A response or its reward failed with: {exceptions[0]}. See {path}."
    return f"It failed with: {exceptions[-1]}. See {path}."
