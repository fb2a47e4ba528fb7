"""The tables that `bandpo audit` prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from bandpo._terminal import printable
from bandpo.runs.metric_names import BINS, COUNTERFACTUALS, RARE

if TYPE_CHECKING:
    from bandpo.audit.replay import Replay
    from bandpo.runs.summary import Summary

UNKNOWN = "–"


def _drawn(header: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> Table:
    """Cells under a header; an empty row is a line between sections."""

    # Names of runs and rules are text of others: neither control characters nor rich's markup in them is obeyed.
    def plain(text: str) -> str:
        return escape(printable(text))

    table = Table(*map(plain, header), title=plain(title))
    for cells in rows:
        if cells:
            table.add_row(*map(plain, cells))
        else:
            table.add_section()
    return table


def share(x: float | None, over: float | None = None) -> str:
    """A share in per cent, and how many tokens it was taken over; a dash where it is not known.

    >>> share(0.4), share(0.4, 20.0), share(None)
    ('40.00%', '40.00% of 20', '–')
    """
    return UNKNOWN if x is None else f"{x:.2%}" + ("" if over is None else f" of {over:.0f}")


def bin_label(name: str) -> str:
    """One of `BINS` or `RARE` as a reader wants it: ``p below 1e-4``."""
    return f"p {name.replace('_', ' ')}"


def _told(rows: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """The rows that tell something of anybody."""
    return [[name, *cells] for name, cells in rows.items() if set(cells) != {UNKNOWN}]


def _cells(columns: Iterable[Mapping[str, float]], key: str, over: str = "") -> list[str]:
    """A metric in each column, and what it was taken over."""
    return [share(metrics.get(key), metrics.get(over)) for metrics in columns]


def clip_table(runs: Mapping[str, Summary]) -> Table:
    """What each run's rule clipped, and what others would have: a column for each run; rows no run has are left out."""
    each = [d.metrics for d in runs.values()]
    sided = [m if "clip_low" in m else {} for m in each]  # else clip_high is of both sides
    rows = {
        "clip rate": [share(d.clipped) for d in runs.values()],
        "  clip-high": _cells(sided, "clip_high"),
        "  clip-low": _cells(each, "clip_low"),
    }
    for name in (*BINS, "below_0.1"):
        end = f"_{name}" if name in RARE else f"/{name}"
        rows[f"  clip-high, {bin_label(name)}"] = _cells(each, f"clip_high{end}", f"tokens_positive{end}")
    rows["positive gradient blocked, p < 0.1"] = _cells(each, "blocked_mass_below_0.1")
    rows["radius used"] = _cells(each, "radius_used")
    for rule in COUNTERFACTUALS:
        rows[f"{rule} would clip high"] = _cells(each, f"if/{rule}/clip_high")
        rows[f"{rule} would clip low"] = _cells(each, f"if/{rule}/clip_low")
        rows[f"{rule} would block, p < 0.1"] = _cells(each, f"if/{rule}/blocked_mass_below_0.1")
    return _drawn(["", *runs], _told(rows), "on the run's own tensors")


def methods_table(seen: Replay) -> Table:
    """Every method of a replay side by side on the same tokens."""
    each = [audit.metrics() for audit in seen.audits.values()]
    rows: list[list[str]] = []
    for word, sign in (("high", "positive"), ("low", "negative")):
        by_bin = {
            f"  {bin_label(name)}": _cells(each, f"clip_{word}/{name}", f"tokens_{sign}/{name}")
            for name in BINS
        }
        rows += [[], *_told({f"clip-{word} rate": _cells(each, f"clip_{word}")} | by_bin)]
    rest = {
        "softened": _cells(each, "softened"),
        "amplified": _cells(each, "amplified"),
        "losses untouched": _cells(each, "inert"),
        "positive gradient blocked": _cells(each, "blocked_mass"),
    }
    rest |= {f"  {bin_label(name)}": _cells(each, f"blocked_mass_{name}") for name in RARE}
    # The batch has it, whatever the method, so every column is the same.
    rest["winners' advantages on common tokens, hard prompts"] = _cells(each, "luck")
    title = f"on the same tokens, bounds around the {seen.anchor}'s policy"
    return _drawn(["", *seen.by_step], [*rows, [], *_told(rest)], title)
