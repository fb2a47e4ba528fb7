"""What is said of a study after it has run: its data stay as they are, and what was added later is told apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import yaml

from bandpo.lab.study.plan import Study, build

FILE = "afterwards.yaml"
"""Its name, beside ``results.json``."""


@dataclass(frozen=True)
class Pair:
    """Two arms, compared over all experiments that have both."""

    arm: str
    minus: str
    why: str
    """What the comparison shows, in a sentence or two."""


@dataclass(frozen=True)
class Afterwards:
    """Remarks, seeds that had been seen, and comparisons that nobody announced."""

    remarks: Sequence[str] = ()
    """One paragraph each."""
    seen: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """By experiment: seeds whose results were known when the others were added."""
    pairs: Mapping[str, Pair] = field(default_factory=dict)
    """By title: comparisons of two arms."""


def parse_afterwards(text: str, study: Study) -> Afterwards:
    """Read the file.

    Raises:
        ValueError: unknown keys, or a name or seed that the study does not have; named in the message.
    """
    raw = yaml.safe_load(text) or {}
    raw["pairs"] = {
        title: build(Pair, pair, f"pair {title!r}") for title, pair in raw.get("pairs", {}).items()
    }
    said = build(Afterwards, raw, FILE)
    for pair in said.pairs.values():
        if unknown := {pair.arm, pair.minus} - study.arms.keys():
            raise ValueError(f"{FILE}: unknown arms {', '.join(sorted(unknown))}")
    for name, seeds in said.seen.items():
        known = {seed for e in study.experiments if e.name == name for seed in e.seeds}
        if unknown := set(seeds) - known:
            raise ValueError(
                f"{FILE}: experiment {name!r} has no seeds {', '.join(map(str, sorted(unknown)))}"
            )
    return said
