"""Consoles, a file for each: what a trainer prints, its reader, and the consoles whose readers are asked later.

A file ends with ``CONSOLE``, and nothing lists it: `CONSOLES` is made from the files of this folder. The patterns
follow the frameworks' source code, to which ``packages/rlvet/tests/runs/test_consoles.py`` refers.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import Mapping
from graphlib import TopologicalSorter

from rlvet.runs.consoles._console import Console, Rows
from rlvet.runs.consoles._printed import ESCAPES
from rlvet.runs.consoles.trl import has_training_metric
from rlvet.runs.unread import Unread


def in_order(consoles: Mapping[str, Console]) -> dict[str, Console]:
    """Return consoles, each before those that it names, and by their names where that leaves a choice.

    Raises:
        LookupError: if one is before a console that does not exist.
        ValueError: if one is before itself.
    """
    earlier: dict[str, set[str]] = {name: set() for name in sorted(consoles)}
    for name, console in consoles.items():
        for later in console.before:
            if later not in earlier:
                raise LookupError(f"{name} is before {later!r}: no file of this folder has this name")
            earlier[later].add(name)
    sorter = TopologicalSorter(earlier)
    sorter.prepare()
    ordered: dict[str, Console] = {}
    while sorter.is_active():
        names = sorted(sorter.get_ready())
        ordered |= {name: consoles[name] for name in names}
        sorter.done(*names)
    return ordered


CONSOLES: Mapping[str, Console] = in_order(
    {
        module.name: importlib.import_module(f"{__name__}.{module.name}").CONSOLE
        for module in pkgutil.iter_modules(__path__)
        if not module.name.startswith("_")
    }
)
"""The consoles by the names of their files, in the order in which a text is given to them."""


def printed_trainings(text: str) -> tuple[list[Rows], Unread]:
    r"""Return the rows of each training in console output, and the lines that were recognised but not read.

    The first console that finds rows is used.

    >>> [[row]], _ = printed_trainings("Step 2 | 1.00s | Loss 0.1\nStep 2 | 1.00s | Reward 0.5 | Truncation 10.0%")
    >>> row["step"], row["loss/mean"], row["reward/mean"], row["is_truncated/mean"]
    (2, 0.1, 0.5, 0.1)
    """
    text = ESCAPES.sub("", text)
    trainings: list[Rows] = []
    unread = Unread()
    for console in CONSOLES.values():
        unread_of_console = Unread()
        found = console.trainings(text, unread_of_console)
        if found or not trainings:
            trainings = found
            unread = unread_of_console
        rows = itertools.chain.from_iterable(trainings)
        if trainings and not (console.may_be_settings and not any(map(has_training_metric, rows))):
            break
    return trainings, unread
