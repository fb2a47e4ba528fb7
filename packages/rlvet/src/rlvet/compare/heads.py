"""Compare what the scripts of two runs printed before their first row, but for settings that are known."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from rlvet._secrets import is_secret
from rlvet.runs.console_settings import COLOURS, ENDINGS, WORKER
from rlvet.runs.consoles import printed_trainings
from rlvet.runs.consoles.trl import has_training_metric
from rlvet.runs.endings import LOST

MOST_LINES = 5000
"""The number of lines at the start of an output that are looked at."""

LARGEST = 2**21
"""The number of bytes of them."""

LONGEST_LINE = 8000
"""The number of characters of a line that are looked at."""

NAME = r"([A-Za-z_][A-Za-z0-9_.]{0,39})"
"""The name of a setting."""

NUMBER = r"(\d{1,3}(?:,\d{3})+|[+-]?\d[\w.+-]{0,19}|True|False|None)(?![\w:/%-]|,\d)"
"""A number, which may have commas between thousands, or a truth value."""

WORD = r"([A-Za-z][\w.+-]*(?:/[\w.+-]+)?)"
"""A word, or the address of a model or a data set."""

NOT_WITHIN = r"(?<![\w/.=:`-])"
"""The start of a name that is no part of a path, an address, another name or code in a text."""

PAIRS = (
    re.compile(NOT_WITHIN + NAME + r"(?:=|: ?)" + NUMBER),
    re.compile(NOT_WITHIN + NAME + r"=[\"']?" + WORD + r"(?![\w:/=({[])"),
    re.compile(rf"[\"']{NAME}[\"']: {NUMBER}"),
    re.compile(rf"[\"']{NAME}[\"']: [\"']{WORD}[\"']"),
    re.compile(
        rf"(?i){NOT_WITHIN}((?:base_?|policy_?)?model|dataset|task|method|algorithm): ([A-Za-z][\w.+-]*/[\w.+-]+)"
    ),
)
"""A name with a number, ``rho=0.70`` or ``seed: 42``; with a word, ``dataset=gsm8k``; both in a dictionary,
``'lam': 0.05``; and a model or a data set by its address, ``Model: Qwen/Qwen2.5-7B``. What else follows a colon may be
prose."""

LABEL = r"[\s*•-]*([A-Za-z][\w.()-]*(?: [\w.,&()-]+){0,9})(?:: ?| = )"
"""The name of a setting in words, at the start of a line."""

COUNT = r"([+-]?\d[\w.,+-]{0,19}|True|False|None)(?![\w:/-])"
"""A number that may have commas between its digits, or a truth value."""

LABELLED = (
    re.compile(LABEL + COUNT + r"[\s.,;]*$"),
    re.compile(LABEL + r"[\"']?" + WORD + r"[\"']?[\s.,;]*$"),
)
"""A line that has only a name of some words, and a value: ``Dataset size: 4695``."""

COUNTED = re.compile(
    r"(?i)(?<![\w.,/:=-])(\d[\d,]*) "
    r"((?:[a-z][a-z-]+ ){0,2}"
    r"(?:examples|samples|prompts|questions|problems|tasks|rows|items|conversations|generations|completions"
    r"|rollouts|processes|workers|episodes|parameters))\b"
)
"""A number before what it counts: ``15,000 training examples``."""

NO_LINE = re.compile(r"(?i)error|warning|exception|retry|should|please|deprecated|recommend")
"""A line of what went wrong, or of advice, whose numbers are no settings."""

DICTIONARY = re.compile(r"([A-Za-z][\w -]{0,40}): ?\{")
"""What a dictionary is of, before it: ``length reward config: {'lam': 0.05}``."""

NO_SETTING = re.compile(
    r"(?i)(^|_)(pid|port|gpu|device|rank|time|date|start|end|line|eta|elapsed|seconds?|dir|path|file|folder|id|url"
    r"|host|addr|address|allocated|reserved|memory|user|output|out|log|tag|version|run|ckpt|checkpoint)s?($|_)"
    r"|\.(py|sh|cc|cpp|json|ya?ml)$"
    r"|^((run|exp|experiment|project|job|group|host|user|file|output)_?)?name$"
    r"|^(global_)?(steps?|loss|total)$"
)
"""Names of what differs between any two runs, and places in code."""

SENTENCE = re.compile(r"[\s*•-]*([A-Za-z][\w-]* [^/\\|%=<>{}\[\]]{3,70})")
"""A short line of words, without a path, a setting or a bar."""

NO_SENTENCE = re.compile(r"\d\d:\d\d|\d{4}|\d\.\d")
"""A time, a date, a long number or an address, which differ between any two runs."""


class Head:
    r"""The lines of an output before its first row, and the names, values and sentences in them.

    Args:
        path: A log. One that is no console output has none.

    >>> import tempfile
    >>> log = Path(tempfile.mkdtemp()) / "run.log"
    >>> _ = log.write_text("rho=0.70, seed: 42, GPU=1\n{'loss': 0.1, 'reward': 0.5, 'kl': 0.2}\nbeta=0.1\n")
    >>> Head(log).pairs
    {'rho': {'0.70'}, 'seed': {'42'}}
    """

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def lines(self) -> Sequence[str]:
        """The lines, without the names of Ray's workers."""
        if self.path.suffix not in ENDINGS or not self.path.is_file():
            return []
        with self.path.open("rb") as file:
            text = LOST.split(file.read(LARGEST).decode("utf-8", "replace"))[-1]
        lines = []
        for line in itertools.islice(text.splitlines(), MOST_LINES):
            line = WORKER.sub("", COLOURS.sub("", line[:LONGEST_LINE]))
            rows = itertools.chain.from_iterable(printed_trainings(line)[0])
            # A dictionary of settings may be printed as a row is.
            if any(map(has_training_metric, rows)):
                break
            lines.append(line)
        return lines

    @cached_property
    def settings(self) -> Sequence[tuple[str, Sequence[tuple[str, str]]]]:
        """The lines but for those of what went wrong, each with the names in it and their values."""
        return [(line, _pairs_of(line)) for line in self.lines if not NO_LINE.search(line)]

    @cached_property
    def pairs(self) -> Mapping[str, set[str]]:
        """The names, each with its values."""
        values: dict[str, set[str]] = {}
        for _, pairs in self.settings:
            for name, value in pairs:
                last = name.rpartition(": ")[2].replace(" ", "_")
                # Code has an argument under its own name.
                if name != value and not NO_SETTING.search(last) and not is_secret(last, value):
                    values.setdefault(name, set()).add(value)
        return values

    @cached_property
    def sentences(self) -> Sequence[str]:
        """The short lines of words, without a setting."""
        matches = [
            SENTENCE.fullmatch(line.rstrip())
            for line, pairs in self.settings
            if not pairs and not NO_SENTENCE.search(line)
        ]
        return [*dict.fromkeys(match[1] for match in matches if match is not None)]

    @cached_property
    def copies(self) -> int | None:
        """The number of times that each setting is printed, as by so many processes; None without one number."""
        counts = Counter(line.strip() for line, pairs in self.settings if pairs)
        return min(counts.values()) if len(set(counts.values())) == 1 else None

    def sentences_alone(self, other: Head) -> list[str]:
        """Return the sentences that another output does not have."""
        return [sentence for sentence in self.sentences if sentence not in other.sentences]

    def pairs_alone(self, other: Head, known: Container[tuple[str, str]] = ()) -> list[str]:
        """Return the names with one value that another output does not have, each as ``tau 0.10``.

        Args:
            other: The other output.
            known: Names with a value that are left out, as those of settings that are compared otherwise.
        """
        # A name may stand in another line, with what is no value here.
        text = "\n".join(other.lines).casefold()
        return [
            f"{name} {min(values)}"
            for name, values in self.pairs.items()
            if len(values) == 1
            and name.rpartition(": ")[2].casefold() not in text
            and (name, min(values)) not in known
        ]


def _pairs_of(line: str) -> Sequence[tuple[str, str]]:
    """Return the names in a line, each with its value."""
    for labelled in LABELLED:
        match = labelled.match(line)
        if match is not None:
            return [(match[1], match[2])]
    counts = [(match[2], match[1]) for match in COUNTED.finditer(line)]
    pairs = [match for pair in PAIRS for match in pair.finditer(line)]
    of = DICTIONARY.search(line)
    if of is None:
        return counts + [(match[1], match[2]) for match in pairs]
    # A name in a dictionary may be that of another setting elsewhere.
    end = of.end() + len(line[of.end() :].partition("}")[0])
    return counts + [
        (f"{of[1]}: {match[1]}" if of.end() <= match.start() < end else match[1], match[2]) for match in pairs
    ]


def differing_pairs(a: Head, b: Head, known: Container[tuple[str, str]] = ()) -> dict[str, str]:
    """Return the names that both outputs have before their first row with one different value, and both values.

    Args:
        a: The start of an output.
        b: That of another one.
        known: Names with a value that are left out, as those of settings that are compared otherwise.
    """
    # A setting may be printed under two spellings.
    told: set[tuple[str, str, str]] = set()
    pairs = {}
    for name, values in a.pairs.items():
        # Of a name with several values, those that both have are of something else.
        only_a = values - b.pairs.get(name, set())
        only_b = b.pairs.get(name, set()) - values
        if len(only_a) != 1 or len(only_b) != 1:
            continue
        value_a, value_b = only_a.pop(), only_b.pop()
        pair = (name.casefold(), value_a, value_b)
        if pair not in told and (name, value_a) not in known and (name, value_b) not in known:
            told.add(pair)
            pairs[name] = f"{value_a} | {value_b}"
    return pairs


def equal_names(a: Head, b: Head) -> list[str]:
    """Return the names that two outputs have before their first row with equal values, each with its value."""
    return [
        f"{name} {min(values)}"
        for name, values in a.pairs.items()
        if len(values) == 1 and b.pairs.get(name) == values
    ]
