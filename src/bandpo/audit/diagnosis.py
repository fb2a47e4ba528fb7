"""What is wrong with a run, causes first: its record's invariants, then the course of its log. `bandpo diagnose`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from bandpo._shown import as_html
from bandpo.audit.configs import setup_of
from bandpo.audit.dumps import dump_files, read_dumps
from bandpo.audit.invariants import EXACT, MOST, SURE, Coverage, Finding, Looks, tested_invariants, untested
from bandpo.audit.logs import Row, read_log, summarize
from bandpo.audit.record import read_calls
from bandpo.audit.recorder import record_files
from bandpo.audit.replay import replay_record
from bandpo.audit.settings import Setup
from bandpo.errors import InvalidValue
from bandpo.text import as_method

ENTROPY_LEFT = 0.25
"""Share of its start below which entropy has collapsed, unless the reward rose."""
ENTROPY_RISE = 2.0
"""Times its start, and at least a nat more, from which entropy drifts away."""
TOO_FAR = 2.5
"""Mean abs log-ratio (nats) at the last look at a batch: tokens twelve
times as likely or unlikely as when they were drawn, an effective sample of next to none."""
RARE = 0.1
"""Share of tokens clipped up to which the clip is no cause of a plateau."""
KEPT = "entropy is kept, or falls as the reward rises"
STARVED = 0.11
"""Share of the gradient on rare winners up to which blocking it changed nothing in networks at the same rate."""
FEW = 8
"""Log steps below which groups are not judged: where half of them have no signal and a step has one, the four of the
later half have none by chance once in 16."""
LONG = 30
"""Log steps below which no plateau is looked for."""
FLAT = 0.5
"""Share of a run that is flat, from which it is a plateau."""
SOLVED = 0.95
"""Mean of rewards between 0 and 1 from which their prompts are as good as solved."""
STILL = {r"(^|/)(learning_rate|lr|policy_lr)$": 1e-9, r"(^|/)grad_norm$": 0.0}
"""By its name's end, up to what weights stand still: Adam moves them by the rate, and float32 rounds 0.02 + 1e-9."""
FELL_WITH = r"(^|/)(kl|ppo_kl|kl_loss|grad_norm|mean_length|\w*length/mean|clip(ped)?_ratio)$"
"""Ends of names of what is compared before and after a fall of the reward."""


@dataclass(frozen=True)
class Diagnosis:
    """What was found, worst first, and what passed.

    >>> Diagnosis([Finding("nan", False, "numbers", cause="3 of 64 sequences hold NaN")]).headline
    'nan: 3 of 64 sequences hold NaN'
    """

    tested: Sequence[Finding]
    setup: Setup = field(default_factory=Setup)
    """Whose settings the advice names."""
    rows: Sequence[Row] = ()
    """The course that was looked at: the log's rows, or a record's by batch."""
    coverage: Coverage | None = None
    """How much of a record was looked at; None of a log, which is read as a whole and holds no tokens."""

    @property
    def findings(self) -> list[Finding]:
        """What is wrong, causes first; then what is no fault but worth a word."""
        found = [f for ok in (False, None) for f in self.tested if f.ok is ok and f.cause]
        return [f._replace(advice=self.setup.filled(f.advice)) for f in found]

    @property
    def passed(self) -> list[str]:
        return [f.tested for f in self.tested if f.ok]

    @property
    def untested(self) -> dict[str, str]:
        """What the run does not tell, and what would."""
        return {f.tested: f.advice for f in self.tested if f.ok is None and not f.cause}

    @property
    def healthy(self) -> bool:
        return all(f.ok is not False for f in self.tested)

    @property
    def headline(self) -> str:
        """One line."""
        if not self.findings:
            part = "" if self.coverage is None else self.coverage.part
            where = f" of {part}" if part else ""
            return f"ok: nothing is wrong in what could be tested{where} ({len(self.passed)} tests)"
        first = self.findings[0]
        return f"{' or '.join((first.code, *first.or_else))}: {first.cause}"

    def _repr_html_(self) -> str:
        said = self.headline if self.coverage is None else f"{self.headline}; {self.coverage}"
        return as_html(said, ["", "do"], ((f.cause, f.advice) for f in self.findings))

    def as_json(self) -> dict[str, Any]:
        """With the codes that docs/diagnose.md lists."""
        findings = [f._asdict() for f in self.findings]
        return {
            "headline": self.headline,
            "coverage": None if self.coverage is None else self.coverage.as_json(),
            "findings": findings,
            "passed": self.passed,
        }


def diagnose(path: str | Path, *, method: Any = None) -> Diagnosis:
    """What is wrong with the run that wrote a record or a log.

    Args:
        path: A record, or whatever `bandpo.audit.logs.read_log` reads.
        method: The run's own, where neither tells it.

    Raises:
        ValueError: it cannot be read.
    """
    path, given = Path(path), as_method(method) if method else None
    dumps = [] if record_files(path) else dump_files(path)
    if not (dumps or record_files(path)):
        rows = read_log(path)
        setup = setup_of(path, rows, given)
        return Diagnosis(course(rows, setup.updates), setup, rows)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*values that cannot be right")  # which are a finding here
        calls = read_dumps(dumps) if dumps else read_calls(path, given)
        first = next(calls, None)
        if first is None:
            raise InvalidValue(f"{path} holds no tokens: nothing was added before it was closed or killed")
        looks, setup = Looks.of(chain([first], calls)), Setup.of_record(first)
        found = tested_invariants(looks)
        by_batch = looks.course()
        if any(f.ok is False for f in found):
            return Diagnosis(found, setup, by_batch, looks.coverage)
        rows = replay_record(path, method=given).rows if looks.moved else []
    clip = [{name: x for name, x in row.items() if name != "entropy"} for row in rows]
    return Diagnosis([*found, *course([*clip, *by_batch])], setup, by_batch, looks.coverage)


def course(rows: Sequence[Row], updates: float | None = None) -> list[Finding]:
    """What the metrics of a run tell.

    Args:
        rows: Step by step, as `bandpo.audit.logs.read_log` gives them.
        updates: Optimiser steps on each batch, if they are known.
    """
    plateau, turn = _plateau(rows)
    found = [
        _numbers(rows),
        _moves(rows),
        _step(rows),
        _share(rows, "cut", "truncated", "answers are finished", "of answers are cut off"),
        _share(rows, "dead", "no-signal", "groups carry signal", "of groups carry no signal", FEW),
        _entropy(rows, turn),
    ]
    if (plateau.code, plateau.ok) == ("plateau", None):  # then dead groups and a sure policy are right
        found = [f for f in found if f.code not in ("no-signal", "entropy-collapse")]
    causes = [f.cause for f in found if f.ok is False]
    if plateau.ok is False:
        clip = _clip(rows, updates)
        why = causes or ["nothing that is logged explains it"] * (plateau.code == "plateau")
        if clip.figure:
            is_it = "is not" if clip.figure < RARE else "may be"
            why = [*why, f"the clip drops {clip.figure:.1%} and {is_it} the cause"]
        elif clip.code == "on-policy" and not clip.or_else:
            why = [*why, clip.cause]
        cause = ": ".join(filter(None, [plateau.cause, "; ".join(why)]))
        return [plateau._replace(cause=cause), *found]
    return [*found, plateau] if causes else [*found, plateau, _clip(rows, updates)]


def _series(rows: Sequence[Row], name: str) -> Any:
    """Steps and values of a quantity, shape (2, rows that have it)."""
    told = [(row["step"], row[name]) for row in rows if name in row]
    return np.array(told).reshape(-1, 2).T


def _names(rows: Sequence[Row], pattern: str) -> list[str]:
    """What is logged under such a name."""
    return [name for name in dict.fromkeys(chain.from_iterable(rows)) if re.search(pattern, name)]


def _ends(values: Any, part: int) -> tuple[float, float]:
    """Means of the first and of the last part, say tenth."""
    n = max(1, len(values) // part)
    return float(values[:n].mean()), float(values[-n:].mean())


def _numbers(rows: Sequence[Row]) -> Finding:
    lost = [int(row["step"]) for row in rows if row.get("not_finite")]
    seen = Finding("ok", True, "the log holds numbers", len(lost) / len(rows), None, len(rows))
    cause = f"{len(lost)} of {len(rows)} log steps hold NaN or infinite values"
    return seen.named("nan", f"{cause}, first step {min(lost)}") if lost else seen


def _moves(rows: Sequence[Row]) -> Finding:
    seen = untested("weights move")
    for end, least in STILL.items():
        logged = [(float(x), name) for name in _names(rows, end) for x in _series(rows, name)[1]]
        if len(logged) >= FEW:  # a warm-up begins at 0
            most, name = max(logged)
            seen = Finding("ok", True, seen.tested, most, None, len(logged))
            if most <= least:
                return seen.named("no-step", f"{name} never exceeds {most:g}")
    return seen


def _step(rows: Sequence[Row]) -> Finding:
    tested, (_, moved) = "steps stay near the policy that sampled", _series(rows, "moved")
    if not len(moved):
        return untested(tested, "record the tokens")
    seen = Finding("ok", True, tested, float(moved.max()), None, len(moved))
    cause = f"by the last update on a batch its tokens had moved by {moved.max():.2g} nats on average"
    return seen.named("step-too-large", cause) if moved.max() > TOO_FAR else seen


def _share(rows: Sequence[Row], name: str, code: str, tested: str, said: str, least: int = 1) -> Finding:
    """A share that should not be most of the later half of a run, of so many log steps at least."""
    _, shares = _series(rows, name)
    if len(shares) < least:
        return untested(tested, f"{least} log steps and more" if len(shares) else "")
    late = shares[len(shares) // 2 :]
    mean, error = float(late.mean()), float(late.std() / len(late) ** 0.5)
    seen = Finding("ok", True, tested, mean, error, len(late))
    return seen.named(code, f"{mean:.0%} {said}") if mean - 2 * error > MOST else seen


def _entropy(rows: Sequence[Row], turn: float) -> Finding:
    """Whether entropy is lost, or drifts away. A policy that becomes sure of what is rewarded loses it too, rightly.

    Only the reward after it has turned flat, at the step ``turn``, counts.
    """
    (_, entropy), (steps, reward) = _series(rows, "entropy"), _series(rows, "reward")
    if len(entropy) < 2:
        return untested(KEPT, "log the entropy")
    (first, last), reward = _ends(entropy, 10), reward[steps >= turn]
    answer, because, rose = f"entropy {first:.3g} → {last:.3g} nats per token", "no reward is known", False
    if len(reward) > 1:
        # Neighbouring steps differ by the noise of two; a third of the steps is averaged at either end.
        error = float(np.diff(reward).std()) / max(1, len(reward) // 3) ** 0.5
        before, now = _ends(reward, 3)
        answer += f", while the reward went {before:.3g} → {now:.3g}"
        because, rose = "the reward did not rise", now - before > max(0.1 * abs(before), 2 * error)
    seen = Finding("ok", True, KEPT, last / first if first else 1.0, None, len(entropy))
    if last > max(ENTROPY_RISE * first, first + 1):
        return seen.named("step-too-large", f"{answer}: it drifts towards noise")
    if last >= ENTROPY_LEFT * first or rose:
        return seen
    return seen.named("entropy-collapse", f"{answer}: the policy has stopped exploring, and {because}")


def change_point(values: Any) -> tuple[int, float, float]:
    """Where a curve that rises in a line turns flat: the row, the rise until there, and the noise around the two lines.

    >>> change_point(np.minimum(np.arange(40.0), 10.0))[0]
    10
    """
    t, best = np.arange(len(values), dtype=float), (0, 0.0, float(values.std()))
    for turn in range(len(values) // 20 or 1, len(values)):
        line = np.minimum(t, turn) / turn
        around = line - line.mean()
        slope = around @ values / (around @ around)
        noise = float((values - slope * around).std())
        if noise < best[2]:
            best = turn, float(slope), noise
    return best


def _plateau(rows: Sequence[Row]) -> tuple[Finding, float]:
    """Whether the reward is flat, and the step since which; minus infinity if it is not."""
    tested, (steps, reward) = "the reward still rises", _series(rows, "reward")
    n = len(reward)
    if n < LONG:
        return untested(tested, f"{LONG} log steps and more"), -np.inf
    turn, rise, noise = change_point(reward)
    turn = 0 if rise < SURE * noise / max(turn, 1) ** 0.5 else turn  # no rise that is more than noise
    late = reward[turn:]
    seen = Finding("ok", True, tested, float(late.mean()), noise, n)
    if fell := _fall(rows, steps, reward):
        return seen.named("collapse", fell[0]), fell[1]
    if len(late) < FLAT * n or _rises(late):
        return seen, -np.inf
    since = f"since step {steps[turn]:.0f}" if turn else "from the start"
    cause, ok = f"reward {late.mean():.3g}, flat {since}", False
    if late.mean() >= SOLVED and reward.min() >= 0 and reward.max() <= 1:
        cause, ok = f"{cause}: if 1 is the most that it gives, these prompts are solved", None
    return seen.named("plateau", cause, ok=ok), float(steps[turn])


def _fall(rows: Sequence[Row], steps: Any, reward: Any) -> tuple[str, float] | None:
    """If the last tenth of a run has lost half of its best tenth's reward: what happened, and the step of the best.

    What else has doubled or halved by then is named; a log does not tell whether it is the cause.
    """
    means = _tenths(reward)
    best, noise = int(means.argmax()), float(np.diff(reward).std()) / (len(reward) / 10) ** 0.5
    if means[best] - means[-1] <= max((means[best] - min(0.0, reward.min())) / 2, SURE * noise):
        return None
    told = {name: _series(rows, name)[1] for name in _names(rows, FELL_WITH)}
    ends = {name: _tenths(x)[[best, -1]] for name, x in told.items() if len(x) == len(reward)}
    times = {name: (abs(pair).max() + 0.01) / (abs(pair).min() + 0.01) for name, pair in ends.items()}
    most = [name for name in sorted(times, key=times.__getitem__, reverse=True) if times[name] > 2][:3]
    course = {"reward": means[[best, -1]]} | {name: ends[name] for name in most}
    step = float(np.array_split(steps, 10)[best][-1])
    said = ", ".join(f"{name} {before:.3g} → {now:.3g}" for name, (before, now) in course.items())
    return f"from step {step:.0f} on {said}", step


def _tenths(values: Any) -> Any:
    """Means of ten blocks."""
    return np.array([block.mean() for block in np.array_split(values, 10)])


def _rises(values: Any) -> bool:
    """By two standard errors of a line's slope; through blocks, as neighbours are alike."""
    (slope, _), covariance = np.polyfit(np.arange(10), _tenths(values), 1, cov=True)
    return bool(slope > 2 * covariance[0, 0] ** 0.5 + EXACT * abs(values).max())  # more than rounding


def _clip(rows: Sequence[Row], updates: float | None) -> Finding:
    """What the clip does; never a fault."""
    d = summarize(rows)
    on_policy, interval = d.metrics.get("on_policy"), d.blocked_interval()
    once = on_policy == 1 or (updates is not None and updates <= 1 and not d.clipped)
    if d.clipped is None and not once:
        return untested("the clip")
    seen = Finding("ok", True, "the clip", d.clipped, None, int(d.metrics.get("tokens", 0)))
    if once:
        return seen.named("on-policy", "each batch gets one update, so every ratio is 1", ok=None)
    if d.clipped == 0 and updates is None and on_policy is None:
        cause = "no token was clipped, as with one update on each batch"
        return seen.named("on-policy", cause, "clip-idle", ok=None)
    if d.clipped == 0 and d.metrics.get("inert", 1) == 1:
        cause = "no token was clipped: steps are smaller than the rule allows"
        return seen.named("clip-idle", cause, ok=None)
    if interval and interval[0] > STARVED:
        share = f"{d.metrics['blocked_mass_below_0.1']:.0%} [{interval[0]:.0%}, {interval[1]:.0%}]"
        cause = f"it blocks {share} of the gradient that would raise tokens below p = 0.1"
        return seen.named("rare-tokens-blocked", cause, ok=None)
    return seen
