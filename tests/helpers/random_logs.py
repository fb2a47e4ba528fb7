"""Logs at random levels with random trends, jumps and spikes, and the same logs as other frameworks name them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

from rlvet.runs.keys import endings, rows_of

Rows = list[dict[str, float]]

RANGES: Mapping[str, tuple[float, float]] = {
    "reward": (-1.0, 1.0),
    "reward_std": (0.0, 0.5),
    "cut": (0.0, 1.0),
    "dead": (0.0, 1.0),
    "entropy": (0.001, 2.0),
    "kl": (0.0, 4000.0),
    "length": (2.0, 3000.0),
    "length_max": (10.0, 4000.0),
    "clip": (0.0, 0.5),
    "mismatch": (0.0, 0.5),
    "mismatch_kl": (0.0, 0.3),
    "importance_weight": (0.05, 4.0),
    "staleness": (0.0, 8.0),
    "grad_norm": (0.0, 50.0),
    "learning_rate": (0.0, 1e-3),
    "evaluation": (0.0, 1.0),
}
"""The quantities of a random log, with the range of each."""

LOGARITHMIC = (
    "kl",
    "entropy",
    "length",
    "length_max",
    "mismatch",
    "mismatch_kl",
    "grad_norm",
    "learning_rate",
)
"""Quantities whose levels are drawn on a logarithmic scale."""

LENGTHS = (1, 2, 5, 9, 10, 12, 15, 18, 24, 27, 30, 46, 60, 100, 200)
"""Numbers of log steps. Several are just below or above a limit of a check."""


def _level(draw: random.Random, name: str) -> float:
    low, high = RANGES[name]
    if draw.random() < 0.1:
        return draw.choice((low, high)) if name not in LOGARITHMIC else max(low, 1e-4)
    if name in LOGARITHMIC:
        return math.exp(draw.uniform(math.log(max(low, 1e-4 * high)), math.log(high)))
    return draw.uniform(low, high)


def _curve(draw: random.Random, name: str) -> Callable[[float], float]:
    """Return a curve over the elapsed share of the run: a level, a trend, a jump, or a jump back, with noise."""
    low, high = RANGES[name]
    before = _level(draw, name)
    after = before if draw.random() < 0.4 else _level(draw, name)
    kind = draw.choice(("trend", "jump", "bump"))
    turn = draw.random()
    noise = draw.choice((0.0, 0.0, 0.05, 0.2, 0.5))

    def curve(t: float) -> float:
        if kind == "trend":
            value = before + (after - before) * t
        elif kind == "jump":
            value = before if t < turn else after
        else:
            value = after if turn < t < turn + 0.2 else before
        return min(high, max(low, value * (1 + noise * draw.gauss(0, 1))))

    return curve


def random_rows(seed: int, lengths: Sequence[int] = LENGTHS) -> Rows:
    """Draw a log. Each quantity is in it with probability 0.6, the reward always.

    Args:
        seed: The seed of all draws.
        lengths: Numbers of log steps to choose from.
    """
    draw = random.Random(f"random log {seed}")
    count = draw.choice(list(lengths))
    names = [name for name in RANGES if name == "reward" or draw.random() < 0.6]
    curves = {name: _curve(draw, name) for name in names}
    every = draw.choice((1, 1, 5, 10))
    rows = []
    for number in range(1, count + 1):
        row: dict[str, float] = {"step": float(every * number if every > 1 else number)}
        for name, curve in curves.items():
            if name == "evaluation" and number % 4:
                continue
            row[name] = curve(number / count)
        rows.append(row)
    if draw.random() < 0.3:
        # One value far from its neighbours.
        name = draw.choice(names)
        low, high = RANGES[name]
        row = draw.choice(rows)
        if name in row:
            row[name] = min(high, max(low, row[name] * draw.choice((0.01, 30.0, 1000.0))))
    return rows


FRAMEWORK_KEYS: Mapping[str, Mapping[str, str]] = {
    "trl": {
        "reward": "reward",
        "reward_std": "reward_std",
        "cut": "completions/clipped_ratio",
        "dead": "frac_reward_zero_std",
        "entropy": "entropy",
        "kl": "kl",
        "length": "completions/mean_length",
        "length_max": "completions/max_length",
        "clip": "clip_ratio/region_mean",
        "mismatch": "sampling/sampling_logp_difference/mean",
        "importance_weight": "sampling/importance_sampling_ratio/mean",
        "grad_norm": "grad_norm",
        "learning_rate": "learning_rate",
        "evaluation": "eval/accuracy",
        "step_time": "step_time",
    },
    "verl": {
        "reward": "critic/score/mean",
        "cut": "response_length/clip_ratio",
        "entropy": "actor/entropy",
        "kl": "actor/kl_loss",
        "length": "response_length/mean",
        "length_max": "response_length/max",
        "clip": "actor/pg_clipfrac",
        "mismatch_kl": "rollout_corr/kl",
        "importance_weight": "rollout_corr/rollout_is_mean",
        "effective_samples": "rollout_corr/rollout_is_eff_sample_size",
        "reward_max": "critic/rewards/max",
        "reward_min": "critic/rewards/min",
        "advantage_max": "critic/advantages/max",
        "advantage_min": "critic/advantages/min",
        "grad_norm": "actor/grad_norm",
        "learning_rate": "actor/lr",
        "evaluation": "val-core/openai/gsm8k/acc/mean@1",
        "step_time": "perf/time_per_step",
    },
    "prime-rl": {
        "reward": "reward/mean",
        "dead": "1 - solved_some",
        "cut": "is_truncated/mean",
        "entropy": "entropy/all/mean",
        "clip": "is_masked/all/mean",
        "mismatch_kl": "mismatch_kl/all/mean",
        "staleness": "off_policy_level/mean",
        "length": "seq_len/mean",
        "grad_norm": "optim/grad_norm",
        "learning_rate": "optim/lr",
        "step_time": "time/step",
    },
    "skyrl": {
        "reward": "reward/avg_raw_reward",
        "entropy": "policy/policy_entropy",
        "kl": "policy/policy_kl",
        "length": "generate/avg_num_tokens",
        "length_max": "generate/max_num_tokens",
        "clip": "policy/ppo_clip_ratio",
        "mismatch": "policy/rollout_train_logprobs_abs_diff_mean",
        "staleness": "async/staleness_mean",
        "grad_norm": "policy/grad_norm",
        "learning_rate": "policy/policy_lr",
        "step_time": "timing/step",
    },
    "slime": {
        "reward": "rollout/raw_reward",
        "cut": "rollout/truncated_ratio",
        "entropy": "train/entropy_loss",
        "kl": "train/kl_loss",
        "length": "rollout/response_len/mean",
        "length_max": "rollout/response_len/max",
        "clip": "train/pg_clipfrac",
        "mismatch": "train/train_rollout_logprob_abs_diff",
        "importance_weight": "train/tis",
        "grad_norm": "train/grad_norm",
        "learning_rate": "train/lr-pg_0",
        "step_time": "perf/step_time",
    },
    "nemo-rl": {
        "reward": "train/reward",
        "dead": "1 - train/baseline_reward/pct_mixed / 100",
        "cut": "train/truncation_rate",
        "entropy": "train/approx_entropy",
        "kl": "train/kl_penalty",
        "length": "train/mean_gen_tokens_per_sample",
        "length_max": "train/max_gen_tokens_per_sample",
        "mismatch_kl": "train/gen_kl_error",
        "importance_weight": "train/sampling_importance_ratio",
        "grad_norm": "train/grad_norm",
        "learning_rate": "train/lr",
        "step_time": "timing/train/total_step_time",
    },
}
"""The keys of six frameworks, written from their own logs. A key may be a complement or a percentage."""


def canonical(rows: Sequence[Mapping[str, float]]) -> Rows:
    """Return rows in the names of any of these frameworks under rlvet's names of quantities.

    Components of the reward keep their names.
    """
    names = {}
    for keys in FRAMEWORK_KEYS.values():
        names |= {key: name for name, key in keys.items()}
    return [{names.get(key, key): value for key, value in row.items()} for row in rows]


def restricted(rows: Sequence[Mapping[str, float]], framework: str) -> Rows:
    """Return rows without the quantities that a framework does not log, or of which it logs placeholders alone."""
    keys = FRAMEWORK_KEYS[framework]
    placeholders = {row.key: float(row.placeholder) for row in rows_of(framework) if row.placeholder}
    missing = set()
    for name, key in keys.items():
        placeholder = next((placeholders[end] for end in endings(key) if end in placeholders), None)
        if placeholder is not None and all(row.get(name, placeholder) == placeholder for row in rows):
            missing.add(name)
    return [
        {
            name: value
            for name, value in row.items()
            if (name in keys and name not in missing) or name == "step"
        }
        for row in rows
    ]


def as_logged(rows: Sequence[Mapping[str, float]], framework: str) -> Rows:
    """Return rows under the keys of a framework, without the quantities that it does not log."""
    keys = FRAMEWORK_KEYS[framework]
    result = []
    for row in rows:
        logged: dict[str, float] = {"step": row["step"]}
        for name, value in row.items():
            if name not in keys:
                continue
            key = keys[name]
            if key.startswith("1 - "):
                key, value = key[4:], 1 - value
            if key.endswith(" / 100"):
                key, value = key[:-6], 100 * value
            logged[key] = value
        result.append(logged)
    return result


def shuffled(rows: Sequence[Mapping[str, float]], seed: int) -> Rows:
    """Return rows with the keys of each in another order."""
    draw = random.Random(seed)
    result = []
    for row in rows:
        items = list(row.items())
        draw.shuffle(items)
        result.append(dict(items))
    return result
