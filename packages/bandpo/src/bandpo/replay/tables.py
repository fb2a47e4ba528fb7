"""The tables that `bandpo audit` prints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from bandpo._terminal import printable
from bandpo.replay.blocked_tokens import LEAST_SHARE, in_context
from bandpo.replay.directions import COSINE, EFFECTIVE
from rlvet._numbers import format_number
from rlvet.runs.effect import FEWEST_RARE_WINNERS, percent
from rlvet.runs.metric_names import BINS, COUNTERFACTUALS, RARE

if TYPE_CHECKING:
    from bandpo.replay.blocked_tokens import BlockedToken, Decode
    from bandpo.replay.kinds import KindRow
    from bandpo.replay.record import Replay
    from bandpo.replay.record_audit import ListedTokens
    from rlvet.records.ages import AgeRow
    from rlvet.runs.summary import Summary

UNKNOWN = "–"

WHOLE_WIDTH = 12
"""Number of characters up to which a word of a column is not cut in a narrow terminal."""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> Table:
    """Build a table; an empty row becomes a line between sections."""

    # Names of runs and rules are untrusted text: control characters and rich's markup in them are escaped.
    def plain(text: str) -> str:
        return escape(printable(text))

    table = Table(title=plain(title) or None)
    for index, name in enumerate(header):
        words = [word for cells in (header, *rows) if cells for word in plain(cells[index]).split()]
        width = min(max(map(len, words), default=0), WHOLE_WIDTH)
        # A name that is cut at its end would lose what tells it from the others, so it is folded.
        table.add_column(plain(name), overflow="fold", min_width=width)
    for cells in rows:
        if cells:
            table.add_row(*map(plain, cells))
        else:
            table.add_section()
    return table


def share(x: float | None, over: float | None = None) -> str:
    """Format a share in per cent, with the number of tokens that it refers to; a dash if it is None.

    Of few tokens it is their number.

    >>> share(0.4), share(0.4, 200.0), share(0.4, 20.0), share(None)
    ('40.00%', '40.00% of 200', '8 of 20', '–')
    """
    if x is None:
        return UNKNOWN
    if over is not None and over < FEWEST_RARE_WINNERS:
        return f"{x * over:.0f} of {over:.0f}"
    return f"{x:.2%}" if over is None else f"{x:.2%} of {over:.0f}"


def bin_label(name: str) -> str:
    """Return the label of one of `BINS` or `RARE`, such as ``p below 1e-4``."""
    return f"p {name.replace('_', ' ')}"


def _known_rows(rows: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return the rows, each headed by its name, that have a known value in some column."""
    return [[name, *cells] for name, cells in rows.items() if set(cells) != {UNKNOWN}]


def _cells(columns: Iterable[Mapping[str, float]], key: str, over: str = "") -> list[str]:
    """Format a metric of each column, with the number of tokens under the key ``over``."""
    return [share(metrics.get(key), metrics.get(over)) for metrics in columns]


def _rates(columns: Iterable[Mapping[str, float]], key: str, tokens: str) -> list[str]:
    """Format the share of tokens of each column; of fewer than `FEWEST_RARE_WINNERS`, their number.

    Args:
        columns: The metrics of each column.
        key: The name of the share.
        tokens: The name of the number of tokens that it refers to.
    """
    counts = [metrics.get(tokens) for metrics in columns]
    return [
        share(metrics.get(key), count if count is not None and count < FEWEST_RARE_WINNERS else None)
        for metrics, count in zip(columns, counts, strict=True)
    ]


def _enough(columns: Iterable[Mapping[str, float]], key: str, tokens: str) -> list[str]:
    """Format a share of the gradient in each column; a dash if it refers to fewer tokens than `FEWEST_RARE_WINNERS`."""
    return [
        share(metrics.get(key) if metrics.get(tokens, FEWEST_RARE_WINNERS) >= FEWEST_RARE_WINNERS else None)
        for metrics in columns
    ]


def clip_table(runs: Mapping[str, Summary]) -> Table:
    """Build the table of each run's clip rates and those of other rules on its tokens.

    Each run is a column. Rows without a value in any run are left out.
    """
    columns = [summary.metrics for summary in runs.values()]
    # Without clip_low, clip_high is the rate of both sides.
    two_sided = [metrics if "clip_low" in metrics else {} for metrics in columns]
    rows = {
        "clip rate": [share(summary.clipped) for summary in runs.values()],
        "  clip-high": _cells(two_sided, "clip_high"),
        "  clip-low": _cells(columns, "clip_low"),
    }
    for name in (*BINS, "below_0.1"):
        suffix = f"_{name}" if name in RARE else f"/{name}"
        cells = _cells(columns, f"clip_high{suffix}", f"tokens_positive{suffix}")
        rows[f"  clip-high, {bin_label(name)}"] = cells
    rare = "tokens_positive_below_0.1"
    rows["positive gradient blocked, p < 0.1"] = _enough(columns, "blocked_mass_below_0.1", rare)
    rows["radius used"] = _cells(columns, "radius_used")
    for rule in COUNTERFACTUALS:
        rows[f"{rule} would clip high"] = _cells(columns, f"if/{rule}/clip_high")
        rows[f"{rule} would clip low"] = _cells(columns, f"if/{rule}/clip_low")
        rows[f"{rule} would block, p < 0.1"] = _enough(columns, f"if/{rule}/blocked_mass_below_0.1", rare)
    return _table(["", *_short_names([*runs])], _known_rows(rows), "on the run's own tensors")


def _short_names(paths: Sequence[str]) -> list[str]:
    """Return the last parts of paths, as many as tell them apart.

    >>> _short_names(["runs/demo/BandPO-seed-0", "runs/demo/FixedClip-0.2-seed-0"])
    ['BandPO-seed-0', 'FixedClip-0.2-seed-0']
    """
    parts = [[part for part in re.split(r"[/\\]", path) if part] for path in paths]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [*paths]


def _with_count(label: str, columns: Sequence[Mapping[str, float]], key: str) -> str:
    """Return a label with a number of tokens, which is that of each method on the same tokens."""
    counts = {int(metrics[key]) for metrics in columns if key in metrics}
    return label if not counts else f"{label} ({max(counts):,})"


def methods_table(replay: Replay) -> Table:
    """Build the table of a replay: each method is a column, on the same tokens."""
    columns = [audit.metrics() for audit in replay.audits.values()]
    directions = [replay.directions.get(name, {}) for name in replay.by_step]
    rows: list[list[str]] = []
    for side, sign in (("high", "positive"), ("low", "negative")):
        section = {f"clip-{side} rate": _rates(columns, f"clip_{side}", "tokens")}
        for name in BINS:
            label = _with_count(bin_label(name), columns, f"tokens_{sign}/{name}")
            section[f"  {label}"] = _rates(columns, f"clip_{side}/{name}", f"tokens_{sign}/{name}")
        rows += [[], *_known_rows(section)]

    section = {
        "softened": _rates(columns, "softened", "tokens"),
        "amplified": _rates(columns, "amplified", "tokens"),
        "losses untouched": _rates(columns, "inert", "calls"),
        "positive gradient blocked": _enough(columns, "blocked_mass", "tokens"),
    }
    for name in RARE:
        section[f"  {bin_label(name)}"] = _enough(columns, f"blocked_mass_{name}", f"tokens_positive_{name}")
    section["gradient's cosine with the run's"] = [
        format_number(metrics[COSINE], 3) if COSINE in metrics else UNKNOWN for metrics in directions
    ]
    tokens = columns[0]["tokens"]
    section["effective sample size of its weights, A ≠ 0"] = _enough(
        [{**metrics, "tokens": tokens} for metrics in directions], EFFECTIVE, "tokens"
    )
    # This depends on the batch only, so all columns are equal.
    section["winners' advantages on common tokens, hard prompts"] = _enough(columns, "luck", "tokens")
    title = f"on the same tokens, bounds around the {replay.anchor}'s policy"
    return _table(["", *replay.by_step], [*rows, [], *_known_rows(section)], title)


def tokens_table(listed: ListedTokens, decode: Decode) -> Table:
    """Build the table of the tokens of which rules drop most, each in ⟦ ⟧ in its context, with these rules."""

    def row(token: BlockedToken) -> list[str]:
        before, word, after = in_context(token, decode)
        step = UNKNOWN if token.step is None else str(token.step)
        figures = [f"{token.p:.2g}", f"{token.ratio:.3g}", f"{token.advantage:+.2g}"]
        return [f"{before} ⟦{word}⟧ {after}", step, *figures, dropped_by(token.kept)]

    rows = [*map(row, listed.of_run), [], *map(row, listed.of_rule)]
    return _table(["token", "step", "p", "ratio", "A", "dropped by"], rows, listed.title)


def dropped_by(kept: Mapping[str, float]) -> str:
    """Return the rules that drop of a token's gradient, with the share in per cent if it is not all.

    >>> dropped_by({"the run": 0.0, "clip 0.2": 0.6, "Band": 1.0})
    'the run, clip 0.2 (40 %)'
    """
    parts: list[str] = []
    for name, share in kept.items():
        dropped = 1 - min(max(share, 0.0), 1.0)
        if dropped >= 1 - LEAST_SHARE:
            parts.append(name)
        elif dropped >= LEAST_SHARE:
            parts.append(f"{name} ({percent(dropped)})")
    return ", ".join(parts) or UNKNOWN


def kinds_table(rows: Sequence[KindRow]) -> Table:
    """Build the table of rare winners by kind: number, share of the gradient, and what each rule drops of it.

    Of few tokens it has the number of those of which a rule drops gradient.
    """
    of_all = sum(row.tokens for row in rows)
    header = ["kind (tokens)", "share", *rows[0].dropped]
    cells: list[list[str]] = []
    for row in rows:
        if row.tokens < FEWEST_RARE_WINNERS:
            dropped = [f"{count} of {row.tokens}" for count in row.dropped_tokens.values()]
        else:
            dropped = [f"{x:.0%}" for x in row.dropped.values()]
        share_of_all = UNKNOWN if of_all < FEWEST_RARE_WINNERS else f"{row.share:.0%}"
        cells.append([f"{row.kind} ({row.tokens:,})", share_of_all, *dropped])
    return _table(
        header,
        cells,
        "rare winners by kind: share of their gradient, and how much of it each rule drops, or of how many tokens",
    )


def _effective(column: AgeRow) -> str:
    """Return the effective sample size of a class of ages; a dash of few tokens."""
    return UNKNOWN if column.tokens < FEWEST_RARE_WINNERS else f"{column.effective:.0%}"


def ages_table(replay: Replay) -> Table:
    """Build the table of a replay by the age of the tokens: each class of ages is a column, named by those that occur.

    Its rows are the number of tokens, the spread of the log-ratio (nats), the effective sample size of the ratios as a
    share of the tokens, the number of rare winners, and the share of the gradient on winners that each method blocks:
    on rare ones, and by the old probability. Of few tokens or winners no share is said.
    """
    columns = replay.ages.rows
    rows = [
        ["tokens", *(f"{column.tokens:,}" for column in columns)],
        ["root mean square of log r (nats)", *(format_number(column.spread, 2) for column in columns)],
        ["effective sample size of r, all tokens", *(_effective(column) for column in columns)],
        ["rare winners", *(f"{replay.rare_winners_by_age.get(column.name, 0):,}" for column in columns)],
        [],
    ]
    for name, shares in replay.blocked_by_age.items():
        rows.append([f"{name}, p < 0.1", *(share(shares.get(column.name)) for column in columns)])
        for probabilities, shares_of_bin in replay.blocked_by_age_and_bin[name].items():
            cells = [share(shares_of_bin.get(column.name)) for column in columns]
            rows.append([f"  {bin_label(probabilities)}", *cells])
    header = ["age", *(column.ages for column in columns)]
    shares = f"share of the gradient on winners that each rule blocks ({UNKNOWN}: too few)"
    title = f"by age ({replay.ages.meaning}): {shares}"
    return _table(header, rows, title)
