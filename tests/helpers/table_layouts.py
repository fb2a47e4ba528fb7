"""Tables of metrics, printed in a random layout with random damage, and what a reader must make of them."""

from __future__ import annotations

import csv
import html
import io
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

COLUMNS = {
    "reward": (-1.0, 2.0),
    "kl": (0.0, 0.9),
    "entropy": (0.0, 2.0),
    "grad_norm": (0.0, 9.0),
    "completions/mean_length": (20.0, 9000.0),
    "frac_reward_zero_std": (0.0, 1.0),
    "rewards/format/mean": (0.0, 1.0),
    "learning_rate": (1e-7, 1e-4),
    "my/score": (0.0, 1.0),
    "num_tokens": (1e3, 1e6),
}
"""Columns with the range of their values. ``my/score`` is no known key, and ``num_tokens`` is a counter."""

LAYOUTS = (
    "markdown",
    "markdown without edges",
    "rich",
    "grid",
    "psql",
    "simple",
    "rst",
    "plain",
    "pandas",
    "tsv",
    "csv",
    "semicolons",
    "html",
    "pandas in html",
    "notebook",
    "text in a notebook",
)

MISSING = ("", "-", "—", "n/a", "No Log", "None")
"""Cells without a value."""

NOT_NUMBERS = ("?", "0.4…", "see note", "0.1.2")
"""Cells with a value that cannot be known."""


@dataclass
class Layout:
    """A printed table, and its rows, keys and values."""

    name: str
    """The name of the file."""
    text: str
    """The content of the file."""
    keys: list[str]
    """The keys of the columns, in lower case, without the step."""
    values: dict[int, dict[str, float]]
    """The values of each row that has a step, by step and key."""
    rows: int
    """The number of rows, those without a step included."""
    unreadable: dict[str, int] = field(default_factory=dict)
    """The number of cells, in rows with a step, whose value cannot be known, by key."""
    damage: list[str] = field(default_factory=list)
    """What was done to the table."""


def printed_number(draw: random.Random, value: float, places: int, *, thousands: str) -> tuple[str, float]:
    """Return a number as text, and the value of the text."""
    if value < 1e-3:
        text = f"{value:.2e}"
        return text, float(text)
    text = f"{value:.{places}f}"
    number = float(text)
    if thousands and number >= 1000:
        text = f"{number:,.{places}f}".replace(",", thousands)
    return text, number


def random_layout(seed: int, layouts: Sequence[str] = LAYOUTS) -> Layout:
    """Print a random table in a random layout with random damage."""
    draw = random.Random(seed)
    layout = draw.choice(layouts)
    names = ["reward", *draw.sample([name for name in COLUMNS if name != "reward"], draw.randint(1, 6))]
    draw.shuffle(names)
    damage = []

    def chance(name: str, share: float) -> bool:
        if draw.random() < share:
            damage.append(name)
            return True
        return False

    is_marked_up = layout in ("markdown", "markdown without edges", "html", "pandas in html", "notebook")
    is_text = layout not in ("csv", "semicolons", "tsv")
    case = draw.choice(("as logged", "as logged", "upper", "title", "words"))
    damage.append(case)
    spaced_slashes = case != "words" and chance("spaces around slashes", 0.2)
    thousands = draw.choice((",", " ", "'")) if chance("thousands", 0.3) else ""
    if layout == "csv" and thousands == ",":
        thousands = "," if draw.random() < 0.5 else ""
    if thousands == " " and layout in ("plain", "pandas", "simple", "rst"):
        thousands = ","
    percent = {name for name in names if name in ("frac_reward_zero_std", "rewards/format/mean")}
    percent = percent if chance("percent", 0.3) else set()
    percent_in_header = bool(percent) and draw.random() < 0.5
    units = chance("units", 0.2)
    bold_share = draw.choice((0.2, 0.6)) if is_marked_up and chance("bold", 0.5) else 0.0
    missing_share = 0.1 if chance("missing cells", 0.3) else 0.0
    broken_share = 0.05 if chance("cells without a number", 0.3) else 0.0
    has_text = chance("a column of text", 0.25)
    repeat = draw.randint(3, 8) if chance("repeated headers", 0.25) else 0
    blanks = is_text and layout not in ("html", "pandas in html", "notebook") and chance("blank lines", 0.25)
    footnotes = is_text and chance("footnotes", 0.3)
    without_step = chance("rows without a step", 0.25)
    step_place = 0 if draw.random() < 0.7 else draw.randint(0, len(names))
    if layout == "markdown without edges" and step_place == 0 and missing_share:
        missing_share = 0.0

    def header_of(name: str) -> str:
        text = name
        if case == "upper":
            text = text.upper()
        elif case == "title":
            text = text.title()
        elif case == "words":
            text = text.replace("_", " ").title()
        if spaced_slashes:
            text = text.replace("/", " / ")
        if name in percent and percent_in_header:
            text += " (%)"
        elif name == "completions/mean_length" and units:
            text += draw.choice((" (tokens)", " [tokens]"))
        return text

    step_name = draw.choice(("step", "Step", "STEP", "Global Step", "iteration", "global_step"))
    columns = list(names)
    if has_text:
        columns.insert(draw.randint(0, len(columns)), "note")
    step_place = min(step_place, len(columns))
    header = [header_of(name) for name in columns]
    header.insert(step_place, step_name)

    rows: list[list[str]] = []
    values: dict[int, dict[str, float]] = {}
    unreadable: dict[str, int] = {}
    step = draw.randint(0, 5)
    width = draw.choice((1, 1, 5, 10))
    places = draw.choice((3, 4, 6))
    count = draw.randint(3, 40)
    for _ in range(count):
        cells: list[str] = []
        row: dict[str, float] = {}
        for name in columns:
            if name == "note":
                cells.append(draw.choice(("saved", "best", "warm", "x")))
                continue
            if draw.random() < missing_share:
                cells.append(
                    draw.choice(MISSING[1:] if layout in ("plain", "pandas", "simple", "rst") else MISSING)
                )
                continue
            if draw.random() < broken_share:
                cells.append(draw.choice(NOT_NUMBERS))
                unreadable[name] = unreadable.get(name, 0) + 1
                continue
            low, high = COLUMNS[name]
            value = draw.uniform(low, high)
            if name in percent:
                text, number = printed_number(draw, 100 * value, 1, thousands="")
                row[name] = number / 100
                text += "" if percent_in_header else draw.choice(("%", " %"))
            else:
                text, row[name] = printed_number(draw, value, places, thousands=thousands)
                if name == "completions/mean_length" and units and "token" not in header[-1]:
                    text += draw.choice((" tokens", " tok", ""))
            cells.append(text)
        step_text = f"{step:,}".replace(",", thousands) if thousands else str(step)
        cells.insert(step_place, step_text)
        values[step] = row
        if draw.random() < bold_share:
            marks = draw.choice(("**", "__", "*", "`"))
            if "html" in layout or layout == "notebook":
                cells = [f"<b>{cell}</b>" if cell else cell for cell in cells]
            else:
                bold_cells = [draw.random() < 0.7 for _ in cells]
                cells = [
                    f"{marks}{cell}{marks}" if cell and is_bold else cell
                    for cell, is_bold in zip(cells, bold_cells, strict=True)
                ]
        rows.append(cells)
        step += width

    if without_step:
        summary = ["0.5"] * len(header)
        summary[step_place] = draw.choice(("mean", "best", "avg."))
        rows.append(summary)
    printers = {
        "markdown": lambda: print_markdown(draw, header, rows, repeat, edges=True),
        "markdown without edges": lambda: print_markdown(draw, header, rows, repeat, edges=False),
        "rich": lambda: print_box(draw, header, rows, repeat, "rich"),
        "grid": lambda: print_box(draw, header, rows, repeat, "grid"),
        "psql": lambda: print_box(draw, header, rows, repeat, "psql"),
        "simple": lambda: print_simple(draw, header, rows, repeat, "simple"),
        "rst": lambda: print_simple(draw, header, rows, repeat, "rst"),
        "plain": lambda: print_simple(draw, header, rows, repeat, "plain"),
        "pandas": lambda: print_simple(draw, header, rows, repeat, "pandas"),
        "tsv": lambda: print_separated(header, rows, repeat, "\t"),
        "csv": lambda: print_separated(header, rows, repeat, ","),
        "semicolons": lambda: print_separated(header, rows, repeat, ";"),
        "html": lambda: print_html(header, rows, repeat, is_pandas=False),
        "pandas in html": lambda: print_html(header, rows, repeat, is_pandas=True),
        "notebook": lambda: print_html(header, rows, repeat, is_pandas=draw.random() < 0.5),
        "text in a notebook": lambda: print_box(draw, header, rows, repeat, "psql"),
    }
    lines = printers[layout]()
    if blanks:
        place = draw.randint(len(lines) // 2, len(lines))
        lines.insert(place, "")
    if footnotes and layout not in ("html", "pandas in html", "notebook"):
        lines = [
            "The course of my run, as printed:",
            "",
            *lines,
            "",
            "* bold rows are the best",
            "(1) one GPU",
        ]
    text = "\n".join(lines) + "\n"
    ending = {"csv": "csv", "semicolons": "csv", "tsv": "tsv", "html": "html", "pandas in html": "html"}
    name = f"table.{ending.get(layout, draw.choice(('md', 'txt', 'log')))}"
    if layout in ("notebook", "text in a notebook"):
        name = "train.ipynb"
        text = notebook(draw, text, is_html=layout == "notebook")
    return Layout(
        name, text, [column.lower() for column in columns], values, len(rows), unreadable, [layout, *damage]
    )


def print_markdown(draw, header, rows, repeat, *, edges):
    widths = [0] * len(header)
    if draw.random() < 0.5:
        widths = [max(len(row[place]) for row in [header, *rows]) for place in range(len(header))]

    def line(cells):
        text = " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return f"| {text} |" if edges else text.rstrip()

    rule = [draw.choice(("---", ":--", "--:", ":-:", "--")) for _ in header]
    lines = [line(header), line(rule)]
    for number, row in enumerate(rows):
        if repeat and number and number % repeat == 0:
            lines += [line(header), line(rule)]
        lines.append(line(row))
    return lines


def wrapped(cells, limit):
    """Return a header in one or more lines; a name that is longer than the limit is broken after a slash or an _."""
    parts_of_cells = []
    for cell in cells:
        parts = [cell]
        while len(parts[-1]) > limit:
            last = parts.pop()
            place = max(last.rfind(mark, 1, limit) for mark in ("/", "_", " "))
            if place < 1:
                parts.append(last)
                break
            parts += [last[: place + 1].rstrip(), last[place + 1 :].lstrip()]
        parts_of_cells.append(parts)
    height = max(map(len, parts_of_cells))
    return [[parts[line] if line < len(parts) else "" for parts in parts_of_cells] for line in range(height)]


def print_box(draw, header, rows, repeat, style):
    limit = draw.choice((8, 12, 99))
    header_lines = wrapped(header, limit)
    widths = [max(len(row[place]) for row in [*header_lines, *rows]) for place in range(len(header))]
    edge, across = {"rich": ("│", "─"), "grid": ("|", "-"), "psql": ("|", "-")}[style]
    left = draw.random() < 0.5

    def line(cells, mark=edge):
        padded = [
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width in zip(cells, widths, strict=True)
        ]
        return f"{mark} {f' {mark} '.join(padded)} {mark}"

    def rule(start, middle, end, dash=across):
        return start + middle.join(dash * (width + 2) for width in widths) + end

    if style == "rich":
        top = [
            rule("┏", "┳", "┓", "━"),
            *[line(part, "┃") for part in header_lines],
            rule("┡", "╇", "┩", "━"),
        ]
        bottom = rule("└", "┴", "┘")
        between = []
    elif style == "grid":
        top = [rule("+", "+", "+"), *map(line, header_lines), rule("+", "+", "+", "=")]
        bottom = rule("+", "+", "+")
        between = [rule("+", "+", "+")]
    else:
        top = [rule("+", "+", "+"), *map(line, header_lines), rule("|", "+", "|")]
        bottom = rule("+", "+", "+")
        between = []
    lines = list(top)
    for number, row in enumerate(rows):
        if number:
            lines += between
        if repeat and number and number % repeat == 0:
            lines += top[0 if not between else 1 :]
        lines.append(line(row))
    return [*lines, bottom]


def print_simple(draw, header, rows, repeat, style):
    if style == "pandas":
        header = ["", *header]
        rows = [[str(number), *row] for number, row in enumerate(rows)]
    widths = [max(len(row[place]) for row in [header, *rows]) for place in range(len(header))]
    left = style != "pandas" and draw.random() < 0.3

    def line(cells):
        padded = [
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width in zip(cells, widths, strict=True)
        ]
        return "  ".join(padded).rstrip()

    rule = "  ".join(("=" if style == "rst" else "-") * width for width in widths)
    top = {"simple": [line(header), rule], "rst": [rule, line(header), rule]}.get(style, [line(header)])
    lines = list(top)
    for number, row in enumerate(rows):
        if repeat and number and number % repeat == 0:
            lines += top
        lines.append(line(row))
    return [*lines, rule] if style == "rst" else lines


def print_separated(header, rows, repeat, separator):
    file = io.StringIO()
    writer = csv.writer(file, delimiter=separator, lineterminator="\n")
    writer.writerow(header)
    for number, row in enumerate(rows):
        if repeat and number and number % repeat == 0:
            writer.writerow(header)
        writer.writerow(row)
    return file.getvalue().splitlines()


def print_html(header, rows, repeat, *, is_pandas):
    """Print as pandas' to_html does, or as the progress callback of transformers for notebooks."""

    def cell(text, tag):
        is_bold = text.startswith("<b>")
        text = html.escape(text.removeprefix("<b>").removesuffix("</b>"))
        return f"<{tag}><b>{text}</b></{tag}>" if is_bold else f"<{tag}>{text}</{tag}>"

    names = ["", *header] if is_pandas else header
    head = [
        '    <tr style="text-align: left;">',
        *[f"      {cell(name, 'th')}" for name in names],
        "    </tr>",
    ]
    lines = ['<table border="1" class="dataframe">', "  <thead>", *head, "  </thead>", "  <tbody>"]
    for number, row in enumerate(rows):
        if repeat and number and number % repeat == 0:
            lines += head
        start = [f"      {cell(str(number), 'th')}"] if is_pandas else []
        lines += ["    <tr>", *start, *[f"      {cell(text, 'td')}" for text in row], "    </tr>"]
    lines += ["  </tbody>", "</table><p>"]
    return lines if is_pandas else ["<div><progress value='7' max='7'></progress>[7/7 00:12]</div>", *lines]


def notebook(draw, text, *, is_html):
    """Return a notebook with a text in the output of a cell."""
    lines = text.splitlines(keepends=True)
    content = lines if draw.random() < 0.5 else text
    if is_html:
        output = {
            "output_type": "display_data",
            "data": {"text/html": content, "text/plain": ["<IPython.core.display.HTML object>"]},
            "metadata": {},
        }
    else:
        output = {"output_type": "stream", "name": "stdout", "text": content}
    other = {"output_type": "stream", "name": "stderr", "text": "Unsloth: will patch your computer\n"}
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["# Training"]},
        {"cell_type": "code", "metadata": {}, "source": ["trainer.train()"], "outputs": [other, output]},
    ]
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, indent=1)
