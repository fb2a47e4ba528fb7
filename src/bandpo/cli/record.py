"""What `bandpo audit` prints of a record of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from bandpo.audit.findings import Finding
    from bandpo.audit.mismatch import Mismatch
    from bandpo.audit.replay import Replay

MARKS = {True: "[green]✓[/green]", False: "[red]✗[/red]", None: "[dim]?[/dim]"}


def findings_table(title: str, findings: Sequence[Finding]) -> Table:
    """Questions and answers, one a row."""
    from rich.table import Table

    table = Table(box=None, show_header=False, title=title, title_justify="left")
    for _ in range(3):
        table.add_column(overflow="fold")  # a setting's name is to be copied, so it is never cut off
    for finding in findings:
        advice = f"\n[bold]try[/bold] {finding.try_next}" if finding.try_next else ""
        table.add_row(MARKS[finding.ok], finding.question, finding.answer + advice)
    return table


def print_record(
    path: Path, clips: Sequence[str], methods: Sequence[str], anchor: str | None, skip_bad: bool
) -> None:
    """Replay a record under its own method and these, or those that every audit tries, and print what is seen.

    Raises:
        ValueError: see `bandpo.audit.replay.replay_record`; a ``clip`` is no clip rule.
    """
    from rich.console import Console

    from bandpo.audit.findings import all_findings
    from bandpo.audit.metrics import COUNTERFACTUALS
    from bandpo.audit.record_findings import all_record_findings
    from bandpo.audit.replay import replay_record
    from bandpo.audit.runs import recorded_run
    from bandpo.audit.summary import summarize
    from bandpo.text import parse_method, parse_rule

    given = {text: parse_rule(text) for text in clips} | {text: parse_method(text) for text in methods}
    seen = replay_record(path, given or COUNTERFACTUALS, anchor=anchor, skip_bad=skip_bad)
    summary = summarize(seen.rows)
    console = Console()
    tokens = next(iter(seen.audits.values())).metrics()["tokens"]
    title = f"{path}, {len(seen.rows)} steps, {tokens:,.0f} tokens; the verdicts are on {next(iter(seen.by_step))}"
    console.print(
        findings_table(title, [*all_findings(summary, recorded_run(path)), *all_record_findings(seen)])
    )
    console.print()
    console.print(_methods(seen))
    # Without a gap the engine is the trainer.
    if seen.mismatch is not None and seen.mismatch.figures().get("kl_k3"):
        for table in _mismatch(seen.mismatch, seen.judged):
            console.print(table)


def _methods(seen: Replay) -> Table:
    """Every method side by side on the same tokens."""
    from rich.table import Table

    from bandpo.audit.metrics import BINS, RARE

    table = Table("", *seen.by_step, title=f"on the same tokens, bounds around the {seen.anchor}'s policy")
    each = [audit.metrics() for audit in seen.audits.values()]

    def row(name: str, key: str, over: str = "") -> None:
        cells = []
        for metrics in each:
            rate = _percent(metrics.get(key))
            cells.append(f"{rate} of {metrics[over]:.0f}" if over and key in metrics else rate)
        if set(cells) != {"–"}:
            table.add_row(name, *cells)

    table.add_row("level of ratios", *seen.levels.values())
    for word, sign in (("high", "positive"), ("low", "negative")):
        table.add_section()
        row(f"clip-{word} rate", f"clip_{word}")
        for name in BINS:
            row(f"  p {name.replace('_', ' ')}", f"clip_{word}/{name}", f"tokens_{sign}/{name}")
    table.add_section()
    row("softened", "softened")
    row("amplified", "amplified")
    row("losses untouched", "inert")
    row("positive gradient blocked", "blocked_mass")
    for name in RARE:
        row(f"  p {name.replace('_', ' ')}", f"blocked_mass_{name}")
    return table


def _mismatch(m: Mismatch, judged: str) -> list[Table]:
    """The engine against the trainer: by version lag, by probability, and under corrections."""
    from rich.table import Table

    from bandpo.audit.metrics import BINS

    columns = (
        "tokens",
        "KL k1",
        "KL k3",
        "off by 2×",
        "ESS",
        "before",
        "moved",
        "both",
        "used before",
        "used moved",
    )
    keys = ("tokens", "kl_k1", "kl_k3", "extreme", "ess")
    keys += ("blocked_before", "blocked_moved", "blocked_total", "spent_before", "spent_moved")
    table = Table("", *columns, title=f"engine against trainer; what {judged} blocks and the interval used")

    def row(name: str, figures: Mapping[str, float]) -> None:
        if figures["tokens"]:
            numbers = [f"{figures['tokens']:.0f}", *(f"{figures[key]:.2g}" for key in keys[1:3])]
            table.add_row(name, *numbers, *(_percent(figures[key]) for key in keys[3:]))

    row("all", m.figures())
    table.add_section()
    for name in m.lags:
        row(f"lag {name}", m.figures(lag=name))
    table.add_section()
    for name in BINS:
        row(f"p {name.replace('_', ' ')}", m.figures(bin=name))
    weights = Table(
        "", "tokens touched", "mean weight", "ESS", "gradient lost", title="weights for π_old/π_rollout"
    )
    for name, found in m.corrected_figures().items():
        weights.add_row(
            name,
            _percent(found["touched"]),
            f"{found['mean_weight']:.3f}",
            _percent(found["ess"]),
            _percent(found["lost"]),
        )
    return [table, weights]


def _percent(share: float | None) -> str:
    from bandpo.audit.tables import percent_or_none

    return percent_or_none(share) or "–"
