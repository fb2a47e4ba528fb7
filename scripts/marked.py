"""Write tables into a page between two markers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


def write_between_marks(page: Path, name: str, lines: Sequence[str]) -> None:
    """Replace the lines of a page between ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``."""
    begin = f"<!-- {name}: begin -->"
    end = f"<!-- {name}: end -->"
    text = re.sub(
        f"{begin}.*{end}",
        lambda _: "\n".join([begin, *lines, end]),
        page.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    page.write_text(text, encoding="utf-8")
