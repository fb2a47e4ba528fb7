"""The lines that a trainer prints after training: what its rule did to rare winners, and what other rules would have.

They are computed from the sums of the run's audits, which the trainer has already.
"""

from __future__ import annotations

from typing import NamedTuple

from bandpo.audit.metric_names import BINS, RARE
from bandpo.audit.metrics import COUNTERFACTUALS, POSITIVE, Audit
from bandpo.core.methods import Method
from bandpo.core.text import as_method

FEWEST_RARE_WINNERS = 30
"""The smallest number of rare winners of which shares are said."""
_SHOWN = ("clip 0.2", "Clip-Higher")
"""The rules with which a run's rule is compared."""
_IN_PLACE = "Band"
"""The rule that takes the place of one of `_SHOWN` that the run has itself."""


class _Dropped(NamedTuple):
    """What a rule drops of the gradient of a run's rare winners."""

    rule: str
    """What the rule is called."""
    share: float
    """The share that it drops."""
    by_bin: list[float]
    """The gradient that it drops, by bin of the old probability."""


def describe_rare_winners(audit: Audit, method: Method, name: str, age: str = "") -> list[str]:
    r"""Return lines about the gradient of a run's rare winners, the tokens with p < 0.1 and A > 0.

    The first has the shares that clip 0.2 and Clip-Higher would have dropped, and that the run's rule dropped. The
    second has the probabilities at which the strictest of these rules drops most, and the age of the data. A token
    counts once for each update that uses it.

    Args:
        audit: The sum of a run's audits, on the CPU.
        method: The run's method.
        name: What the run's method is called.
        age: How old the data were, in words; empty if that is not known.

    >>> from bandpo.core.batch import Batch
    >>> logp_old = torch.tensor([[0.05, 0.08, 0.5]]).log().expand(20, -1)
    >>> logp = torch.tensor([[0.055, 0.18, 0.6]]).log().expand(20, -1)
    >>> audit = Audit.from_batch(Batch.read(logp, logp_old, torch.ones(20)), method="BandPO()")
    >>> lines = describe_rare_winners(audit, as_method("BandPO()"), "BandPO()", "each batch served 4 updates")
    >>> print(*lines, sep="\n")  # doctest: +NORMALIZE_WHITESPACE
    of the gradient on your 40 rare winners (p < 0.1) clip 0.2 would have dropped 67 %, Clip-Higher 67 %; BandPO()
    dropped 0 %
    of what clip 0.2 would have dropped, 100 % was at p = 0.01 to 0.1 · each batch served 4 updates
    """
    bins = RARE["below_0.1"]
    count = int(audit.sums["tokens"][0, POSITIVE, :bins].sum())
    if count < FEWEST_RARE_WINNERS:
        winners = "rare winner" if count == 1 else "rare winners"
        return [f"{count} {winners} (p < 0.1, A > 0): too few to say what the clip does to them"]

    mass = audit.sums["mass"][:, POSITIVE, :bins].sum(-1)
    by_bin = audit.sums["blocked_mass"][:, POSITIVE, :bins]
    same = [rule for rule in audit.counterfactuals if _is_clip_of(method, rule)]
    dropped: list[_Dropped] = []
    own_name = same[0] if same else name
    for index, rule in enumerate((own_name, *audit.counterfactuals)):
        share = float(by_bin[index].sum() / mass[index]) if mass[index] > 0 else 0.0
        dropped.append(_Dropped(rule, share, by_bin[index].tolist()))

    own, *others = dropped
    by_rule = {other.rule: other for other in others}
    shown = [by_rule[rule] for rule in (*_SHOWN, _IN_PLACE) if rule not in same][: len(_SHOWN)]
    first, *further = shown
    would_have = ", ".join(f"{one.rule} {_percent(one.share)}" for one in further)
    lines = [
        f"of the gradient on your {count:,} rare winners (p < 0.1) {first.rule} would have dropped "
        f"{_percent(first.share)}, {would_have}; {own.rule} dropped {_percent(own.share)}"
    ]

    parts: list[str] = []
    strictest = max((*shown, own), key=lambda one: one.share)
    total = sum(strictest.by_bin)
    if total > 0:
        largest = max(strictest.by_bin)
        place = BINS[strictest.by_bin.index(largest)].replace("_", " ")
        words = "dropped" if strictest is own else "would have dropped"
        parts.append(f"of what {strictest.rule} {words}, {_percent(largest / total)} was at p = {place}")
    if age:
        parts.append(age)
    return [*lines, " · ".join(parts)] if parts else lines


def _is_clip_of(method: Method, rule: str) -> bool:
    """Return True if a method is a rule of `COUNTERFACTUALS` with PPO's surrogate."""
    other = as_method(COUNTERFACTUALS[rule])
    return (method.clip, method.objective) == (other.clip, other.objective)


def _percent(share: float) -> str:
    """Return a share in percent.

    >>> _percent(0.68), _percent(0.004), _percent(0.0)
    ('68 %', 'less than 1 %', '0 %')
    """
    return "less than 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"
