"""What is said of a study after it has run: its data stay as they are, and what was added later is told apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bandpo.errors import InvalidValue
from bandpo_lab.file_models import FileModel, checked, read_yaml
from bandpo_lab.study.plan import Study

FILE = "afterwards.yaml"
"""Its name, beside ``results.json``."""


class Pair(FileModel):
    """Two arms, compared over all experiments that have both."""

    arm: str
    minus: str
    why: str
    """What the comparison shows, in a sentence or two."""


class Afterwards(FileModel):
    """Remarks, seeds that had been seen, and comparisons that nobody announced."""

    superseded: str = ""
    """What took the study's place, and why. The page begins with it."""
    remarks: Sequence[str] = ()
    """One paragraph each."""
    seen: Mapping[str, Sequence[int]] = {}
    """By experiment: seeds whose results were known when the others were added."""
    pairs: Mapping[str, Pair] = {}
    """By title: comparisons of two arms."""


def parse_afterwards(text: str, study: Study) -> Afterwards:
    """Read the file.

    Raises:
        ValueError: unknown keys, or a name or seed that the study does not have; named in the message.
    """
    said = checked(Afterwards, read_yaml(text, FILE), FILE)
    for pair in said.pairs.values():
        if unknown := {pair.arm, pair.minus} - study.arms.keys():
            raise InvalidValue(f"{FILE}: unknown arms {', '.join(sorted(unknown))}")
    for name, seeds in said.seen.items():
        known = study.experiments[name].seeds if name in study.experiments else ()
        if unknown := set(seeds).difference(known):
            raise InvalidValue(
                f"{FILE}: experiment {name!r} has no seeds {', '.join(map(str, sorted(unknown)))}"
            )
    return said
