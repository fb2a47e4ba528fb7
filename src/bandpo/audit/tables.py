"""Tables, for pages, Markdown and the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bandpo.audit.metrics import BINS
from bandpo.audit.summary import RunSummary


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; the first column names the row."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    prose: bool = False
    """Whether the cells hold words, which are set flush left and broken over lines, rather than numbers."""

    def markdown(self) -> str:
        """As a Markdown table, without the caption."""
        rules = ["---" if k == 0 or self.prose else "---:" for k in range(len(self.header))]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in (self.header, rules, *self.rows))


def clip_table(runs: Mapping[str, RunSummary]) -> Table:
    """What each run's rule clipped, and what others would have: a column for each run; rows no run has are left out."""
    table: dict[str, list[str | None]] = {}
    each = runs.values()
    table["clip rate"] = [percent_or_none(d.clipped) for d in each]
    table["  clip-high"] = [percent_or_none(d.clip_high if d.clip_low is not None else None) for d in each]
    table["  clip-low"] = [percent_or_none(d.clip_low) for d in each]
    for name in BINS:
        found = [d.clip_high_by_bin.get(name) for d in each]
        table[f"  clip-high, p {name.replace('_', ' ')}"] = [
            f and f"{percent_or_none(f[0])} of {f[1]:.0f}" for f in found
        ]
    table["  clip-high, p below 0.1"] = [
        f"{percent_or_none(d.rare.blocked / d.rare.tokens)} of {d.rare.tokens:.0f}" if d.rare.tokens else None
        for d in each
    ]
    table["positive gradient blocked, p < 0.1"] = [_blocked(d, "") for d in each]
    table["radius used"] = [percent_or_none(d.radius_used) for d in each]
    for rule in {name: None for d in each for name in d.blocked_mass if name}:
        rates = [d.counterfactuals.get(rule) for d in each]
        table[f"{rule} would clip high"] = [percent_or_none(r and r[0]) for r in rates]
        table[f"{rule} would clip low"] = [percent_or_none(r and r[1]) for r in rates]
        table[f"{rule} would block, p < 0.1"] = [_blocked(d, rule) for d in each]
    rows = [[name, *(cell or "–" for cell in cells)] for name, cells in table.items() if any(cells)]
    return Table(["", *runs], rows)


def _blocked(run: RunSummary, rule: str) -> str | None:
    return percent_or_none(run.blocked_mass.get(rule, {}).get("below_0.1"))


def percent_or_none(share: float | None) -> str | None:
    """A share in per cent with two decimals; None where it is not known."""
    return None if share is None else f"{share:.2%}"
