"""What a rehearsal proved, from the metrics it left, and in plain words what would have failed on the cluster."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from bandpo.methods import Method
from bandpo.rules import Unclipped
from bandpo.runs.files import read_jsonl
from bandpo_lab.rehearsal import by_hand, files
from bandpo_lab.rehearsal.run import FATAL

PROBABILITY_TOLERANCE = 2e-5
"""Largest difference of a token's probability between sampler and trainer, in fp32: 2e-6 is usual, and weights that
are one step old show 1e-2."""


@dataclass(frozen=True)
class Check:
    """One thing that works or does not, with the evidence or the cause."""

    name: str
    ok: bool
    detail: str
    warning: bool = False
    """Whether it works at a price that the detail names."""


@dataclass(frozen=True)
class Expected:
    """What the recipe, in its full size, has the run do."""

    loss_mode: str
    method: Method | None
    """What its loss is made of; None for a loss that only verl or a plug-in knows."""
    answers: dict[str, str]
    """Planted right answers by prompt."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """The metrics that verl logs where it does what the recipe asks for, each with the setting that asks for it."""


def demanded_metrics(config: Any) -> dict[str, str]:
    """Return the metrics that verl logs in each step if it does what a recipe asks for, each with the asking setting.

    Not among them is that of dynamic sampling, which verl logs only in a step in which it drops a group: in a
    rehearsal each group has a right answer and a wrong one.
    """
    from bandpo.integrations._verl_correction import metrics_of
    from bandpo.integrations._verl_settings import ACTOR, POLICY_LOSS, ROLLOUT, in_bypass_mode

    actor = config.actor_rollout_ref.actor
    audited = str(actor.policy_loss.get("_target_")).startswith("bandpo.") and actor.policy_loss.get(
        "audit", True
    )
    asked = {
        ("actor/kl_loss", f"{ACTOR}use_kl_loss=true"): actor.use_kl_loss,
        ("actor/entropy_loss", f"{ACTOR}entropy_coeff={actor.entropy_coeff}"): actor.entropy_coeff != 0,
        ("actor/reward_kl_penalty", "algorithm.use_kl_in_reward=true"): config.algorithm.use_kl_in_reward,
        ("audit/tokens", f"{POLICY_LOSS}audit=true"): audited,
        # verl compares nothing where it takes the sampler's probabilities for the old ones.
        ("training/rollout_probs_diff_max", f"{ROLLOUT}calculate_log_probs=true"): (
            config.actor_rollout_ref.rollout.calculate_log_probs and not in_bypass_mode(config)
        ),
    }
    metrics = {metric: setting for (metric, setting), wanted in asked.items() if wanted}
    return metrics | dict.fromkeys(metrics_of(config), "algorithm.rollout_correction")


def first_run_checks(folder: Path, steps: int, expected: Expected) -> list[Check]:
    """Checks on the run from the start, in the order in which things happen."""
    metrics = _by_step(folder, "first")
    if steps not in metrics:
        done = max(metrics, default=0)
        return [Check("training", False, f"stopped after step {done} of {steps}. {explain(folder, 'first')}")]
    checkpoint = folder / "checkpoints" / f"global_step_{steps}"
    saved = checkpoint.is_dir()
    losses = folder / files.LOSSES.format("first")
    return [
        Check("training", True, f"{steps} steps of rollout, reward, advantage and update"),
        Check("policy loss", *_loss(metrics, expected.loss_mode)),
        *_by_hand(metrics, losses, expected.method),
        *_demanded(metrics, expected.metrics),
        Check("reward", *_reward(folder, expected.answers)),
        Check("gradient", *_gradient(metrics)),
        Check("weight sync", *_weight_sync(metrics, folder, "first")),
        Check("validation", *_validation(metrics[steps])),
        Check("checkpoint", saved, f"{checkpoint} {'is' if saved else 'is not'} there"),
    ]


def resumed_run_check(folder: Path, steps: int) -> Check:
    """Whether the resumed run went on from the checkpoint: next step, same weights, still in sync."""
    metrics = _by_step(folder, "resumed")
    if steps + 1 not in metrics:
        return Check("resume", False, explain(folder, "resumed"))
    if min(metrics) != steps + 1:
        found = f"went on at step {min(metrics)}, not {steps + 1}: no checkpoint was found"
        return Check("resume", False, found)
    # The last sync of the first run and the first one of the resumed run follow the same step: their models are equal.
    checksums = [sync["checksum"] for sync in records(folder / files.SYNCS) if sync["step"] == steps]
    if len(checksums) < 2 or not math.isclose(checksums[0], checksums[-1], rel_tol=1e-9):
        return Check(
            "resume", False, "the weights read from the checkpoint are not those that were written to it"
        )
    synced, found = _weight_sync(metrics, folder, "resumed")
    return Check("resume", synced, "the same weights, one more step" if synced else found)


def records(path: Path) -> list[dict[str, Any]]:
    """The records of a file, none if there is no such file."""
    return [row for _, row in read_jsonl(path)] if path.exists() else []


def _by_step(folder: Path, run: str) -> dict[int, dict[str, float]]:
    logged = records(folder / files.METRICS.format(run))
    return {record["step"]: record["data"] for record in logged if "actor/grad_norm" in record["data"]}


def _loss(steps: dict[int, dict[str, float]], loss_mode: str) -> tuple[bool, str]:
    losses = [data.get("actor/pg_loss", math.nan) for data in steps.values()]
    if not all(map(math.isfinite, losses)):
        return False, f"the loss is not finite: {losses}"
    last = steps[max(steps)]
    if loss_mode == "band" and "actor/clip_high" not in last:
        return (
            False,
            "loss_mode is band, but the metric actor/clip_high is missing: another loss ran under that name",
        )
    seen = {k: last[k] for k in ("actor/clip_high", "actor/clip_low", "actor/pg_clipfrac") if k in last}
    return True, f"{loss_mode} ran in the worker: {', '.join(f'{k} {v:.2g}' for k, v in seen.items())}"


_IDLE = "A rule that never acts has not been tested: look at the learning rate that the trainer really uses"


def _by_hand(steps: dict[int, dict[str, float]], recorded: Path, method: Method | None) -> list[Check]:
    """Whether the rule acted, and whether the worker's gradient is what the rule asks for."""
    if method is None:
        clipped = [data.get("actor/pg_clipfrac", math.nan) for data in steps.values()]
        shares = ", ".join(f"{share:.2g}" for share in clipped)
        clip = Check("clip", True, "not judged: this loss does not say what it clips", warning=True)
        if any(map(math.isfinite, clipped)):
            found = any(share > 0 for share in clipped)
            clip = Check("clip", found, f"actor/pg_clipfrac by step: {shares}. {_IDLE}")
        unknown = "not compared: bandpo has no reference for this loss"
        return [clip, Check("gradient of the loss", True, unknown, warning=True)]
    calls = by_hand.load(recorded)
    if not calls:
        return [Check("clip", False, "the worker called no policy loss")]
    if not any(call["advantages"].any() for call in calls):  # the check of the reward says why
        return [Check("clip", True, "not judged: every advantage is 0", warning=True)]
    found = by_hand.compare(calls, method)
    if method.clip == Unclipped():
        clip = Check("clip", True, "the rule clips nothing")
    else:
        share = f"the rule changed the gradient of {found.clipped} of {found.tokens} tokens"
        clip = Check("clip", found.clipped > 0, share if found.clipped else f"{share}. {_IDLE}")
    means = "the formula" if found.independent else "the library itself, whose formula has no second version,"
    same = found.difference <= by_hand.TOLERANCE
    agreement = f"{len(calls)} calls in the worker agree with {means} in float64 to {found.difference:.1g}"
    disagreement = (
        f"the worker's gradient differs from {means} in float64 for {method.clip!r} by {found.difference:.2g} of "
        "its largest entry: the worker does not run the rule of the config"
    )
    return [clip, Check("loss by hand", same, agreement if same else disagreement)]


def _demanded(steps: dict[int, dict[str, float]], demanded: Mapping[str, str]) -> list[Check]:
    """Check that verl logged, in each step, each metric of what the recipe asks for; nothing where it asks for none."""
    if not demanded:
        return []
    missing = {
        name: setting
        for name, setting in demanded.items()
        if not all(name in data for data in steps.values())
    }
    if missing:
        detail = "; ".join(
            f"the metric {name} is missing, so no code of verl applied {setting}"
            for name, setting in missing.items()
        )
        return [Check("metrics", False, detail)]
    last = steps[max(steps)]
    values = ", ".join(f"{name} {last[name]:.3g}" for name in demanded)
    return [Check("metrics", True, f"all that the recipe asks for: {values}")]


def _reward(folder: Path, answers: dict[str, str]) -> tuple[bool, str]:
    """Right answers, planted in every group, must score higher than noise."""
    if not answers:
        return True, "ran, but was not judged: no prompt has a short reward_model.ground_truth"
    responses = [row for path in sorted((folder / files.ROLLOUTS).glob("*.jsonl")) for row in records(path)]
    planted = set(answers.values())
    scores: dict[bool, list[float]] = {True: [], False: []}
    for row in responses:
        scores[any(answer in row["output"] for answer in planted)].append(row["score"])
    right, noise = scores[True], scores[False]
    if not right or not noise:
        return False, f"{len(right)} right and {len(noise)} random responses: nothing to compare"
    if mean(right) > mean(noise):
        return True, f"right answers score {mean(right):.3g}, random text {mean(noise):.3g}"
    example = next(iter(planted)).replace("\n", "\\n")
    return False, (
        f"right answers such as {example!r} score {mean(right):.3g} on average and random text {mean(noise):.3g}. "
        "Every group would have zero advantage, and training would teach nothing: check the reward function "
        "and the form of answer that it looks for"
    )


def _gradient(steps: dict[int, dict[str, float]]) -> tuple[bool, str]:
    norms = [data["actor/grad_norm"] for data in steps.values()]
    if all(math.isfinite(norm) and norm > 0 for norm in norms):
        return True, f"norm {min(norms):.2g} to {max(norms):.2g}"
    return False, (
        f"the gradient's norm is {norms} by step: an update that changes nothing, as when all rewards of a "
        "group are equal or the mask is empty"
    )


def _weight_sync(steps: dict[int, dict[str, float]], folder: Path, run: str) -> tuple[bool, str]:
    differences = [data.get("training/rollout_probs_diff_max", math.nan) for data in steps.values()]
    # verl compares nothing where it takes the sampler's probabilities for the old ones, or does not ask for them.
    if all(map(math.isnan, differences)):
        calls = by_hand.load(folder / files.LOSSES.format(run))
        samples = [sample["log_probs"] for sample in records(folder / files.SAMPLES.format(run))]
        differences = by_hand.sync_differences(calls, samples, len(steps)) if calls else differences
    if all(d < PROBABILITY_TOLERANCE for d in differences):
        return True, f"sampler and trainer agree on probabilities to {max(differences):.1g}"
    return False, (
        f"sampler and trainer disagree on a token's probability by up to {max(differences):.2g} "
        f"(by step: {', '.join(f'{d:.2g}' for d in differences)}; below {PROBABILITY_TOLERANCE:g} is expected). "
        "The sampler does not have the trainer's weights: on the cluster, training would go on and rot"
    )


def _validation(data: dict[str, float]) -> tuple[bool, str]:
    scores = [name for name in data if name.startswith("val-core/")]
    missing = "no metric val-core/… after the last step: the validation set gave no score"
    return bool(scores), ", ".join(scores) or missing


KNOWN = {
    r"Unsupported loss mode: (\S+)\. Supported": "The worker knows no policy loss named {0}. Check the spelling of "
    "actor_rollout_ref.actor.policy_loss.loss_mode; a loss of bandpo also needs bandpo installed on every node.",
    r"Reward function is not implemented for data_source=(.+)": "verl has no reward function for data_source {0}. "
    "Set reward.custom_reward_function.path, or correct the data_source column of the data.",
    r"No module named '(transfer_queue)'": "The package TransferQueue is missing ({0}). "
    "Install verl[verl-core], or the extra verl of bandpo.",
    r"weight sync sent no value for (.+)": "The trainer did not send the weights {0} to the sampler.",
    rf"{files.FOLDER}: stopped after (.+ s)": "It took longer than {0} and was stopped, as it may "
    "beside other work. `bandpo-lab rehearse --timeout SECONDS` allows more; `bandpo-lab run` prints that command.",
}
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(r"^\([^)]*pid=\d+[^)]*\)\s?")
_EXCEPTION = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b(?!\S*\()[^|]*$")


def explain(folder: Path, run: str) -> str:
    """The likeliest cause of a run's end, from its log."""
    path = folder / files.LOG.format(run)
    lines = (
        [
            _PREFIX.sub("", line.rstrip())
            for line in _COLOUR.sub("", path.read_text(encoding="utf-8")).splitlines()
        ]
        if path.exists()
        else []
    )
    text = "\n".join(lines)
    for pattern, words in KNOWN.items():
        if found := re.search(pattern, text):
            return words.format(*found.groups())
    raised = [line for line in lines if _EXCEPTION.match(line) and "RayTaskError" not in line]
    if not raised:
        return f"No exception is in its log, {path}."
    if FATAL.search(text):
        return f"A response or its reward failed with: {raised[0]}. See {path}."
    return f"It failed with: {raised[-1]}. See {path}."
