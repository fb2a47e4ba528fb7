"""The lines that a trainer prints after training: what its rule did to rare winners, and what other rules would have.

They are computed from the sums of the run's audits, which the trainer has already.
"""

from __future__ import annotations

from typing import NamedTuple

from bandpo.audit.metric_names import RARE
from bandpo.audit.metrics import COUNTERFACTUALS, POSITIVE, Audit
from bandpo.core.methods import Method
from bandpo.core.text import as_method

FEWEST_RARE_WINNERS = 30
"""The smallest number of rare winners, or of tokens of another kind, of which shares are said."""
_SHOWN = ("clip 0.2", "Clip-Higher")
"""The rules with which a run's rule is compared."""
_IN_PLACE = "Band"
"""The rule that takes the place of one of `_SHOWN` that the run has itself."""
COMPARED = (*_SHOWN, _IN_PLACE)
"""The rules of `COUNTERFACTUALS` that the lines need."""


class _Dropped(NamedTuple):
    """What a rule drops of the gradient of a run's winners, the tokens with A > 0."""

    rule: str
    """What the rule is called."""
    rare_size: float
    """The size of the gradient of rare winners without a clip."""
    size: float
    """The same of all winners."""
    rare_dropped: float
    """The size of the part of the gradient of rare winners that it drops."""
    dropped: float
    """The same of all winners."""
    tokens: float
    """The number of tokens that it drops, winners, or lowers the weight of, at either sign of A."""

    @property
    def share(self) -> float:
        """The share of the gradient of rare winners that it drops; 0 without a gradient."""
        return _share(self.rare_dropped, self.rare_size)

    @property
    def rarity(self) -> str:
        """The share of rare winners in the gradient of all winners, and in the part that the rule drops, in words."""
        of_size = percent(_share(self.rare_size, self.size))
        of_part = percent(_share(self.rare_dropped, self.dropped))
        return f"{of_size} of all winners' gradient, and {of_part} of the part that {self.rule}"


def _share(part: float, whole: float) -> float:
    """Return the share of a part; 0 of nothing."""
    return part / whole if whole > 0 else 0.0


def short_name(text: str) -> str:
    """Return what the lines call a method, from its text.

    >>> short_name("BandPO(radius=0.1)"), short_name("Method(FixedClip(0.2))")
    ('BandPO', 'your method')
    """
    name = text.partition("(")[0]
    return "your method" if name == "Method" else name


def describe_rare_winners(audit: Audit, method: Method | None, name: str, age: str = "") -> list[str]:
    r"""Return lines about the gradient of a run's rare winners, the tokens with p < 0.1 and A > 0.

    The first has the shares that clip 0.2 and Clip-Higher would have dropped, and that the run's rule dropped. The
    second says how much of the gradient of all winners the rare ones have, and of the part that the strictest of these
    rules drops, if these are enough tokens; and the age of the data. A token counts once for each update that uses it.

    Args:
        audit: The sum of a run's audits, on the CPU, with the rules `COMPARED` among its counterfactuals.
        method: The run's method; None if it is not known.
        name: What the run's method is called.
        age: How old the data were, in words; empty if that is not known.

    >>> from bandpo.core.batch import Batch
    >>> logp_old = torch.tensor([[0.05, 0.08, 0.5]]).log().expand(20, -1)
    >>> logp = torch.tensor([[0.055, 0.18, 0.65]]).log().expand(20, -1)
    >>> audit = Audit.from_batch(Batch.read(logp, logp_old, torch.ones(20)), method="BandPO()")
    >>> lines = describe_rare_winners(audit, as_method("BandPO()"), "BandPO()", "each batch served 4 updates")
    >>> print(*lines, sep="\n")  # doctest: +NORMALIZE_WHITESPACE
    of the gradient on your 40 rare winners (p < 0.1) clip 0.2 would have dropped 67 %, Clip-Higher 67 %; BandPO()
    dropped 0 %
    rare winners had 72 % of all winners' gradient, and 63 % of the part that clip 0.2 would have dropped · each batch
    served 4 updates
    """
    count = int(audit.sums["tokens"][0, POSITIVE, : RARE["below_0.1"]].sum())
    if count < FEWEST_RARE_WINNERS:
        winners = "rare winner" if count == 1 else "rare winners"
        return [f"{count} {winners} (p < 0.1, A > 0): too few to say what the clip does to them"]

    run_drop, *compared = _drops(audit, method, name)
    would_have = [f"{drop.rule} would have dropped {percent(drop.share)}" for drop in compared[:1]]
    would_have += [f"{drop.rule} {percent(drop.share)}" for drop in compared[1:]]
    shares = (
        f"of the gradient on your {count:,} rare winners (p < 0.1) {', '.join(would_have)}; {run_drop.rule} dropped "
        f"{percent(run_drop.share)}"
    )

    details: list[str] = []
    # Of rules that drop as much, the run's own is named.
    strictest = max((run_drop, *compared), key=lambda drop: drop.share)
    if strictest.share > 0 and strictest.tokens >= FEWEST_RARE_WINNERS:
        verb = "dropped" if strictest is run_drop else "would have dropped"
        details.append(f"rare winners had {strictest.rarity} {verb}")
    if age:
        details.append(age)
    return [shares, " · ".join(details)] if details else [shares]


def _drops(audit: Audit, method: Method | None, name: str) -> list[_Dropped]:
    """Return what the run's method drops, and then what the rules drop that it is compared with.

    Args:
        audit: As for `describe_rare_winners`.
        method: As for `describe_rare_winners`.
        name: As for `describe_rare_winners`. A method that is one of the counterfactual rules has the rule's name, and
            is not compared with itself.
    """
    rare = RARE["below_0.1"]
    sizes = audit.sums["mass"][:, POSITIVE]
    dropped = audit.sums["blocked_mass"][:, POSITIVE]
    counts = audit.sums["blocked"][:, POSITIVE].sum(-1) + audit.sums["softened"]
    sums = [sizes[:, :rare].sum(-1), sizes.sum(-1), dropped[:, :rare].sum(-1), dropped.sum(-1), counts]
    of_rules = list(zip(*(column.tolist() for column in sums), strict=True))
    equal_rules = [rule for rule in audit.counterfactuals if _is_clip_of(method, rule)]
    run_name = equal_rules[0] if equal_rules else name
    run_drop = _Dropped(run_name, *of_rules[0])
    by_rule = {
        rule: _Dropped(rule, *of_rule)
        for rule, of_rule in zip(audit.counterfactuals, of_rules[1:], strict=True)
    }
    compared = [rule for rule in COMPARED if rule not in equal_rules]
    return [run_drop, *(by_rule[rule] for rule in compared[: len(_SHOWN)])]


def _is_clip_of(method: Method | None, rule: str) -> bool:
    """Return True if a method is a rule of `COUNTERFACTUALS` with PPO's surrogate."""
    if method is None:
        return False
    other = as_method(COUNTERFACTUALS[rule])
    return (method.clip, method.objective) == (other.clip, other.objective)


def percent(share: float) -> str:
    """Return a share in percent.

    >>> percent(0.68), percent(0.004), percent(0.0)
    ('68 %', 'less than 1 %', '0 %')
    """
    return "less than 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"
