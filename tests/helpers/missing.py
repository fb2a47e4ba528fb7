"""Fail with the file to add to and the lines to copy."""

from collections.abc import Callable, Iterable

import pytest


def require(
    missing: Iterable[str], file: str, line: Callable[[str], str], where: str = "", why: str = ""
) -> None:
    """Fail if a name is missing from a file.

    Args:
        missing: The names that the file lacks; the check passes if there are none.
        file: The path of the file, from the repository's root.
        line: Returns the line to add for a name.
        where: The table or the section of the file that the line belongs to.
        why: What was observed, in sentences, if the name of what is missing does not say it.
    """
    names = list(missing)
    if not names:
        return
    place = f"Add to {where}" if where else "Add"
    lines = "\n".join(line(name) for name in names)
    observed = f" {why}" if why else ""
    pytest.fail(f"{file} lacks {', '.join(names)}.{observed} {place}:\n\n{lines}\n", pytrace=False)
