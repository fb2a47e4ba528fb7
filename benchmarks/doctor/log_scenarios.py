"""Simulated logs of healthy runs and of runs with a known fault.

The logs imitate the curves of training runs; nothing is trained. All parameters of the curves are drawn at random, so
that a new seed tests the thresholds on curves on which they were not chosen.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Rows = list[dict[str, float]]


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


SHAPES: Mapping[str, Callable[[float, random.Random], float]] = {
    "line": lambda t, draw: 0.15 + 0.5 * t,
    "saturates late": lambda t, draw: 0.2 + 0.5 * logistic(8 * (t - 0.45)),
    "saturates early": lambda t, draw: 0.2 + 0.45 * (1 - math.exp(-12 * t)),
    "starts late": lambda t, draw: 0.01 + 0.55 * logistic(14 * (t - 0.6)),
    "slow": lambda t, draw: 0.4 + 0.06 * t,
    "dips first": lambda t, draw: 0.45 - 0.22 * math.exp(-(((t - 0.25) / 0.1) ** 2)) + 0.25 * t,
    "falls and recovers": lambda t, draw: 0.5 - 0.3 * math.exp(-(((t - 0.6) / 0.12) ** 2)) + 0.1 * t,
    "staircase": lambda t, draw: 0.2 + 0.12 * int(4 * t),
}
"""The mean reward of healthy runs as a function of the elapsed share of the run, between 0 and 1."""


class Course:
    """The metrics of one healthy run as functions of its elapsed share. A fault replaces some of them.

    Args:
        seed: The seed of all random draws.
        shape: A key of `SHAPES`.
    """

    def __init__(self, seed: int, shape: str = "line"):
        self.draw = draw = random.Random(f"{seed} {shape}")
        self.steps = draw.choice((60, 120, 200, 400))
        self.scale, self.offset = draw.choice(
            ((1.0, 0.0), (1.0, 0.0), (2.0, -1.0), (5.0, 0.0), (10.0, -10.0))
        )
        self.noise = draw.uniform(0.01, 0.06)
        self.memory = draw.uniform(0.0, 0.5)
        entropy, decay = draw.uniform(0.3, 1.4), draw.uniform(0.1, 1.0)
        kl, drift = draw.uniform(0.02, 0.3), draw.uniform(0.6, 1.4)
        length, growth = draw.uniform(120, 1500), draw.uniform(-0.2, 0.6)
        gradient, calm = draw.uniform(0.05, 2.0), draw.uniform(0.0, 0.8)
        clip = draw.uniform(0.0005, 0.03)
        cut = draw.uniform(0.0, 0.04)
        rate = draw.choice((1e-6, 2e-6, 1e-5))
        group = draw.choice((8, 16))
        step_time = draw.uniform(10, 120)

        def pass_rate(t: float) -> float:
            return min(0.97, SHAPES[shape](t, draw))

        self.curves: dict[str, Callable[[float], float]] = {
            "reward": pass_rate,
            "frac_reward_zero_std": lambda t: pass_rate(t) ** group + (1 - pass_rate(t)) ** group,
            "entropy": lambda t: entropy * (0.35 + 0.65 * math.exp(-decay * t)),
            "kl": lambda t: kl * t**drift,
            "completions/mean_length": lambda t: length * (1 + growth * t),
            "completions/clipped_ratio": lambda t: cut,
            "grad_norm": lambda t: gradient * math.exp(-calm * t),
            "clip_ratio/region_mean": lambda t: clip,
            "learning_rate": lambda t: rate * min(1.0, 20 * t) * (1 - 0.9 * t),
            "step_time": lambda t: step_time,
        }
        self.noises = {"entropy": 0.04, "kl": 0.15, "completions/mean_length": 0.05, "grad_norm": 0.25}
        self.noises |= {"clip_ratio/region_mean": 0.3, "step_time": 0.1}
        # These are shares of a few dozen groups or answers, so their noise is additive.
        self.wobble = {"frac_reward_zero_std": 0.04, "completions/clipped_ratio": 0.01}

    def rows(self) -> Rows:
        """Draw the log."""
        draw = self.draw
        rows = []
        error = 0.0
        for step in range(1, self.steps + 1):
            t = step / self.steps
            row = {"step": float(step)}
            for name, curve in self.curves.items():
                value = curve(t)
                if name == "reward":
                    error = self.memory * error + self.noise * draw.gauss(0, 1)
                    value = self.offset + self.scale * (value + error)
                elif name in self.noises:
                    value *= math.exp(self.noises[name] * draw.gauss(0, 1))
                elif name in self.wobble:
                    value = min(1.0, max(0.0, value + self.wobble[name] * draw.gauss(0, 1)))
                row[name] = value
            spread = math.sqrt(max(0.0, self.curves["reward"](t) * (1 - self.curves["reward"](t))))
            row["reward_std"] = self.scale * spread * math.exp(0.05 * draw.gauss(0, 1))
            rows.append(row)
        return rows


def healthy(seed: int, shape: str, steps: int | None = None) -> Rows:
    """Draw the log of a healthy run, of a random length unless one is given."""
    course = Course(seed, shape)
    course.steps = steps or course.steps
    return course.rows()


def rough(seed: int, shape: str, steps: int | None = None) -> Rows:
    """Draw the log of a healthy run with strong noise, long answers, low final entropy and additional metrics."""
    course = Course(seed, shape)
    course.steps = steps or course.steps
    draw = random.Random(f"rough {seed} {shape}")
    course.noise = draw.uniform(0.03, 0.3)
    course.memory = draw.uniform(0.0, 0.8)
    course.noises |= {"grad_norm": draw.uniform(0.3, 1.0), "kl": draw.uniform(0.1, 0.5)}
    length, growth, kl = draw.uniform(100, 3000), draw.uniform(0.0, 2.5), draw.uniform(0.02, 0.7)
    cut, clip = draw.uniform(0.0, 0.18), draw.uniform(0.0, 0.12)
    entropy, final_share = draw.uniform(0.2, 1.2), draw.uniform(0.15, 1.1)
    course.curves["completions/mean_length"] = lambda t: length * (1 + growth * t)
    course.curves["kl"] = lambda t: kl * t**0.7
    course.curves["completions/clipped_ratio"] = lambda t: cut
    course.curves["clip_ratio/region_mean"] = lambda t: clip
    course.curves["entropy"] = lambda t: entropy * (final_share + (1 - final_share) * math.exp(-4 * t))
    pass_rate = course.curves["reward"]
    course.curves["frac_reward_zero_std"] = lambda t: min(0.45, pass_rate(t) ** 8 + (1 - pass_rate(t)) ** 8)
    course.wobble = {"frac_reward_zero_std": 0.15, "completions/clipped_ratio": 0.05}

    rows = course.rows()
    distance = draw.uniform(0.005, 0.04)
    every = max(3, len(rows) // draw.choice((8, 16)))
    for number, row in enumerate(rows):
        t = row["step"] / len(rows)
        row["sampling/sampling_logp_difference/mean"] = distance * math.exp(0.3 * draw.gauss(0, 1))
        row["sampling/importance_sampling_ratio/mean"] = 1 + 0.02 * draw.gauss(0, 1)
        row["rewards/right/mean"] = row["reward"]
        row["rewards/form/mean"] = min(1.0, 0.5 + 3 * t) + 0.02 * draw.gauss(0, 1)
        if number % every == 0:
            row["eval/accuracy"] = max(0.0, pass_rate(t) - 0.05) + 0.03 * draw.gauss(0, 1)
    return rows


VERL = {
    "reward": "critic/score/mean",
    "entropy": "actor/entropy",
    "kl": "actor/kl_loss",
    "completions/mean_length": "response_length/mean",
    "completions/clipped_ratio": "response_length/clip_ratio",
    "grad_norm": "actor/grad_norm",
    "clip_ratio/region_mean": "actor/pg_clipfrac",
    "learning_rate": "actor/lr",
    "step_time": "perf/time_per_step",
    "frac_reward_zero_std": None,
    "reward_std": None,
}
"""The names of the metrics in verl's log; None for a metric that verl does not log."""


def named_as_verl(rows: Rows) -> Rows:
    return [
        {VERL.get(name, name): value for name, value in row.items() if VERL.get(name, name) is not None}
        for row in rows
    ]


@dataclass(frozen=True)
class Scenario:
    """A simulated fault, and the codes that count as right."""

    right: Sequence[str]
    """Codes that name the cause."""
    rows: Callable[[int], Rows]
    """A function that returns the log for a seed."""
    half: Sequence[str] = ()
    """The codes that name an effect of the fault, or a part of it."""


def _course(seed: int, shape: str = "line", **curves: Callable[[float], float]) -> Course:
    course = Course(seed, shape)
    names = {"dead": "frac_reward_zero_std", "length": "completions/mean_length"}
    names |= {"cut": "completions/clipped_ratio", "clip": "clip_ratio/region_mean", "rate": "learning_rate"}
    for name, curve in curves.items():
        course.curves[names.get(name, name)] = curve
    return course


def _number(seed: int, name: str, low: float, high: float) -> float:
    return random.Random(f"{seed} {name}").uniform(low, high)


def reference(seed: int) -> Rows:
    """Simulate a LoRA run whose reference is the base model in place of its supervised adapter."""
    level = _number(seed, "reference", 0.3, 1.5)
    return _course(seed, kl=lambda t: level * (1 - 0.1 * t)).rows()


def hardly_moves(seed: int) -> Rows:
    reward, kl = _number(seed, "reward", 0.2, 0.6), _number(seed, "kl", 0.001, 0.005)
    course = _course(
        seed, reward=lambda t: reward, kl=lambda t: kl * t, entropy=lambda t: 1.0, rate=lambda t: 2e-7
    )
    course.steps = max(200, course.steps)
    return course.rows()


def curriculum(seed: int) -> Rows:
    """Simulate a run whose prompts become harder at one step."""
    at = _number(seed, "switch", 0.35, 0.7)
    course = _course(seed)
    course.steps = max(120, course.steps)
    reward, length = course.curves["reward"], course.curves["completions/mean_length"]
    course.curves["reward"] = lambda t: reward(t) - (0.3 if t > at else 0.0) + 0.1
    course.curves["completions/mean_length"] = lambda t: length(t) * (1.7 if t > at else 1.0)
    return course.rows()


def judge_at_zero(seed: int) -> Rows:
    course = _course(seed)
    level = _number(seed, "judge", 0.3, 0.6)
    draw = random.Random(f"{seed} judges")
    rows = course.rows()
    for row in rows:
        row["rewards/judge/mean"] = level + 0.03 * draw.gauss(0, 1)
        row["rewards/other_judge/mean"] = 0.0
    return rows


def format_pays(seed: int) -> Rows:
    """Simulate a run in which most of the reward is for the format, which nearly all answers soon have."""
    draw = random.Random(f"{seed} format")
    rows = _course(seed, "saturates early").rows()
    for row in rows:
        t = row["step"] / len(rows)
        form = 0.3 + 0.68 * (1 - math.exp(-25 * t)) + 0.01 * draw.gauss(0, 1)
        right = 0.03 + 0.02 * t + 0.01 * draw.gauss(0, 1)
        row["rewards/form/mean"], row["rewards/right/mean"] = form, right
        row["reward"] = 0.5 * form + right
    return rows


def spikes(seed: int, fall: bool) -> Rows:
    course = _course(seed)
    course.steps = max(120, course.steps)
    if fall:
        reward = course.curves["reward"]
        course.curves["reward"] = lambda t: reward(t) if t < 0.75 else 0.02
    rows = course.rows()
    draw = random.Random(f"{seed} spikes")
    for at in draw.sample(range(len(rows) // 4, 3 * len(rows) // 4), 6):
        rows[at]["grad_norm"] *= draw.uniform(40, 200)
    return rows


def entropy_rises(seed: int) -> Rows:
    end = _number(seed, "end", 2.5, 6.0)
    return _course(
        seed, "saturates early", entropy=lambda t: 0.5 + (end - 0.5) * max(0.0, t - 0.2) ** 1.5
    ).rows()


def clips_much(seed: int) -> Rows:
    end = _number(seed, "end", 0.35, 0.6)
    return _course(seed, "saturates early", clip=lambda t: 0.1 + (end - 0.1) * min(1.0, 2 * t)).rows()


def diverges(seed: int) -> Rows:
    """Simulate a run whose KL to the reference diverges while its other metrics look healthy."""
    end = 10 ** _number(seed, "end", 4, 8)
    return _course(seed, "saturates early", kl=lambda t: 0.02 + end * max(0.0, t - 0.5) ** 4).rows()


def kl_drifts(seed: int) -> Rows:
    end = _number(seed, "end", 2.5, 8.0)
    return _course(seed, "saturates early", kl=lambda t: 0.02 + end * t**2.4).rows()


def too_fast(seed: int) -> Rows:
    top, reward = _number(seed, "top", 2.0, 6.0), _number(seed, "reward", 0.05, 0.2)
    course = _course(
        seed,
        kl=lambda t: top,
        rate=lambda t: 5e-4,
        reward=lambda t: reward,
        entropy=lambda t: 0.9 if t < 0.2 else 0.003,
        cut=lambda t: 0.95 if t > 0.1 else 0.2,
    )
    rows = course.rows()
    for number, row in enumerate(rows[:6]):
        row["kl"] = top * number / 6
        row["grad_norm"] = 10.0
    return rows


def cut_at_last(seed: int) -> Rows:
    """Simulate truncation in the last tenth of a run alone, which a mean over its second half hides."""
    top = _number(seed, "top", 0.5, 0.9)
    return _course(seed, "saturates early", cut=lambda t: 0.02 if t < 0.9 else top).rows()


def cut_more_and_more(seed: int) -> Rows:
    top = _number(seed, "top", 0.4, 0.7)
    course = _course(seed, cut=lambda t: 0.005 + top * t**2)
    length = course.curves["completions/mean_length"]
    course.curves["completions/mean_length"] = lambda t: length(t) * (1 + 2 * t)
    return course.rows()


def cut_from_the_start(seed: int) -> Rows:
    level = _number(seed, "level", 0.75, 1.0)
    return _course(seed, "slow", cut=lambda t: level).rows()


def _with_evaluation(rows: Rows, score: Callable[[float], float], seed: int) -> Rows:
    draw = random.Random(f"{seed} evaluation")
    every = max(3, len(rows) // 16)
    for row in rows[::every]:
        row["eval/accuracy"] = score(row["step"] / len(rows)) + 0.012 * draw.gauss(0, 1)
    return rows


def hacked(seed: int) -> Rows:
    lost = _number(seed, "lost", 0.12, 0.25)
    course = _course(seed, "saturates late")
    return _with_evaluation(
        course.rows(), lambda t: 0.2 + 0.22 * min(1.0, 3 * t) - lost * max(0.0, t - 0.33) / 0.67, seed
    )


def length_pays(seed: int) -> Rows:
    times = _number(seed, "times", 2.2, 4.0)
    course = _course(seed, "saturates late", length=lambda t: 400 * (1 + (times - 1) * t**1.4))
    return _with_evaluation(course.rows(), lambda t: 0.21 + 0.02 * t, seed)


def mismatch(seed: int) -> Rows:
    """Simulate an engine that deviates from the trainer in the second half of a run, and a falling reward."""
    draw = random.Random(f"{seed} mismatch")
    course = _course(seed)
    reward = course.curves["reward"]
    course.curves["reward"] = lambda t: reward(t) if t < 0.7 else reward(0.7) * math.exp(-8 * (t - 0.7))
    rows = course.rows()
    for row in rows:
        t = row["step"] / len(rows)
        row["sampling/sampling_logp_difference/mean"] = (0.015 + 0.5 * max(0.0, t - 0.5)) * math.exp(
            0.1 * draw.gauss(0, 1)
        )
    return rows


def too_hard(seed: int) -> Rows:
    rate = _number(seed, "rate", 0.01, 0.04)
    return _course(seed, reward=lambda t: rate, dead=lambda t: (1 - rate) ** 8 + 0.0).rows()


def solved(seed: int) -> Rows:
    course = _course(seed, reward=lambda t: 0.3 + 0.67 * (1 - math.exp(-8 * t)))
    rate = course.curves["reward"]
    course.curves["frac_reward_zero_std"] = lambda t: rate(t) ** 8
    course.scale, course.offset, course.noise = 1.0, 0.0, 0.015
    return course.rows()


def no_numbers(seed: int) -> Rows:
    rows = _course(seed).rows()
    first = int(_number(seed, "first", 0.4, 0.8) * len(rows))
    for row in rows[first:]:
        row["grad_norm"] = math.nan
    return rows


def no_rate(seed: int) -> Rows:
    return _course(seed, reward=lambda t: 0.3, rate=lambda t: 0.0, kl=lambda t: 0.0).rows()


def entropy_collapses(seed: int) -> Rows:
    speed = _number(seed, "speed", 5.0, 9.0)
    return _course(
        seed,
        reward=lambda t: 0.2 + 0.25 * logistic(14 * (t - 0.2)),
        entropy=lambda t: 0.62 * math.exp(-speed * t) + 0.005,
    ).rows()


def constant_reward(seed: int) -> Rows:
    value = random.Random(f"{seed} value").choice((0.0, 0.0, -5.0, 0.1))
    rows = _course(seed, dead=lambda t: 1.0).rows()
    for row in rows:
        row["reward"], row["reward_std"] = value, 0.0
    return rows


def falls(seed: int) -> Rows:
    at = _number(seed, "at", 0.5, 0.75)
    course = _course(seed)
    reward = course.curves["reward"]
    course.curves["reward"] = lambda t: reward(t) if t < at else 0.05
    return course.rows()


def levels_off(seed: int) -> Rows:
    """Simulate a healthy run whose reward reaches a plateau."""
    return _course(seed, reward=lambda t: 0.18 + 0.37 * logistic(25 * (t - 0.12))).rows()


def never_synced(seed: int) -> Rows:
    """Simulate an engine that keeps its first weights: its distance grows with the learning rate that was spent.

    The level, exponent and noise vary. verl-project/verl issue 7495 reports a KL that grew 36-fold below its limit.
    """
    draw = random.Random(f"{seed} never synced")
    course = _course(seed, "slow")
    course.steps = max(60, course.steps)
    rows = course.rows()
    total = sum(row["learning_rate"] for row in rows)
    start, factor, power = 10 ** draw.uniform(-4, -3), 10 ** draw.uniform(1.2, 2.2), draw.uniform(1.0, 2.0)
    spent = 0.0
    for row in rows:
        spent += row["learning_rate"] / total
        growth = start * (1 + (factor - 1) * spent**power)
        row["rollout_corr/kl"] = growth * math.exp(0.15 * draw.gauss(0, 1))
        row["rollout_corr/rollout_is_eff_sample_size"] = 1 / (1 + 20 * growth)
    return named_as_verl(rows)


def never_synced_adapter(seed: int) -> Rows:
    """Simulate adapters that never reach the engine, as in radixark/miles 684 and 1727."""
    draw = random.Random(f"{seed} adapter")
    course = _course(seed, "slow")
    rows = course.rows()
    start, growth = draw.uniform(0.006, 0.02), draw.uniform(0.1, 0.6)
    for row in rows:
        t = row["step"] / len(rows)
        distance = (start + growth * t) * math.exp(0.1 * draw.gauss(0, 1))
        row["sampling/sampling_logp_difference/mean"] = distance
    return rows


def one_answer(seed: int) -> Rows:
    """Simulate GRPO with one answer to each prompt, in verl's names: advantages are the rewards."""
    draw = random.Random(f"{seed} one answer")
    rows = named_as_verl(_course(seed, "slow").rows())
    for row in rows:
        largest = row["critic/score/mean"] + draw.uniform(0.1, 0.5)
        smallest = row["critic/score/mean"] - draw.uniform(0.1, 0.5)
        row |= {"critic/rewards/max": largest, "critic/rewards/min": smallest}
        row |= {"critic/advantages/max": largest / (1 + 1e-6), "critic/advantages/min": smallest / (1 + 1e-6)}
    return rows


def weights_of_sequences(seed: int) -> Rows:
    """Simulate truncated weights of sequences whose tokens agree (huggingface/trl issues 4772 and 5814)."""
    draw = random.Random(f"{seed} weights")
    mean = draw.choice((draw.uniform(0.35, 0.7), draw.uniform(1.5, 2.9)))
    distance = draw.uniform(0.008, 0.02)
    rows = _course(seed).rows()
    for row in rows:
        row["sampling/sampling_logp_difference/mean"] = distance * math.exp(0.1 * draw.gauss(0, 1))
        row["sampling/importance_sampling_ratio/mean"] = mean * math.exp(0.1 * draw.gauss(0, 1))
    return rows


def answers_collapse(seed: int) -> Rows:
    """Simulate answers that shrink to a few tokens in twenty steps, after which groups have no signal."""
    level = _number(seed, "level", 0.1, 0.3)
    length = _number(seed, "length", 50, 600)
    return _course(
        seed,
        reward=lambda t: level,
        length=lambda t: 2.5 + length * math.exp(-30 * t),
        dead=lambda t: 0.9 if t > 0.25 else 0.2,
    ).rows()


def dies_late(seed: int) -> Rows:
    """Simulate a run that dies in one step after 300 or more good ones: no answer is right, and all are cut off."""
    draw = random.Random(f"{seed} dies late")
    course = _course(seed)
    course.steps = draw.choice((300, 500, 800))
    rows = course.rows()
    for row in rows[-draw.randint(6, 14) :]:
        row |= {"reward": course.offset, "reward_std": 0.0, "frac_reward_zero_std": 1.0}
        row |= {"completions/clipped_ratio": 1.0, "kl": 6 + draw.random()}
    return rows


def grader_fails(seed: int) -> Rows:
    """Simulate a run whose reward is no longer logged, since its grader fails."""
    rows = _course(seed).rows()
    first = int(_number(seed, "first", 0.3, 0.8) * len(rows))
    for row in rows[first:]:
        del row["reward"]
    return rows


def _with_critic(
    rows: Rows, seed: int, explained: Callable[[float], float], growth: Callable[[float], float]
) -> Rows:
    """Add the metrics of a critic in verl's names: its explained variance, its loss and its gradient norm."""
    draw = random.Random(f"{seed} critic")
    rows = named_as_verl(rows)
    loss, gradient = draw.uniform(0.02, 0.5), draw.uniform(0.5, 8.0)
    for row in rows:
        t = row["step"] / len(rows)
        start = 1 + 6 * math.exp(-30 * t)
        row["critic/vf_explained_var"] = explained(t) + 0.08 * draw.gauss(0, 1)
        row["critic/vf_loss"] = loss * start * growth(t) * math.exp(0.3 * draw.gauss(0, 1))
        row["critic/grad_norm"] = gradient * start * growth(t) * math.exp(0.4 * draw.gauss(0, 1))
    return rows


def critic_learns(seed: int) -> Rows:
    """Simulate PPO with a critic that begins with nothing, and explains the returns better and better."""
    top = _number(seed, "top", 0.3, 0.9)
    return _with_critic(
        _course(seed, "slow").rows(), seed, lambda t: top - (top + 1) * math.exp(-20 * t), lambda t: 1
    )


def critic_explains_nothing(seed: int) -> Rows:
    level = _number(seed, "level", -0.4, -0.05)
    return _with_critic(_course(seed, "slow").rows(), seed, lambda t: level, lambda t: 1)


def critic_diverges(seed: int) -> Rows:
    """Simulate a critic whose loss and gradient grow a hundredfold from a step on."""
    at = _number(seed, "at", 0.4, 0.7)
    factor = _number(seed, "factor", 60, 400)
    return _with_critic(
        _course(seed, "slow").rows(),
        seed,
        lambda t: 0.6 if t < at else 0.6 - 6 * (t - at) / (1 - at),
        lambda t: 1 if t < at else factor ** min(1, 2 * (t - at) / (1 - at)),
    )


SCENARIOS: Mapping[str, Scenario] = {
    "reference is not the start": Scenario(("reference-kl",), reference, ("kl-drift",)),
    "policy hardly moves": Scenario(("hardly-moves",), hardly_moves, ("plateau",)),
    "harder prompts from one step on": Scenario(("data-change",), curriculum, ("late-change", "collapse")),
    "a judge at 0 beside another": Scenario(("component-constant",), judge_at_zero),
    "form is most of the reward": Scenario(("component-dominates",), format_pays, ("plateau",)),
    "gradient spikes": Scenario(("gradient-spikes",), lambda seed: spikes(seed, fall=False)),
    "gradient spikes, then a fall": Scenario(
        ("gradient-spikes",), lambda seed: spikes(seed, fall=True), ("collapse",)
    ),
    "entropy rises without end": Scenario(("entropy-rise",), entropy_rises, ("plateau", "step-too-large")),
    "clip fraction of 0.4": Scenario(("clip-heavy",), clips_much, ("plateau",)),
    "KL leaves all bounds": Scenario(("kl-drift",), diverges, ("plateau", "late-change")),
    "KL drifts to several nats": Scenario(("kl-drift",), kl_drifts, ("plateau",)),
    "learning rate 5e-4": Scenario(
        ("step-too-large",), too_fast, ("truncated", "entropy-collapse", "kl-drift")
    ),
    "cut off in the last tenth": Scenario(("truncated", "late-change"), cut_at_last, ("plateau",)),
    "cut off more and more": Scenario(("truncated",), cut_more_and_more, ("length-growth",)),
    "cut off from the start": Scenario(("truncated",), cut_from_the_start),
    "evaluation falls as reward rises": Scenario(("reward-hacked",), hacked),
    "length pays, evaluation does not": Scenario(("length-growth", "reward-hacked"), length_pays),
    "engine departs, reward falls": Scenario(("engine-mismatch",), mismatch, ("collapse",)),
    "prompts too hard": Scenario(("no-signal",), too_hard, ("plateau",)),
    "prompts solved": Scenario(("no-signal",), solved, ("plateau",)),
    "values are NaN": Scenario(("nan",), no_numbers),
    "learning rate 0": Scenario(("no-step",), no_rate, ("plateau", "hardly-moves")),
    "entropy collapses": Scenario(("entropy-collapse",), entropy_collapses, ("plateau",)),
    "every reward is the same": Scenario(("reward-flat", "no-signal"), constant_reward, ("plateau",)),
    "reward falls": Scenario(("collapse",), falls, ("data-change",)),
    "critic explains nothing": Scenario(("critic-no-fit",), critic_explains_nothing, ("plateau",)),
    "critic diverges": Scenario(("critic-diverges",), critic_diverges, ("plateau",)),
    "dies late": Scenario(("run-died",), dies_late, ("late-change", "truncated")),
    "grader fails": Scenario(("run-died", "metric-lost"), grader_fails),
    "levels off": Scenario(("plateau",), levels_off),
    "weights never synced": Scenario(("weight-sync",), never_synced, ("engine-mismatch",)),
    "adapters never synced": Scenario(("weight-sync",), never_synced_adapter, ("engine-mismatch",)),
    "one answer to each prompt": Scenario(("no-baseline",), one_answer, ("plateau",)),
    "truncated weights of sequences": Scenario(("sequence-weights",), weights_of_sequences),
    "answers collapse": Scenario(("length-collapse",), answers_collapse, ("no-signal", "plateau")),
}
