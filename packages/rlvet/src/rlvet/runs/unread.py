"""Rows of a log that were not read: their number, the reason, and an example of each."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlvet.runs.limits import LONGEST_ROW

LONGEST_EXAMPLE = 80
"""The largest number of characters of a row that is shown as an example."""

STEPS_COUNTED = (
    "no row has its step: a step is the number of a row here, which may stand for several training steps"
)
"""The remark on rows without a step."""


@dataclass
class Unread:
    """The rows of a file that a reader has recognised, but not read.

    >>> unread = Unread()
    >>> unread.add("row of a table", "it has no step", "| mean | 0.5 |")
    >>> unread.count, unread.notes()
    (1, ("1 row of a table is not read, as it has no step: '| mean | 0.5 |'",))
    """

    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    """The number of rows, by their name in the singular and the reason."""
    examples: dict[tuple[str, str], str] = field(default_factory=dict)
    """The first row of each."""
    texts: list[str] = field(default_factory=list)
    """The texts of all rows, without those that were added without a text of their own."""
    lost: int = 0
    """The number of rows with metrics that no other row has."""
    remarks: list[str] = field(default_factory=list)
    """Sentences about rows that are read, such as one on how their steps were found."""

    def add(self, name: str, reason: str, example: str, count: int = 1, *, is_lost: bool = False) -> None:
        """Count rows.

        Args:
            name: What a row is, in the singular, such as ``row of a table``.
            reason: Why it is not read, as a clause about one row.
            example: The text of the first one.
            count: The number of rows.
            is_lost: True if the rows have metrics that are in no row which is read.
        """
        key = (name, reason)
        self.counts[key] = self.counts.get(key, 0) + count
        self.examples.setdefault(key, example.strip()[:LONGEST_EXAMPLE])
        if count == 1 and any(character.isdigit() for character in example):
            self.texts.append(example[:LONGEST_ROW])
        self.lost += count if is_lost else 0

    def add_all(self, other: Unread) -> None:
        """Count the rows of another reader."""
        for (name, reason), count in other.counts.items():
            key = (name, reason)
            self.counts[key] = self.counts.get(key, 0) + count
            self.examples.setdefault(key, other.examples[key])
        self.texts += other.texts
        self.lost += other.lost
        self.remarks += other.remarks

    @property
    def count(self) -> int:
        """The number of rows."""
        return sum(self.counts.values())

    def notes(self) -> tuple[str, ...]:
        """Return a sentence for each reason, after the remarks."""
        notes = list(dict.fromkeys(self.remarks))
        for (name, reason), count in self.counts.items():
            rows = name if count == 1 else _plural(name)
            verb = "is" if count == 1 else "are"
            example = self.examples[name, reason]
            notes.append(
                f"{count} {rows} {verb} not read, as {reason}" + (f": {example!r}" if example else "")
            )
        return tuple(notes)


def _plural(name: str) -> str:
    """Return the plural of what a row is.

    >>> _plural("row of a table"), _plural("printed row"), _plural("dictionary")
    ('rows of a table', 'printed rows', 'dictionaries')
    """
    noun, of, rest = name.partition(" of ")
    noun = f"{noun.removesuffix('y')}ies" if noun.endswith("y") else f"{noun}s"
    return noun + of + rest
