"""The steps that are missing in a record whose run was resumed.

A resumed process writes another file, from the step of its checkpoint on. If the last losses before the checkpoint did
not reach the disk, as after a loss of power, the steps of two files are not consecutive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rlvet.records.format import FILE_NAME


@dataclass
class _Steps:
    """The steps of one file."""

    opening: int
    """The number of files that the process opened before."""
    first: int
    last: int
    largest_increment: int = 1


class StepGaps:
    """The steps of each file of a record, and those that are missing between them.

    >>> gaps = StepGaps()
    >>> for name, step in (("tokens-00000-0000.arrow", 0), ("tokens-00000-0001.arrow", 4)):
    ...     gaps.add(Path(name), step)
    >>> list(gaps.messages())
    ['process 0: the losses of steps 1 to 3 are missing, before tokens-00000-0001.arrow']
    """

    def __init__(self) -> None:
        self._by_process: dict[int, list[_Steps]] = {}

    def add(self, file: Path, step: int | None) -> None:
        """Add a loss, in the order in which a record is read."""
        match = FILE_NAME.fullmatch(file.name)
        if match is None or step is None:
            return
        files = self._by_process.setdefault(int(match[1]), [])
        if not files or files[-1].opening != int(match[2]):
            files.append(_Steps(int(match[2]), step, step))
        steps = files[-1]
        steps.largest_increment = max(steps.largest_increment, step - steps.last)
        steps.last = max(steps.last, step)

    def messages(self) -> Iterator[str]:
        """Yield a sentence for each gap. Steps that the run did not record in any file are no gap."""
        for process, files in self._by_process.items():
            increment = max(steps.largest_increment for steps in files)
            earlier_file_is_missing = files[0].opening > 0
            if earlier_file_is_missing and files[0].first > increment:
                name = _file_name(process, files[0])
                yield (
                    f"process {process}: the losses before step {files[0].first} are missing, as no file before {name} "
                    "holds any"
                )
            for previous, steps in pairwise(files):
                if steps.first - previous.last > increment:
                    name = _file_name(process, steps)
                    missing = _span(previous.last + 1, steps.first - 1)
                    yield f"process {process}: the losses of {missing} are missing, before {name}"


def _file_name(process: int, steps: _Steps) -> str:
    return f"tokens-{process:05d}-{steps.opening:04d}.arrow"


def _span(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"
