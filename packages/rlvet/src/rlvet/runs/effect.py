"""What rules drop of the gradient on a run's rare winners, in sentences, from the metrics of `bandpo.audit`.

This module needs only the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rlvet._numbers import format_number
from rlvet.runs.metric_names import COUNTERFACTUALS

RUN = "the run"
"""The name of a run's own rule."""
FEWEST_RARE_WINNERS = 30
"""The smallest number of rare winners, or of other tokens, of which shares are said. A test compares it with that of
bandpo."""
LITTLE = 0.05
"""Share of the gradient on rare winners below which what a rule drops is little."""
MUCH = 0.25
"""Share of the gradient on rare winners from which what a rule drops is much."""
STRICT = "clip 0.2"
"""The strictest of the rules that are compared by default."""
NOTHING = 0.01
"""Share of the gradient on rare winners, and of tokens, below which a rule drops nothing that could matter."""


class Effect(NamedTuple):
    """What rules drop of the gradient on the rare winners of a run, the counted tokens with p < 0.1 and A > 0."""

    tokens: int
    """The number of rare winners; a token counts once for each update that uses it."""
    dropped: Mapping[str, float]
    """The share of the gradient that each rule drops, the run's own first if it is known."""
    of_winners: float | None = None
    """The share of rare winners in the gradient on all tokens with A > 0; None if it is not known."""
    of_dropped: Mapping[str, float] = {}
    """The share of rare winners in what each rule drops of the gradient on all tokens with A > 0, where it is known."""

    @classmethod
    def from_replay(cls, metrics: Mapping[str, Mapping[str, float]]) -> Effect:
        """Return the effect on recorded tokens.

        Args:
            metrics: The metrics of each method, from `bandpo.replay.record.Replay.metrics`.
        """
        return cls._of(next(iter(metrics.values()), {}), metrics)

    @classmethod
    def from_log(cls, metrics: Mapping[str, float]) -> Effect:
        """Return the effect on the tokens of a run whose log has metrics of the audit.

        Args:
            metrics: The metrics over all log steps, without the prefix ``audit/``.
        """
        return cls._of(metrics, rules_of_log(metrics))

    @classmethod
    def _of(cls, metrics: Mapping[str, float], by_rule: Mapping[str, Mapping[str, float]]) -> Effect:
        """Return the effect from the metrics of the run, which have the size of the gradient, and those of rules."""
        count = metrics.get("tokens_positive_below_0.1")
        if count is None:
            return cls(0, {})
        dropped = {rule: values[BLOCKED] for rule, values in by_rule.items() if BLOCKED in values}
        rare, common = metrics.get("mass_positive_below_0.1"), metrics.get("mass_positive/above_0.1")
        if rare is None or common is None or rare + common <= 0:
            return cls(round(count), dropped)
        of_winners = rare / (rare + common)
        of_dropped: dict[str, float] = {}
        for rule, share in dropped.items():
            share_of_all = by_rule[rule].get(BLOCKED_OF_ALL, 0.0)
            if share_of_all > 0 and _drops_enough(by_rule[rule], metrics):
                of_dropped[rule] = min(1.0, share * of_winners / share_of_all)
        return cls(round(count), dropped, of_winners, of_dropped)

    @property
    def lines(self) -> list[str]:
        r"""The effect as sentences; empty if no share is known.

        >>> lines = Effect(132, {"the run": 0.69, "Clip-Higher": 0.12, "Band": 0.04}, 0.16).lines
        >>> print(*lines, sep="\n")  # doctest: +NORMALIZE_WHITESPACE
        of the gradient on 132 rare winners (p < 0.1, A > 0) the run dropped 69 % (much), Clip-Higher would have dropped
        12 % (some), Band 4 % (little)
        rare winners have 16 % of the gradient on all winners (A > 0)
        """
        if not self.dropped:
            return []
        if self.tokens < FEWEST_RARE_WINNERS:
            winners = "rare winner" if self.tokens == 1 else "rare winners"
            return [
                f"{self.tokens} {winners} (p < 0.1, A > 0): too few to say what a rule drops of their gradient"
            ]
        clauses: list[str] = []
        verb = "would have dropped "
        for name, share in self.dropped.items():
            words = "dropped " if name == RUN else verb
            verb = "would have dropped " if name == RUN else ""
            clauses.append(f"{name} {words}{percent(share)} ({amount(share)})")
        winners = f"{self.tokens:,} rare winners (p < 0.1, A > 0)"
        lines = [f"of the gradient on {winners} {', '.join(clauses)}"]
        if self.of_winners is not None:
            share = f"{percent(self.of_winners)} of the gradient on all winners (A > 0)"
            lines.append(f"rare winners have {share}{self._of_strictest}")
        return lines

    @property
    def _of_strictest(self) -> str:
        """A clause on the part of the gradient on all winners that the strictest rule drops; empty if unknown."""
        strictest = max(self.dropped, key=lambda name: self.dropped[name])
        if strictest not in self.of_dropped:
            return ""
        verb = "dropped" if strictest == RUN else "would have dropped"
        return f", and {percent(self.of_dropped[strictest])} of the part that {strictest} {verb}"


def _drops_enough(of_rule: Mapping[str, float], of_run: Mapping[str, float]) -> bool:
    """Return True if a rule drops gradient of enough winners for a share of them, or if their number is not known.

    Args:
        of_rule: The metrics of the rule.
        of_run: The metrics of the run, with the number of all tokens.
    """
    if "tokens" not in of_run or "clip_high" not in of_rule:
        return True
    # A soft rule drops a part of many tokens, and blocks none.
    share = of_rule["clip_high"] + of_rule.get("softened", 0.0)
    return round(share * of_run["tokens"]) >= FEWEST_RARE_WINNERS


BLOCKED = "blocked_mass_below_0.1"
"""The metric of the audit that is the share of the gradient on rare winners that a rule drops."""

BLOCKED_OF_ALL = "blocked_mass"
"""The same of all winners."""


def rules_of_log(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the metrics of each rule in a log, the run's own first.

    Args:
        metrics: The metrics over all log steps, without the prefix ``audit/``.

    >>> rules_of_log({"clip_high": 0.1, "if/Band/clip_high": 0.0})
    {'the run': {'clip_high': 0.1}, 'Band': {'clip_high': 0.0}}
    """
    by_rule = {RUN: {name: value for name, value in metrics.items() if not name.startswith("if/")}}
    for rule in COUNTERFACTUALS:
        prefix = f"if/{rule}/"
        values = {
            name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)
        }
        if values:
            by_rule[rule] = values
    return by_rule


def amount(share: float) -> str:
    """Return in a word whether a share of the gradient on rare winners is much.

    >>> [amount(share) for share in (0.01, 0.1, 0.5)]
    ['little', 'some', 'much']
    """
    if share < LITTLE:
        return "little"
    return "some" if share < MUCH else "much"


def matter_line(metrics: Mapping[str, Mapping[str, float]]) -> str:
    """Return a sentence on whether a clip can matter on these tokens; empty if that is not known.

    No clip can if no rule, clip 0.2 among them, drops a share of `NOTHING` of the gradient on rare winners, or blocks
    that share of all tokens. Below `LITTLE`, the settings of our studies differed little. From there on, how much they
    drop does not tell what a change of the rule would bring: a verdict by it was hardly better than a vote, see
    docs/audit.md. Of few rare winners the share is not looked at, and of few tokens nothing is said.

    Args:
        metrics: The metrics of each rule.

    >>> rates = {BLOCKED: 0.002, "clip_high": 0.0001, "clip_low": 0.0, "log_ratio_abs": 0.01}
    >>> matter_line({"the run": rates, "clip 0.2": rates})
    'no clip can matter here: each rule drops less than 1 % (mean abs(log r) 0.01)'
    >>> rates[BLOCKED] = 0.02
    >>> matter_line({"the run": rates, "clip 0.2": rates})  # doctest: +NORMALIZE_WHITESPACE
    'a clip can matter little here: each rule drops less than 5 % (the run dropped 2.0 % of the gradient on rare
    winners; mean abs(log r) 0.01; docs/audit.md)'
    >>> rates["clip_low"] = 0.07
    >>> matter_line({"clip 0.2": rates})  # doctest: +NORMALIZE_WHITESPACE
    'a clip can matter here, as clip 0.2 would have blocked 7.0 % of all tokens; the size of these shares does not tell
    which, or by how much (docs/audit.md): train with two rules to see'
    """
    of_run = next(iter(metrics.values()), {})
    if of_run.get("tokens", FEWEST_RARE_WINNERS) < FEWEST_RARE_WINNERS:
        return ""
    clauses = _largest_drops(metrics, of_run.get("tokens_positive_below_0.1", FEWEST_RARE_WINNERS))
    # A wide rule that drops little says nothing of a strict one.
    is_known = STRICT in clauses
    matters = _first_reason(clauses, LITTLE if is_known else NOTHING)
    if matters:
        return (
            f"a clip can matter here, as {matters}; the size of these shares does not tell which, or by how much "
            "(docs/audit.md): train with two rules to see"
        )
    if not is_known:
        return ""
    spread = of_run.get("log_ratio_abs")
    ratios = [] if spread is None else [f"mean abs(log r) {format_number(spread, 2)}"]
    matters_little = _first_reason(clauses, NOTHING)
    if matters_little:
        notes = "; ".join([matters_little, *ratios, "docs/audit.md"])
        return f"a clip can matter little here: each rule drops less than {percent(LITTLE)} ({notes})"
    note = f" ({ratios[0]})" if ratios else ""
    return f"no clip can matter here: each rule drops less than {percent(NOTHING)}{note}"


def _largest_drops(
    metrics: Mapping[str, Mapping[str, float]], rare_winners: float
) -> dict[str, tuple[float, str]]:
    """Return the larger of two shares of each rule, with a clause that says it.

    One is the share of all tokens that the rule blocks, the other that of the gradient on rare winners that it drops.

    Args:
        metrics: The metrics of each rule.
        rare_winners: The number of rare winners, for rules whose metrics do not have it. That of a rule on sequences,
            whose probabilities are those of sequences, is its own.
    """
    drops: dict[str, tuple[float, str]] = {}
    for name, values in metrics.items():
        if "clip_high" not in values or "clip_low" not in values:
            continue
        of_tokens = values["clip_high"] + values["clip_low"]
        count = values.get("tokens_positive_below_0.1", rare_winners)
        of_rare = values.get(BLOCKED, 0.0) if count >= FEWEST_RARE_WINNERS else 0.0
        subject = name if name == RUN else f"{name} would have"
        if of_tokens > of_rare:
            drops[name] = (of_tokens, f"{subject} blocked {_finely(of_tokens)} of all tokens")
        else:
            drops[name] = (of_rare, f"{subject} dropped {_finely(of_rare)} of the gradient on rare winners")
    return drops


def _first_reason(drops: Mapping[str, tuple[float, str]], level: float) -> str:
    """Return the clause of a rule whose share reaches a level; empty if none does.

    That of the run and of the strictest rule are preferred, which do not depend on the rules that a user names.
    """
    for name in dict.fromkeys([RUN, STRICT, *drops]):
        share, clause = drops.get(name, (0.0, ""))
        if share >= level:
            return clause
    return ""


def _finely(share: float) -> str:
    """Return a share in percent, a small one with a decimal."""
    return f"{100 * share:.1f} %" if share < 0.1 else percent(share)


def percent(share: float) -> str:
    """Return a share in percent.

    >>> percent(0.68), percent(0.004), percent(0.0)
    ('68 %', 'less than 1 %', '0 %')
    """
    return "less than 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"
