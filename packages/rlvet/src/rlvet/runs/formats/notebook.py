"""Read the outputs of a notebook."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvet.errors import InvalidValue
from rlvet.runs.formats._content import decode
from rlvet.runs.formats._format import Format, NoLog, RawLog
from rlvet.runs.formats.console import runs_of_text

TRAINER = re.compile(r"\b(GRPO|RLOO|PPO)(?:Trainer|Config)\b")
"""A trainer of RL in the code of a notebook."""


def read_notebook(file: Path) -> RawLog:
    """Read the outputs of a notebook's cells: tables, and what was printed."""
    content_of_file = decode(file)
    try:
        content = json.loads(content_of_file)
        texts = list(_outputs(content))
    except (ValueError, RecursionError, TypeError, AttributeError) as error:
        raise InvalidValue(f"{file} is no notebook, or only a part of one ({error!r:.300})") from error
    text = "\n\n".join(texts)
    runs, unread = runs_of_text(text)
    if not runs:
        raise NoLog(f"{file} is a notebook, and none of its outputs has a row of metrics")
    code = "\n".join(_joined(cell.get("source", "")) for cell in content["cells"])
    trainer = TRAINER.search(code)
    return RawLog(runs, unread=unread, trainer="" if trainer is None else trainer[1])


def _outputs(notebook: Mapping[str, Any]) -> Iterable[str]:
    """Yield the text of each output of a notebook, as HTML if that has a table."""
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            page = _joined(data.get("text/html", ""))
            if re.search(r"<table\b", page, re.I):
                yield page
            else:
                yield _joined(data.get("text/plain", "")) + _joined(output.get("text", ""))


def _joined(text: str | Sequence[str]) -> str:
    """Return a text that a notebook stores as one string, or as a list of lines."""
    return text if isinstance(text, str) else "".join(text)


FORMAT = Format(
    kind="a notebook",
    patterns=(),
    if_named=("*.ipynb",),
    read=read_notebook,
    example="a notebook (.ipynb)",
    described="a notebook, `.ipynb`: the tables and the text in the outputs of its cells",
    written_by="TRL, Unsloth",
)
