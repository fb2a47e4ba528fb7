"""Read tables of metrics in every layout that people print, paste or save.

Each layout becomes lines of cells: Markdown, the boxes of rich and tabulate, columns of spaces such as those of pandas,
tabs, CSV, and HTML. One function makes rows of them, so that emphasis, units, repeated headers and damaged rows have
the same meaning in all layouts. A row that is not read is counted with the reason.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from html import unescape
from typing import Any, NamedTuple

from rlvet.runs.limits import LONGEST_ROW
from rlvet.runs.quantities import RUN_KEYS, is_known_key, step_rank
from rlvet.runs.unread import Unread

Rows = list[dict[str, Any]]
"""Rows with a number or a text for each column that has a value."""


# --- Cells ---

MISSING = frozenset(("", "-", "--", "---", "—", "–", "n/a", "na", "none", "null", "no log", "/"))
"""Cells without a value, in lower case."""

EMPHASIS = re.compile(r"\A(\*\*\*|\*\*|\*|___|__|_|~~|`{1,3})(?P<text>[^\n]+)\1\Z")
"""A text with emphasis of Markdown."""

FOOTNOTE_MARK = re.compile(r"(?:\s?[†‡§¹²³⁴⁵↑↓]|\s?\[\d{1,2}\]|(?<=[^*])\*(?=\Z))+\Z")
"""Marks of a footnote, or arrows, at the end of a cell."""

NUMBER = re.compile(
    r"(?P<number>[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)(?:\s?(?P<unit>%|[a-z][a-z0-9/.]{0,20}))?", re.I
)
"""A number with a unit."""

GROUPED = re.compile(
    r"[+-]?\d{1,3}(?P<separator>[,'’\u00a0\u202f _])\d{3}(?:(?P=separator)\d{3})*(?:\.\d*)?(?!\d)"
)
"""A number with separators of thousands."""

DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
"""A number with a decimal comma, or one with a separator of thousands."""

UNITS = {
    "%": 0.01,
    "k": 1e3,
    "m": 1e6,
    "ms": 1e-3,
    "min": 60.0,
    "h": 3600.0,
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds", "x", "nats", "nat"), 1.0),
    **dict.fromkeys(
        ("tok", "toks", "token", "tokens", "tokens/s", "tok/s", "tokens/sample", "it/s", "s/it"), 1.0
    ),
    **dict.fromkeys(("gib", "gb", "mib", "mb", "steps", "samples"), 1.0),
}
"""The factor of each unit, in lower case. ``M`` is a million, and ``m`` is no unit."""

WORDS = {"nan": "NaN", "inf": "Infinity", "+inf": "Infinity", "-inf": "-Infinity", "infinity": "Infinity"}
"""The texts of JSON logs for values that are not finite."""

SCALE_OF_HEADER = re.compile(
    r"[\(\[]\s*[x×·]\s*(?:10\^?(?P<power>-?\d{1,2})|(?P<factor>1?e-?\d{1,2}))\s*[\)\]]\Z"
)
"""A power of ten in a header, such as ``lr (×1e-6)``."""

UNIT_OF_HEADER = re.compile(r"[\(\[]\s*(?:in\s)?(?P<unit>[a-z%/]{1,14})\s*[\)\]]\Z", re.I)
"""A unit in a header, such as ``kl (nats)``."""


NAMES = {"training loss": "loss"}
"""The key of the trainer's other logs for each column of a notebook's table that has another name."""

LONGEST_CELL = 200
"""The largest number of characters of a cell that may be a number or the name of a column."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    >>> Column.of("**Completions / Mean Length** [tokens]"), Column.of("correct (%)").scale
    (Column(key='Completions/Mean Length', scale=1.0), 0.01)
    """

    key: str
    """Its name without emphasis and unit."""
    scale: float = 1.0
    """The factor from its numbers to the values."""

    @classmethod
    def of(cls, text: str) -> Column:
        """Return the column of a header."""
        key = without_marks(" ".join(text.split()))
        scale = 1.0
        power = SCALE_OF_HEADER.search(key)
        unit = UNIT_OF_HEADER.search(key)
        if is_known_key(key):
            pass
        elif power is not None:
            key = key[: power.start()]
            scale = (
                10.0 ** int(power["power"])
                if power["power"]
                else float(f"1{power['factor'].removeprefix('1')}")
            )
        elif unit is not None and unit["unit"].lower() in UNITS:
            key = key[: unit.start()]
            scale = UNITS[unit["unit"].lower()]
        # A notebook's table has ``completions / mean_length``.
        key = "/".join(part.strip() for part in without_marks(key).split("/"))
        return cls(NAMES.get(key.lower(), key), scale)


def without_marks(text: str) -> str:
    """Return a text without emphasis, arrows and marks of footnotes around it.

    >>> without_marks("**0.5**†"), without_marks("`kl` ↓"), without_marks("a_b_")
    ('0.5', 'kl', 'a_b_')
    """
    if len(text) > LONGEST_CELL:
        return text.strip()
    while True:
        text = text.strip()
        emphasis = EMPHASIS.match(text)
        shorter = emphasis["text"] if emphasis is not None else FOOTNOTE_MARK.sub("", text)
        if shorter == text:
            return text
        text = shorter


def parse_cell(text: str, scale: float = 1.0, comma: str = "thousands") -> float | str | None:
    """Return the value of a cell: a number, None if it has no value, or else its text.

    Args:
        text: The cell.
        scale: The factor of its column. A unit in the cell replaces it.
        comma: The meaning of a comma in the table: ``thousands``, ``decimal``, or ``unknown``.

    >>> [parse_cell(text) for text in ("1,024 tokens", "12.5 %", "—", "−0.5", "nan", "0.4…", "1.2k")]
    [1024.0, 0.125, None, -0.5, 'NaN', '0.4…', 1200.0]
    >>> parse_cell("0,5", comma="decimal")
    0.5
    """
    if not text:
        return None
    if comma != "decimal":
        # The fast path for most cells.
        try:
            number = float(text)
        except ValueError:
            pass
        else:
            if math.isfinite(number):
                return _scaled(number, scale)
    if len(text) > LONGEST_CELL:
        return text
    cell = text.strip()
    text = without_marks(text).replace("−", "-")
    folded = text.lower()
    if folded in MISSING:
        return None
    if folded in WORDS:
        return WORDS[folded]
    number = text
    if comma == "decimal" and "," in number:
        number = number.replace(".", "").replace(",", ".", 1)
    elif not (comma == "unknown" and "," in number):
        grouped = GROUPED.match(number)
        if grouped is not None:
            digits = number[: grouped.end()].replace(grouped["separator"], "")
            number = digits + number[grouped.end() :]
    match = NUMBER.fullmatch(number)
    if match is None:
        return cell
    unit = match["unit"] or ""
    if unit == "m" or (unit and unit.lower() not in UNITS):
        return cell
    value = float(match["number"])
    return _scaled(value, UNITS[unit.lower()] if unit else scale) if math.isfinite(value) else cell


def _scaled(number: float, factor: float) -> float:
    """Return a number times a factor. A division by 100 has one rounding less than a product with 0.01."""
    if factor == 1.0:
        return number
    return number * factor if factor > 1 else number / round(1 / factor, 12)


def meaning_of_comma(cells: Iterable[str], *, is_semicolon: bool) -> str:
    """Return the meaning of commas in the cells of a table: ``thousands``, ``decimal`` or ``unknown``.

    A table with semicolons between its cells often has decimal commas, so that ``1,024`` may be 1.024 in it.
    """
    has_point = False
    has_comma = False
    for cell in cells:
        if "," in cell:
            text = without_marks(cell)
            if DECIMAL_COMMA.fullmatch(text) and not GROUPED.fullmatch(text):
                return "decimal"
            if GROUPED.fullmatch(text) and text.lstrip("+-").startswith("0"):
                return "decimal"
            has_comma = has_comma or bool(GROUPED.match(text))
        if "." in cell:
            has_point = True
    return "unknown" if is_semicolon and has_comma and not has_point else "thousands"


# --- Lines of cells ---


class Line(NamedTuple):
    """A line of a table."""

    cells: tuple[str, ...]
    """Its cells; empty for a rule."""
    text: str
    """The line as it is printed; empty for a line of CSV."""
    layout: str
    """The name of its layout: ``edges``, ``tabs``, ``spaces``, ``words`` (single spaces), ``html``, or ``csv`` and the
    delimiter."""

    edges: tuple[bool, bool] = (False, False)
    """True if a separator is before the first cell, and if one is after the last cell."""

    @property
    def example(self) -> str:
        """The line for a note."""
        return self.text or " | ".join(self.cells)


RULE = re.compile(r"[\s\-=+|:_~.─━═╌┄│┃║├┼┤┝┿┥┠╂┨┡╇┩╞╪╡╠╬╣┢╈┪┌┬┐┏┳┓╒╤╕╔╦╗╭╮└┴┘┗┻┛╘╧╛╚╩╝╰╯]*")
"""A line without letters and digits."""

RULE_OF_CELL = re.compile(r":?-{3,}:?")
"""The rule below the name of one column of Markdown."""

DASHES = re.compile(r"-{2,}|={2,}|[─━═]{2,}|--:|:--")
"""A part of a rule."""

EDGE = re.compile(r"(?<!\\)[|│┃║┆]")
"""A separator of cells. Markdown escapes one in a cell."""

PROGRESS_BAR = re.compile(r"(?<!\d)\d+/\d+ \[")
"""A part of a progress bar, which has edges too."""

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
"""The escape sequences of a terminal's colours."""

LATEX_COMMAND = re.compile(r"\\[a-z]+\{([^{}]*)\}")
"""A command for the emphasis of a cell."""

TYPE_OF_COLUMN = re.compile(r"[iuf](?:8|16|32|64)|str|bool|cat|null|date(?:time)?(?:\[.*\])?", re.I)
"""The type of a column below its name, as polars prints it."""

GAP = re.compile(r" {2,}")
"""The space between columns."""


WRAPPED_HEADER = "  \\"
"""The end of a header of pandas whose table goes on below with more columns."""


def _with_whole_rows(lines: Sequence[str]) -> list[str]:
    r"""Return lines, with the rows of a table that pandas has wrapped put together again.

    >>> _with_whole_rows(["   step  reward  \\", "0     1     0.5   ", "", "    kl  ", "0  0.1  "])
    ['   step  reward   kl', '0     1     0.5   0.1', '']
    """
    result: list[str] = []
    number = 0
    while number < len(lines):
        rows: list[str] = []
        if lines[number].endswith(WRAPPED_HEADER):
            rows, number = _wrapped_table(lines, number)
        if rows:
            result += [*rows, ""]
        else:
            result.append(lines[number])
            number += 1
    return result


def _wrapped_table(lines: Sequence[str], first: int) -> tuple[list[str], int]:
    """Return the rows of a wrapped table, and the number of the line after it; no rows if its parts do not fit."""
    parts: list[list[str]] = []
    start = first
    is_open = True
    while is_open and start < len(lines):
        end = next((place for place in range(start, len(lines)) if not lines[place].strip()), len(lines))
        parts.append([line.rstrip() for line in lines[start:end]])
        is_open = lines[start].endswith(WRAPPED_HEADER)
        start = end + 1
    indexes = [[line.split(" ", 1)[0] for line in part[1:]] for part in parts]
    # After the last part, other lines may follow without an empty one.
    count = len(indexes[0])
    if (
        not count
        or any(index[:count] != indexes[0] for index in indexes)
        or any(len(part) != count + 1 for part in parts[:-1])
    ):
        return [], first
    rows = [parts[0][0].removesuffix("\\").rstrip(), *parts[0][1:]]
    for part, index in zip(parts[1:], indexes[1:], strict=True):
        rows[0] += "  " + " " + part[0].removesuffix("\\").strip()
        for place, line in enumerate(part[1 : count + 1]):
            rows[place + 1] += "  " + " " + line.removeprefix(index[place]).strip()
    after = start - 1 - (len(parts[-1]) - count - 1)
    return rows, after


def cells_of_text(text: str) -> Iterator[Line | None]:
    """Yield the lines of tables in a text, and None for each other line."""
    # The spans of the columns between the dashes of a rule, for tables with spaces between their columns.
    spans: list[tuple[int, int]] = []
    lines = ESCAPES.sub("", text).splitlines()
    for line in _with_whole_rows(lines) if "\\" in text else lines:
        stripped = line.strip()
        if not stripped or len(line) > LONGEST_ROW:
            spans = []
            yield None
        elif RULE.fullmatch(stripped) and (DASHES.search(stripped) or len(stripped) > 2):
            pieces = re.fullmatch(r"[-=]++(?: ++[-=]++)++", stripped)
            if pieces is not None:
                spans = [match.span() for match in re.finditer(r"[-=]+", line)]
            yield Line((), line, "rule")
        elif EDGE.search(stripped):
            if not PROGRESS_BAR.search(stripped):
                yield _line_with_edges(stripped, line)
        elif "&" in stripped and stripped.endswith("\\\\"):
            cells = LATEX_COMMAND.sub(r"\1", stripped.removesuffix("\\\\")).split("&")
            yield Line(tuple(cell.strip().replace("\\_", "_") for cell in cells), line, "edges")
        elif "\t" in line:
            yield Line(tuple(cell.strip() for cell in line.split("\t")), line, "tabs")
        else:
            cells = _cells_between_spaces(line, spans)
            if len(cells) > 1:
                yield Line(cells, line, "spaces")
            else:
                yield Line(tuple(stripped.split(" ")), line, "words")


def _line_with_edges(text: str, line: str) -> Line:
    """Return a line of Markdown or of a box."""
    if text.startswith("||"):
        # Jira's header.
        text = text.replace("||", "|")
    cells = EDGE.split(text)
    has_left = len(cells) > 1 and not cells[0]
    has_right = len(cells) > 1 and not cells[-1]
    cells = cells[1 if has_left else 0 : len(cells) - 1 if has_right else len(cells)]
    names = tuple(cell.strip().replace("\\|", "|").replace("<br>", " ") for cell in cells)
    if (
        len(names) > 2
        and not RULE_OF_CELL.fullmatch(names[0])
        and all(RULE_OF_CELL.fullmatch(name) for name in names[1:])
    ):
        # A rule after the time at which the line was printed.
        return Line((), line, "rule")
    return Line(names, line, "edges", (has_left, has_right))


def _cells_between_spaces(line: str, spans: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """Return the cells of a line with spaces between its columns.

    Args:
        line: The line.
        spans: The columns of the rule above it. A cell may be longer than its column only at the end.
    """
    if spans and not any(line[end:start].strip() for (_, end), (start, _) in itertools.pairwise(spans)):
        ends = [end for _, end in spans[:-1]]
        starts = [start for start, _ in spans[1:]]
        pieces = [line[start:end] for start, end in zip([0, *starts], [*ends, len(line)], strict=True)]
        return tuple(piece.strip() for piece in pieces)
    return tuple(GAP.split(line.strip()))


def cells_of_csv(text: str, delimiter: str) -> Iterator[Line | None]:
    """Yield the lines of a file of values with a delimiter, and None for empty lines and comments."""
    for raw_cells in csv.reader(io.StringIO(text), delimiter=delimiter):
        cells = tuple(map(str.strip, raw_cells))
        if not any(cells) or cells[0].startswith("#"):
            yield None
        else:
            yield Line(cells, "", f"csv {delimiter}")


TAG = re.compile(r"<(?P<end>/?)(?P<name>table|thead|tr|td|th|br)\b(?P<attributes>[^<>]*)>", re.I)
"""A tag of a table."""

COLSPAN = re.compile(r"colspan\s*=\s*[\"']?(\d{1,2})\b", re.I)
"""The number of columns of a cell."""

OTHER_TAG = re.compile(r"<[a-z/!][^<>]*>", re.I)
"""A tag of another element, such as bold text."""


@dataclass
class _Page:
    """The tables of a page of HTML, and the text around them."""

    lines: list[Line | None] = field(default_factory=list)
    """The rows of its tables, with None between tables."""
    outside: list[str] = field(default_factory=list)
    """The text outside of tables."""
    cells: list[str] = field(default_factory=list)
    """The cells of the row that is read."""
    is_header: bool = True
    """True if all of them are cells of a header."""

    def add_cell(self, tag: re.Match[str]) -> None:
        """Begin a cell. One over several columns is the name of the last of them."""
        self.is_header = self.is_header and tag["name"].lower() == "th"
        span = COLSPAN.search(tag["attributes"])
        self.cells += [""] * (max(1, int(span[1])) if span is not None else 1)

    def end_row(self) -> None:
        """End a row, if one has begun."""
        if self.cells:
            cells = tuple(" ".join(unescape(OTHER_TAG.sub("", cell)).split()) for cell in self.cells)
            self.lines.append(Line(cells, " | ".join(cells), "html"))
        self.cells = []
        self.is_header = True


def cells_of_html(text: str) -> list[Line | None]:
    """Return the rows of the tables in a page of HTML or of Markdown, and the lines of cells around them.

    >>> [line and line.cells for line in cells_of_html("<table><tr><th>step</th></tr><tr><td>1</td></tr></table>")]
    [None, ('step',), ('1',), None]
    """
    page = _Page()
    depth = 0
    in_cell = False
    position = 0
    for tag in TAG.finditer(text):
        piece = text[position : tag.start()]
        position = tag.end()
        if not depth:
            page.outside.append(piece)
        elif in_cell and page.cells:
            page.cells[-1] += piece
        name = tag["name"].lower()
        if name == "table":
            page.end_row()
            page.lines.append(None)
            depth = 0 if tag["end"] else 1
            in_cell = False
        elif not depth:
            continue
        elif name == "br":
            if in_cell and page.cells:
                page.cells[-1] += " "
        elif name in ("td", "th"):
            in_cell = not tag["end"]
            if in_cell:
                page.add_cell(tag)
        else:
            page.end_row()
            in_cell = False
            if name == "thead" and tag["end"]:
                page.lines.append(Line((), "", "rule"))
    page.end_row()
    if not depth:
        page.outside.append(text[position:])
    outside = "\n".join(page.outside)
    return [*page.lines, *(cells_of_text(outside) if outside.strip() else ())]


# --- Rows ---

ROW = "row of a table"
"""The name of a row in notes."""


@dataclass(frozen=True)
class _Header:
    """The header of a table."""

    columns: tuple[Column, ...]
    step: int | None
    """The position of the column of steps; None if there is none, and rows are counted."""
    layout: str
    """The layout of its line."""
    edges: tuple[bool, bool] = (False, False)
    """The separators at the ends of its line."""
    cells: tuple[str, ...] = field(default=(), compare=False)
    """The names as they are printed."""


class TableReader:
    """A reader of the tables in lines of cells.

    Args:
        unread: The object to which rows that are not read are added.
        needs_step: True if a table must have a column of steps. Those of CSV files need none.
    """

    def __init__(self, unread: Unread, *, needs_step: bool = True):
        self.unread = unread
        self.needs_step = needs_step
        self.header: _Header | None = None
        # The rows of each header, as cells: the meaning of commas depends on all rows.
        self._bodies: list[tuple[_Header, list[Line]]] = []
        # The rows of tables without steps.
        self._others: list[Line] = []

    def read(self, lines: Iterable[Line | None]) -> Rows:
        """Return the rows of all tables."""
        # Lines of cells since the last rule.
        block: list[Line] = []
        # True until the first block since an empty line, or a line of text, has ended.
        is_first = True
        after_rule = False
        for line in lines:
            if line is not None and line.cells:
                block.append(line)
                continue
            is_rule = line is not None
            if not is_rule and after_rule and _may_be_header(block):
                continue
            after_rule = is_rule
            if block:
                self._end_block(block, is_first=is_first, has_rule=is_rule)
                is_first = False
                block = []
            if not is_rule:
                is_first = True
        self._end_block(block, is_first=is_first, has_rule=False)
        if not self._bodies:
            return []
        for line in self._others:
            self.unread.add(ROW, "it has no column of steps", line.example)
        rows: Rows = []
        for header, body in self._bodies:
            rows += self._rows(header, body)
        return rows

    def _end_block(self, block: list[Line], *, is_first: bool, has_rule: bool) -> None:
        """Read the lines between two rules, empty lines or lines of text.

        Args:
            block: The lines.
            is_first: True if no rule was between them and the last empty line or line of text.
            has_rule: True if a rule follows.
        """
        # A header in several lines ends at a rule, so that all lines of the block belong to it.
        if has_rule and 1 < len(block) <= MOST_HEADER_LINES and _same_width(block):
            cells = _join_lines(block)
            if _is_header(cells) and not any(_is_row(cells, line.cells) for line in block):
                self._begin(cells, block[0])
                return
        is_foreign = (
            is_first
            and has_rule
            and block[0].layout in ("edges", "html")
            and not any(map(_has_number, block))
        )
        for position, line in enumerate(block):
            header = self.header
            if self._begins_table(block, position, has_rule=has_rule):
                self._begin(line.cells, line)
            elif header is not None and header.cells == line.cells:
                continue
            elif is_foreign:
                # The header of a table without steps.
                self.header = None
            elif header is not None and _fits(header, line := _with_all_cells(header, line)):
                self._bodies[-1][1].append(line)
            elif line.layout in ("edges", "html") and not is_first and _has_number(line):
                self._others.append(line)

    def _begins_table(self, block: list[Line], position: int, *, has_rule: bool) -> bool:
        """Return True if a line is the header of a table."""
        line = block[position]
        if not self.needs_step and self.header is None:
            return True
        # In most rows of a CSV file the first cell is a number, and no name of a column begins with a digit.
        if line.layout.startswith("csv") and line.cells[0][:1].isdecimal():
            return False
        if not _is_header(line.cells):
            return False
        if line.layout not in ("spaces", "words"):
            return True
        # Prose has spaces too.
        if position + 1 == len(block):
            return has_rule
        cells = block[position + 1].cells
        numbers = sum(isinstance(parse_cell(cell), float) for cell in cells)
        if line.layout == "words":
            return _names_step(line.cells[0]) and numbers == len(cells) == len(line.cells)
        return numbers >= 1 and abs(len(cells) - len(line.cells)) <= 1

    def _begin(self, cells: Sequence[str], line: Line) -> None:
        """Begin a table with the names of its columns, or go on with the last one if they are the same."""
        counts: dict[str, int] = {}
        columns = []
        for position, cell in enumerate(cells):
            column = Column.of(cell)
            key = column.key or f"column {position + 1}"
            # Two columns of the same name are two keys.
            counts[key] = counts.get(key, 0) + 1
            columns.append(replace(column, key=key if counts[key] == 1 else f"{key} ({counts[key]})"))
        ranks = {position: step_rank(column.key) for position, column in enumerate(columns)}
        steps = [position for position, rank in ranks.items() if rank is not None]
        step = min(steps, key=lambda position: ranks[position] or 0, default=None)
        header = _Header(tuple(columns), step, line.layout, line.edges, line.cells)
        if not self._bodies or self._bodies[-1][0] != header:
            self._bodies.append((header, []))
        self.header = header

    def _rows(self, header: _Header, body: list[Line]) -> Rows:
        """Return the rows of a table."""
        cells = [_aligned(header, line) for line in body]
        comma = meaning_of_comma(
            (cell for row in cells if row for cell in row), is_semicolon=header.layout == "csv ;"
        )
        rows: Rows = []
        for line, row_cells in zip(body, cells, strict=True):
            if row_cells is None:
                self.unread.add(ROW, "it has more cells than the header", line.example, is_lost=True)
                continue
            row: dict[str, Any] = {}
            # The last cell of a truncated row may be an incomplete number.
            is_whole = len(row_cells) == len(header.columns)
            for position, cell in enumerate(row_cells):
                column = header.columns[position]
                value = parse_cell(cell, column.scale, comma)
                if value is None:
                    continue
                if column.key in RUN_KEYS and not PLAIN_NUMBER.fullmatch(cell):
                    # A run may have the name 2x.
                    value = cell
                if not is_whole and position == len(row_cells) - 1 and position != header.step:
                    value = f"{cell} (the row ends here)"
                row[column.key] = value
            if not row:
                continue
            if header.step is not None:
                step = row.get(header.columns[header.step].key)
                if not isinstance(step, float):
                    cell = row_cells[header.step] if header.step < len(row_cells) else ""
                    step = step_of_cell(cell, comma)
                if step is None:
                    if _has_no_number(row):
                        continue
                    self.unread.add(ROW, "it has no step", line.example)
                    continue
                row.pop(header.columns[header.step].key, None)
                row = {"step": step} | row
            rows.append(row)
        return rows


PLAIN_NUMBER = re.compile(r"\d+(?:\.\d*)?")
"""A number in the column of a run's name, which may be its index."""

MOST_HEADER_LINES = 6
"""The largest number of lines of a header."""


def _has_no_number(row: dict[str, Any]) -> bool:
    """Return True if a row has only text, such as the further lines of a cell with a long text."""
    return all(isinstance(value, str) for value in row.values())


def _same_width(block: Sequence[Line]) -> bool:
    return len({len(line.cells) for line in block}) == 1


STEP_WORD = re.compile(r"step|iter|batch", re.I)
"""A part of every name of a column of steps."""


@lru_cache(maxsize=4096)
def _names_step(cell: str) -> bool:
    """Return True if a cell is the name of a column of steps."""
    return step_rank(Column.of(cell).key) is not None


def _may_be_header(block: Sequence[Line]) -> bool:
    """Return True if lines after a rule may be the first ones of a header, which an empty line interrupts."""
    is_box = 0 < len(block) < MOST_HEADER_LINES and block[0].layout == "edges"
    return is_box and not any(map(_has_number, block))


def _has_number(line: Line) -> bool:
    """Return True if a cell of a line is a number."""
    return any(isinstance(parse_cell(cell), float) for cell in line.cells)


def _is_header(cells: Sequence[str]) -> bool:
    """Return True if cells are the names of columns, one of them that of the steps."""
    names = [cell for cell in cells if len(cell) <= LONGEST_CELL and STEP_WORD.search(cell)]
    if len(cells) < 2 or not any(map(_names_step, names)):
        return False
    return not any(isinstance(parse_cell(cell), float) for cell in cells)


def _is_row(header: Sequence[str], cells: Sequence[str]) -> bool:
    """Return True if cells have a step below a header of steps."""
    places = [position for position, cell in enumerate(header) if _names_step(cell)]
    return any(_is_step(cells[position]) for position in places)


def _join_lines(block: Sequence[Line]) -> list[str]:
    """Return the names of columns whose parts are in several lines.

    >>> _join_lines([Line(("Step", "completions/"), "", "edges"), Line(("", "mean_length"), "", "edges")])
    ['Step', 'completions/mean_length']
    >>> _join_lines([Line(("Step", "learning"), "", "edges"), Line(("", "rate"), "", "edges")])
    ['Step', 'learning rate']
    """
    names = []
    for parts in zip(*(line.cells for line in block), strict=True):
        parts = [part for part in parts if part]
        if len(parts) > 2 and parts[-2] == "---" and TYPE_OF_COLUMN.fullmatch(parts[-1]):
            parts = parts[:-2]
        together = "".join(parts)
        apart = " ".join(parts)
        is_together = is_known_key(Column.of(together).key) or _names_step(together)
        is_apart = is_known_key(Column.of(apart).key) or _names_step(apart)
        ends_open = all(part.endswith(("/", "_")) for part in parts[:-1])
        names.append(together if is_together or (ends_open and not is_apart) else apart)
    return names


def _with_all_cells(header: _Header, line: Line) -> Line:
    """Return a line of a table with spaces between its columns, also if only one is before a number with a sign.

    pandas prints ``0     1 -0.5``.
    """
    if line.layout != "spaces" or not any(" -" in cell for cell in line.cells):
        return line
    words = line.text.split()
    is_whole = len(words) - len(header.columns) in (0, 1) and all(
        isinstance(parse_cell(word), (float, type(None))) or word in WORDS.values() for word in words
    )
    return line._replace(cells=tuple(words)) if is_whole else line


def _fits(header: _Header, line: Line) -> bool:
    """Return True if a line may be a row of a table."""
    if line.layout != header.layout:
        return False
    if line.layout not in ("spaces", "words"):
        return True
    # Prose has spaces too.
    numbers = sum(isinstance(parse_cell(cell), (float, type(None))) for cell in line.cells)
    if line.layout == "words":
        return numbers == len(line.cells) == len(header.columns)
    extra = len(line.cells) - len(header.columns)
    if extra < 0:
        return header.step == 0 and _is_step(line.cells[0])
    cells = _aligned(header, line)
    if cells is None:
        return False
    has_step = header.step is not None and _is_step(cells[header.step])
    return has_step or numbers * 2 >= len(line.cells)


def _aligned(header: _Header, line: Line) -> Sequence[str] | None:
    """Return the cells of a row in the order of the columns; None if they are too many."""
    cells = line.cells
    # Without separators at the ends of lines, an empty cell at an end looks like one.
    if line.edges[0] and not header.edges[0]:
        cells = ("", *cells)
    if line.edges[1] and not header.edges[1]:
        cells = (*cells, "")
    extra = len(cells) - len(header.columns)
    if extra <= 0:
        return cells
    if extra == 1 and line.layout == "spaces" and _is_step(line.cells[0]):
        # pandas prints an index without a name.
        return cells[1:]
    return None if any(cells[-extra:]) else cells[:-extra]


STEP_TEXT = re.compile(
    r"(?:(?:step|iteration|iter|batch|update)[ :_#-]{0,2}|#)?(?P<number>\d[\d,.' ]*)(?:\s?/\s?\d+)?", re.I
)
"""A step with a word before it, or the number of all steps after it."""


def step_of_cell(text: str, comma: str = "thousands") -> float | None:
    """Return the step in a cell; None if it has none.

    >>> step_of_cell("**1,000**"), step_of_cell("240/960"), step_of_cell("step 3"), step_of_cell("mean")
    (1000.0, 240.0, 3.0, None)
    """
    text = without_marks(text)
    match = STEP_TEXT.fullmatch(text)
    value = parse_cell(text if match is None else match["number"], comma=comma)
    return value if isinstance(value, float) else None


def _is_step(text: str) -> bool:
    return step_of_cell(text) is not None


# --- Readers ---


def table_rows(text: str, unread: Unread | None = None) -> Rows:
    r"""Return the rows of the tables with a column of steps in a text; empty if there are none.

    Args:
        text: Text with tables of any layout.
        unread: An object to which rows that are not read are added.

    >>> table_rows("Step | reward | completions / mean_length\n-- | -- | --\n**1** | 0.5 | 12.0")
    [{'step': 1.0, 'reward': 0.5, 'completions/mean_length': 12.0}]
    """
    unread = Unread() if unread is None else unread
    is_html = re.search(r"<table\b", text, re.I) is not None
    return TableReader(unread).read(cells_of_html(text) if is_html else cells_of_text(text))


def csv_rows(text: str, delimiter: str, unread: Unread) -> Rows:
    """Return the rows of a file of values with a delimiter. Its first line that is no comment has the names."""
    return TableReader(unread, needs_step=False).read(cells_of_csv(text, delimiter))
