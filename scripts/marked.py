"""Write tables into a page between two markers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


def write_between_marks(page: Path, name: str, lines: Sequence[str]) -> None:
    """Replace the lines of a page between ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``.

    Raises:
        ValueError: The page does not have the marks.
    """
    begin = f"<!-- {name}: begin -->"
    end = f"<!-- {name}: end -->"
    text, replaced = re.subn(
        f"{begin}.*{end}",
        lambda _: "\n".join([begin, *lines, end]),
        page.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    if not replaced:
        raise ValueError(f"{page} does not have the marks of {name}")
    page.write_text(text, encoding="utf-8")
