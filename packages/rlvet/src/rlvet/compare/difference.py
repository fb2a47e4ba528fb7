"""Compare two configurations, or two runs, and format what differs as text or JSON."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvet._numbers import format_number
from rlvet._terminal import printable
from rlvet.checks.course import Course
from rlvet.checks.diagnosis import Diagnosis
from rlvet.checks.log.signal import is_of_batches
from rlvet.checks.passing import in_single_steps
from rlvet.compare.configurations import (
    COMPARED,
    ConfigurationComparison,
    QuantityDifference,
    compare_configurations,
    format_value,
    read_training,
)
from rlvet.compare.heads import Head, differing_pairs, equal_names
from rlvet.compare.keys import KeyComparison, compare_keys, listed
from rlvet.compare.logs import (
    FEW_AT_AN_END,
    FEW_VALUES,
    FEWEST_STEPS,
    OF_ANSWERS,
    LogComparison,
    compare_ends,
    compare_logs,
)
from rlvet.compare.settings import DEFAULTS, LONGEST_VALUE
from rlvet.compare.vocabulary import UPDATES, Reading, Training
from rlvet.dispatch import diagnose, open_run
from rlvet.errors import FileProblem, InvalidValue, RlvetError
from rlvet.lint.checks import NO_CONFIGURATION
from rlvet.lint.known import FRAMEWORKS
from rlvet.lint.readers import JSON, read_configurations, read_in_limits
from rlvet.records import RecordedRun
from rlvet.runs import Run, gate
from rlvet.runs.configs import READERS
from rlvet.runs.files import check_regular
from rlvet.runs.limits import LARGEST_LINTED
from rlvet.runs.logs import Log
from rlvet.runs.quantities import Row
from rlvet.runs.summary import summarize

CONFIGURATIONS = (".py", ".yaml", ".yml", ".toml", ".sh", ".bash", ".sbatch", ".slurm", ".ipynb")
"""Suffixes of files that are read as configurations; those of other files are logs."""

LENGTH = "length of the run"
"""The quantity whose value may be a number of epochs."""
EPOCHS = re.compile(r"(\d+(?:\.\d+)?) epochs?")
"""A length of a run in epochs."""

SUPERVISED = re.compile(
    rb"\b(SFT|DPO|KTO|ORPO|Reward)(Config|Trainer)\b|\bsft_trainer\b|\btrl (sft|dpo|kto)\b"
)
"""Names of trainers of other kinds than RL."""


@dataclass(frozen=True)
class Side:
    """One of the two things to compare."""

    path: str
    """Its path, with the name of the run if one was chosen."""
    training: Training | None = None
    """The quantities of its configuration; None without one that is compared."""
    rows: Sequence[Row] = ()
    """Its log; empty for a configuration."""
    note: str = ""
    """The reason why its configuration is not compared; empty if it is, or if there is none."""
    method: str = ""
    """The method of the run; empty if it is not known."""
    diagnosis: str = ""
    """What `rlvet diagnose` says of its log in one line; empty for a configuration."""
    single_steps: str = ""
    """The sentence on its single log steps that are far above usual; empty without one."""
    faults: str = ""
    """A sentence on what `rlvet lint` finds in its configuration, but for notes; empty without any."""
    log: Log | None = None
    """Its log with the keys that were read; None for a configuration."""
    framework: str = ""
    """The framework that wrote the log; empty if it is not known."""
    is_of_batches: bool = False
    """True if its shares and spreads of groups are those of whole batches, as with ``scale_rewards='batch'`` in TRL."""

    @property
    def kind(self) -> str:
        """``a log`` or ``a configuration``."""
        return "a log" if self.rows else "a configuration"


@dataclass(frozen=True)
class Difference:
    """The differences of two configurations, of two logs, or of two runs with both."""

    a: str
    """The path of the first one, with the name of its run if one was chosen."""
    b: str
    """The same of the second one."""
    configurations: ConfigurationComparison | None = None
    logs: LogComparison | None = None
    notes: Sequence[str] = ()
    """Sentences about what was not compared."""
    methods: str = ""
    """The method of each run, and the share of the gradient that it blocked; empty if neither run measured it."""
    diagnoses: Sequence[str] = ()
    """What `rlvet diagnose` says of each log in one line; empty if no logs are compared."""
    keys: KeyComparison | None = None
    """The keys of the logs that were not read; None if no logs are compared."""
    printed: str = ""
    """A sentence on what both outputs printed before training with different values, but for settings that are known;
    empty without one."""
    printed_names: Sequence[str] = ()
    """The names of what both printed with different values."""
    remarks: Sequence[Sequence[str]] = ()
    """Sentences on the end of each output, if something is wrong there, and on single log steps far above usual."""

    @property
    def planned(self) -> str:
        """The numbers of steps that the two runs were to take; empty if one of them is not known."""
        if self.logs is None or self.configurations is None:
            return ""
        texts = []
        trainings = (self.configurations.a, self.configurations.b)
        for training, of_epoch in zip(trainings, self.logs.steps_an_epoch, strict=True):
            epochs = EPOCHS.fullmatch(str(training.readings[LENGTH].value))
            if epochs is None or of_epoch is None:
                return ""
            texts.append(f"{float(epochs[1]) * of_epoch:,.0f}")
        numbers = " | ".join(format_number(number) for number in self.logs.steps_an_epoch if number)
        return f"planned steps {texts[0]} | {texts[1]}, as an epoch has {numbers} steps"

    @property
    def rest(self) -> str:
        """A sentence on the causes left if metrics part from the start at settings equal in effect; else empty."""
        settings = self.configurations
        if self.logs is None or settings is None or settings.a.framework != settings.b.framework:
            return ""
        names = self.logs.from_start
        differences = [one.quantity.name for one in settings.differences]
        # The length of a run acts by the schedule of the learning rate only.
        if not names or "learning_rate" in names or settings.unjudged or differences not in ([], [LENGTH]):
            return ""
        unknown = [
            *(one.quantity.name for one in settings.undecided),
            *(name for name in settings.in_neither if name not in ("model", "data set")),
        ]
        verb = "parts" if len(names) == 1 else "part"
        but = f" but the {LENGTH}" if differences else ""
        causes = "prompts or template, data, reward function, start weights"
        known = f", or what is not known: {', '.join(unknown)}" if unknown else ""
        return (
            f"{listed(names)} {verb} at the first common step, and no setting that was compared differs in "
            f"effect{but}, so the cause is elsewhere: {causes}{known}"
        )

    @property
    def prompts(self) -> str:
        """A sentence on prompts of other lengths; empty if they are not known to be."""
        return "" if self.keys is None else self.keys.prompts

    @property
    def before_updates(self) -> str:
        """A sentence on metrics that differ before any update of the weights; empty if none does."""
        names = [] if self.logs is None else self.logs.before_updates
        if not names:
            return ""
        verb = "differs" if len(names) == 1 else "differ"
        causes = ["the loss"] if "grad_norm" in names else []
        causes += ["prompts", "data", "start weights", "sampling"]
        if not set(names) <= {*OF_ANSWERS, "cut", "kl"}:
            causes.append("reward function")
        if any(name.startswith("length") or name == "cut" for name in names):
            causes.append("the cap on length")
        return (
            f"{listed(names)} {verb} at the first step, before any update of the weights, so that "
            f"{', '.join(causes[:-1])} or {causes[-1]} do"
        )

    @property
    def other_reward(self) -> str:
        """A sentence on rewards that differ for the same answers; empty if they are not known to do."""
        names = [] if self.logs is None else self.logs.alike_but_for_reward
        if not names:
            return ""
        return (
            f"{listed(names)} are equal in all digits at the first step, and the reward is not: the reward function, "
            "or what it reads, seems to differ, so that the rewards may not be comparable"
        )

    @property
    def differs(self) -> bool:
        """True if a setting differs in effect, or a metric parts or has no value in common."""
        return bool(
            (self.configurations is not None and self.configurations.differs)
            or (self.logs is not None and self.logs.differs)
        )

    @property
    def headline(self) -> str:
        """The result in one line."""
        parts = []
        if self.logs is not None:
            parts.append(_headline_of_logs(self.logs))
        if self.configurations is not None:
            parts.append(_headline_of_configurations(self.configurations))
        if self.printed_names:
            parts.append(f"printed before training with other values: {listed(self.printed_names)}")
        return "; ".join(parts)

    def __str__(self) -> str:
        """Return what differs as text that is safe to print."""
        lines = [self.methods, self.headline] if self.methods else [self.headline]
        if self.logs is not None and self.logs.reward is not None:
            lines.append(str(self.logs.reward))
        if self.logs is not None and self.logs.components:
            lines.append(self.logs.components)
        lines += filter(None, [self.prompts, self.rest or self.before_updates, self.other_reward])
        for index, (name, title) in enumerate(zip("AB", self._titles(), strict=True)):
            lines.append(f"{name}: {title}")
            if self.diagnoses:
                lines.append(f"   rlvet diagnose: {self.diagnoses[index]}")
            if self.remarks:
                lines += [f"   {remark}" for remark in self.remarks[index]]
        lines += filter(None, [self.printed])
        if self.logs is not None:
            lines += _lines_of_logs(self.logs, self.keys)
        if self.configurations is not None:
            planned = self.planned
            lines += _lines_of_configurations(self.configurations, planned)
            # Where the length of the run differs, they stand beside it.
            stand_there = any(one.quantity.name == LENGTH for one in self.configurations.differences)
            if planned and not stand_there:
                lines.append(planned)
        lines += self.notes
        return "\n".join(map(printable, lines))

    def _titles(self) -> list[str]:
        """Return the paths, each with its framework, the version of the defaults, and the file of the settings."""
        titles = [self.a, self.b]
        if self.configurations is not None:
            for index, training in enumerate((self.configurations.a, self.configurations.b)):
                framework = FRAMEWORKS[training.framework].title
                version = f"defaults of {DEFAULTS[training.framework]['version']}"
                if training.is_earlier:
                    version = f"earlier than {DEFAULTS[training.framework]['version']}"
                # A path that is that file is not repeated.
                file = training.file.removeprefix(Path(titles[index]).name).removeprefix(", ")
                settings = f"; settings in {file}" if file else ""
                titles[index] += f" ({framework}, {version}{settings})"
        return titles

    def as_json(self) -> dict[str, Any]:
        """Return the differences as a dictionary for JSON, with the fields of the schema of `rlvet diff`."""
        return {
            "headline": self.headline,
            "differs": self.differs,
            "a": self.a,
            "b": self.b,
            "configurations": None if self.configurations is None else self.configurations.as_json(),
            "logs": None if self.logs is None else self.logs.as_json(),
            "keys": None if self.keys is None else self.keys.as_json(),
            "diagnoses": list(self.diagnoses),
            "notes": [
                *filter(
                    None,
                    [
                        self.methods,
                        self.prompts,
                        self.rest or self.before_updates,
                        self.other_reward,
                        self.printed,
                        self.planned,
                    ],
                ),
                *self.notes,
            ],
        }


OF_GROUPS = ("dead", "reward_std")
"""Quantities of groups, which TRL logs of whole batches if it scales rewards by their deviation."""
MEANS_AT_THE_END = "(A | B, means at the end of the common steps)"
"""The means that are printed of a metric that is apart."""
MEANS_AT_BOTH_ENDS = "(A | B, means at the start → at the end of the common steps)"
"""The means that are printed of a metric that is not told apart."""
MEANS_OF_FEW_STEPS = f"(A | B, means of the first {FEW_AT_AN_END} → of the last {FEW_AT_AN_END} of them)"
"""The means that are printed of a metric with few common steps."""
OTHERWISE_DIFFERENT = (
    "not told apart by the rule, but different otherwise (A | B, means at the start → at the end of the common steps, "
    "and in parentheses over the steps named; surely: each alone at 95 %)"
)
"""The title of metrics with differences that the rule does not count, as two seeds of one setting may have them."""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _headline_of_configurations(comparison: ConfigurationComparison) -> str:
    """Return the result of comparing two configurations in a phrase."""
    parts = []
    if comparison.unjudged:
        parts.append(f"{_count(len(comparison.unjudged), 'setting')} of unknown effect")
    if comparison.differences:
        names = ", ".join(difference.quantity.name for difference in comparison.differences)
        parts.insert(0, f"{_count(len(comparison.differences), 'difference')} in effect: {names}")
    else:
        # What may differ comes first.
        parts.append(f"no difference in effect in {comparison.compared} quantities")
    if comparison.undecided:
        parts.append(f"{len(comparison.undecided)} not known")
    return ", ".join(parts)


def _headline_of_logs(comparison: LogComparison) -> str:
    """Return the result of comparing two logs in a phrase."""
    if comparison.of_ends:
        return f"{comparison.reason}, so that only the ends of {_count(len(comparison.of_ends), 'metric')} are compared"
    parted = comparison.parted
    apart = comparison.apart
    metrics = _count(len(parted) + len(apart) + len(comparison.not_told_apart), "shared metric")
    clauses = []
    if comparison.surely_higher:
        is_other = bool(comparison.components or comparison.alike_but_for_reward)
        other = ", though it may be another reward" if is_other else ""
        clauses.append(f"the reward is surely higher in {comparison.surely_higher}{other}")
    if parted:
        clauses.append(f"{len(parted)} of {metrics} {_first_parted(comparison)}")
    if apart:
        more = f"{len(apart)} more" if parted else str(len(apart))
        verb = "has" if len(apart) == 1 else "have"
        clauses.append(f"{more} {verb} {_no_value(comparison)}: {listed([one.name for one in apart])}")
    if comparison.disjoint_at_end:
        disjoint = listed([one.name for one in comparison.disjoint_at_end])
        clauses.append(f"no value in common from a step on: {disjoint}")
    if not parted and not comparison.window:
        clauses.append(f"no shared metric has the {FEWEST_STEPS} common steps that the rule needs")
    elif comparison.is_equal:
        clauses.append(f"all values of {metrics} are equal in the common steps")
    elif not parted:
        clauses.append(f"none of {metrics} parts by the rule")
    return "; ".join(clauses)


def _first_parted(comparison: LogComparison) -> str:
    """Return the verb of metrics that part, and which of them do so first."""
    parted = comparison.parted
    earliest = comparison.earliest
    if len(earliest) == 1:
        first = earliest[0].name
    else:
        first = "all" if len(earliest) == len(parted) else f"{len(earliest)} of them"
    verb = "parts beyond its noise" if len(parted) == 1 else "part beyond their noise"
    return f"{verb}, {first} by step {parted[0].step:g} at the latest"


def _no_value(comparison: LogComparison) -> str:
    """Return what the values of the metrics that are apart have in common."""
    if any(metric.overlaps for metric in comparison.apart):
        return f"no value in common, but for 1 in {1 / FEW_VALUES:g} of each run"
    return "no value in common"


def _order_of(comparison: LogComparison) -> str:
    """Return the title of the list of metrics that part, with what its order says about causes."""
    if len(comparison.parted) == 1:
        return "parted, at the latest at the step named"
    return "parted, at the latest at the step named, so that their order shows no cause"


def _lines_of_logs(comparison: LogComparison, keys: KeyComparison | None) -> list[str]:
    """Return the metrics that part, those that are apart, the keys that were not read, and lines about the others."""
    lines: list[str] = []
    if comparison.parted:
        means = f"(A | B, means of up to {comparison.window} log steps from there on)"
        lines += ["", f"{_order_of(comparison)} {means}:"]
        lines += [f"- {parted}" for parted in comparison.parted]
    if comparison.apart:
        lines += [
            "",
            f"{_no_value(comparison)}; no step from which the rule tells them apart {MEANS_AT_THE_END}:",
        ]
        for metric in comparison.apart:
            since = "" if metric.disjoint_end is None else f": {metric.disjoint_end}"
            lines.append(f"- {metric}{since}")
    if lines:
        lines.append("")
    different: list[str] = []
    near: list[str] = []
    for metric in comparison.not_told_apart:
        # The reward has a line of its own.
        is_told = metric.name == "reward" and comparison.reward is not None
        differences = metric.differences(has_means=not is_told)
        if differences:
            different.append(f"- {metric}: {'; '.join(differences)}")
        elif not is_told:
            near.append(str(metric))
    if different:
        lines += [f"{OTHERWISE_DIFFERENT}:", *different, ""]
    told = [metric.name for metric in comparison.few]
    metrics = {
        f"not told apart by the rule {MEANS_AT_BOTH_ENDS}": near,
        f"too few common steps for the rule {MEANS_OF_FEW_STEPS}": list(map(str, comparison.few)),
        "too few common steps (A | B, at the last of them)": [
            f"{name} {values}" for name, values in comparison.last_values.items()
        ],
        "no common step": [name for name in comparison.short if name not in (*told, *comparison.last_values)],
        "only A has": comparison.only_a,
        "only B has": comparison.only_b,
    }
    lines += filter(None, [comparison.text_of_ends])
    lines += [f"{title}: {', '.join(names)}" for title, names in metrics.items() if names]
    return [*lines, *([] if keys is None else keys.lines), *comparison.notes]


def _lines_of_configurations(comparison: ConfigurationComparison, planned: str) -> list[str]:
    """Return the quantities that differ, numbered, and one line for each of the other groups.

    Args:
        comparison: The comparison.
        planned: The numbers of steps that the runs were to take; empty if they are not known.
    """
    lines = [""] if comparison.differences else []
    for number, difference in enumerate(comparison.differences, 1):
        lines.append(f"{number}. {difference.quantity.name} ({difference.quantity.effect})")
        lines += [
            f"   {name}  {format_value(difference.quantity, reading)}  {_origins(reading, training, other)}"
            for name, reading, training, other in zip(
                "AB",
                (difference.a, difference.b),
                (comparison.a, comparison.b),
                (difference.b, difference.a),
                strict=True,
            )
        ]
        if planned and difference.quantity.name == LENGTH:
            lines.append(f"   {planned}")
    if comparison.differences:
        lines.append("")
    updates = [training.value(UPDATES) for training in (comparison.a, comparison.b)]
    if None not in updates and updates[0] != updates[1]:
        numbers = " | ".join(map(format_number, updates))
        of_one = any(training.ratios_are_one for training in (comparison.a, comparison.b))
        effect = ", and with one, every ratio is 1, and nothing is clipped" if of_one else ""
        lines.append(f"from these settings, {UPDATES}: {numbers}{effect}")
    if comparison.unjudged:
        lines.append(f"effect not known: {_joined(map(str, comparison.unjudged))}")
    lines += _lines_of_undecided(comparison.undecided)
    if comparison.shape:
        lines.append(f"models of the same shape, whose weights may differ: {comparison.shape}")
    in_neither = [name for name in comparison.in_neither if not (name == "model" and comparison.shape)]
    if in_neither:
        lines.append(f"known of neither: {', '.join(in_neither)}")
    if comparison.without_effect:
        pairs = ", ".join(map(_pair, comparison.without_effect))
        lines.append(f"no effect here: {pairs}; {comparison.without_effect[0].note}")
    if comparison.speed:
        lines.append(f"memory and time only: {_joined(comparison.speed)}")
    if comparison.names:
        lines.append(f"names, paths, logging: {_joined(comparison.names)}")
    return lines


def _notes_on_versions(comparison: ConfigurationComparison) -> list[str]:
    """Return a sentence on settings that earlier versions saved; none without them."""
    earlier = [name for name, one in zip("AB", (comparison.a, comparison.b), strict=True) if one.is_earlier]
    if not earlier:
        return []
    framework = comparison.a.framework
    version = f"{FRAMEWORKS[framework].title} {DEFAULTS[framework]['version']}"
    saved = "was saved" if len(earlier) == 1 else "were saved"
    return [
        f"{' and '.join(earlier)} {saved} by an earlier version than {version}; what settings do is told as of "
        f"{version}"
    ]


def _lines_of_undecided(undecided: Sequence[QuantityDifference]) -> list[str]:
    """Return lines about values that are not known; those that may be set elsewhere in one line for each source."""
    lines = []
    elsewhere: dict[str, list[str]] = {}
    for difference in undecided:
        for name, reading in zip("AB", (difference.a, difference.b), strict=True):
            if reading.elsewhere:
                elsewhere.setdefault(f"{name}'s value {reading.elsewhere}", []).append(
                    difference.quantity.name
                )
        if not (difference.a.elsewhere or difference.b.elsewhere):
            lines.append(f"not known: {_pair(difference)}; {difference.note}")
    for source, names in elsewhere.items():
        lines.append(f"not known, as {source}: {', '.join(names)}")
    return lines


def _pair(difference: QuantityDifference) -> str:
    """Return a quantity with its two values."""
    texts = [format_value(difference.quantity, reading) for reading in (difference.a, difference.b)]
    return f"{difference.quantity.name} {texts[0]} | {texts[1]}"


def _origins(reading: Reading, training: Training, other: Reading) -> str:
    """Return the settings from which a value is computed, at most two, with their sources.

    A file whose settings have no lines is named once, beside the path of the run.

    Args:
        reading: The value.
        training: The configuration that it is of.
        other: The value of the other configuration, from whose settings those that differ come first.
    """
    texts = []
    others = {(origin.name, str(origin.value)) for origin in other.origins}
    origins = sorted(reading.origins, key=lambda origin: (origin.name, str(origin.value)) in others)
    for origin in origins[:2]:
        source = "" if origin.source == training.file else f" ({origin.source})"
        texts.append(f"{origin.name}={str(origin.value)[:LONGEST_VALUE]}{source}")
    # A setting that only the other one sets has its default here, unless this one has it under another name.
    names = {origin.name for origin in origins}
    others_names = [origin.name for origin in other.origins]
    if names and names.issubset(others_names) and not reading.unknown:
        unset = [name for name in dict.fromkeys(others_names) if name not in names]
        texts += [f"{name} at its default" for name in unset[: 2 - len(texts)]]
    return ", ".join(texts)


MOST_LISTED = 6
"""The most entries of a line that lists settings."""
MOST_EQUAL = 60
"""The most entries of the line of equal values, which is the only place that has them."""
MOST_DIFFERENT = 20
"""The most printed values that differ."""
MOST_SENTENCES = 3
"""The most sentences that one of two outputs of like scripts has alone."""


def _joined(texts: Any, most: int = MOST_LISTED) -> str:
    """Return texts with commas, and the number of those that are left out."""
    texts = list(texts)
    rest = len(texts) - most
    return ", ".join([*texts[:most], *([f"and {rest} more"] if rest > 0 else [])])


def diff(
    a: str | Path,
    b: str | Path,
    *,
    names: Mapping[str, str] | None = None,
    run_names: tuple[str | None, str | None] = (None, None),
) -> Difference:
    r"""Compare two configurations of TRL, verl, OpenRLHF or prime-rl, or two runs.

    Nothing in the files is imported or executed.

    Args:
        a: A configuration that `rlvet lint` reads, a log that `rlvet diagnose` reads, or the folder of a run.
        b: Another one of the same kind.
        names: The logs' keys for quantities, see `rlvet.runs.Run`.
        run_names: The names of the runs to read, if a log contains several.

    Raises:
        ValueError: if one cannot be read, or the two are of different kinds.
        OSError: if one does not exist.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name, beta in (("a.py", 0.0), ("b.py", 0.04)):
    ...     script = f"from trl import GRPOConfig\nargs = GRPOConfig('out', beta={beta})\n"
    ...     _ = (folder / name).write_text(script)
    >>> diff(folder / "a.py", folder / "b.py").headline
    '1 difference in effect: KL coefficient'
    """
    run_a, run_b = run_names
    sides = (_open_side(Path(a), names, run_a), _open_side(Path(b), names, run_b))
    heads = (Head(Path(a)), Head(Path(b)))
    first, second = sides
    notes = [side.note for side in sides if side.note]
    logs = keys = None
    printed = ""
    pairs: Mapping[str, str] = {}
    if first.log is not None and second.log is not None:
        of_groups = OF_GROUPS if first.is_of_batches != second.is_of_batches else ()
        counted = [
            name for name, log in zip("AB", (first.log, second.log), strict=True) if log.are_steps_counted
        ]
        try:
            if len(counted) == 1:
                reason = f"the rows of {counted[0]} have no steps"
                logs = compare_ends(first.rows, second.rows, reason, left_out=of_groups)
            else:
                logs = compare_logs(
                    first.rows, second.rows, left_out=of_groups, are_steps_counted=bool(counted)
                )
            if len(counted) == 2:
                notes.append("the rows of both logs have no steps: a step is the number of a row")
        except InvalidValue as error:
            if first.training is None or second.training is None:
                raise
            notes.append(f"only the configurations were compared: {error}")
        if logs is not None and of_groups:
            units = ["whole batches" if side.is_of_batches else "groups" for side in sides]
            notes.append(
                f"{' and '.join(of_groups)} are of {units[0]} in A and of {units[1]} in B, by the scale of the "
                "rewards, and were not compared"
            )
        has_two_frameworks = (
            bool(first.framework and second.framework) and first.framework != second.framework
        )
        if logs is not None:
            keys = compare_keys(first.log, second.log, is_one_framework=not has_two_frameworks)
    configurations = None
    if first.training is not None and second.training is not None:
        configurations = compare_configurations(first.training, second.training)
        notes += _notes_on_versions(configurations)
        if logs is not None or not configurations.differs:
            notes.append(
                "what the settings do not tell was not compared: reward function, template, order of the data"
            )
    if logs is None and configurations is None:
        raise InvalidValue(
            f"{first.path} is {first.kind} and {second.path} is {second.kind}: compare two logs, or two "
            f"configurations{''.join(f'; {note}' for note in notes)}"
        )
    if logs is not None and configurations is not None:
        first_framework, second_framework = (one.framework for one in (configurations.a, configurations.b))
        if first_framework != second_framework:
            notes.append("a step of TRL is one of the optimizer, and a step of verl one batch")
    if bool(first.rows) != bool(second.rows):
        notes.append("only the configurations were compared, as only one of the two has a log")
    if logs is not None and configurations is None and not any(side.note for side in sides):
        alike = equal_names(*heads) if run_names == (None, None) else []
        notes.append(_missing_settings(sides, alike))
    # A file of several runs has what each of them printed.
    if logs is not None and run_names == (None, None):
        known = _known_settings(sides)
        pairs = differing_pairs(*heads, known)
        printed = _printed_texts(*heads, known, pairs)
    remarks = [tuple(filter(None, [*_of_output(side.log), side.single_steps, side.faults])) for side in sides]
    methods = _methods_of(first, second)
    diagnoses = [] if logs is None else [first.diagnosis, second.diagnosis]
    return Difference(
        first.path,
        second.path,
        configurations,
        logs,
        notes,
        methods,
        diagnoses,
        keys,
        printed,
        [*pairs],
        remarks,
    )


def _of_output(log: Log | None) -> tuple[str, ...]:
    """Return sentences on the errors in an output, and on its end."""
    return () if log is None else (log.ending.errors, log.ending.text)


def _printed_texts(a: Head, b: Head, known: Container[tuple[str, str]], pairs: Mapping[str, str]) -> str:
    """Return a sentence on what two outputs printed before training, where that differs; empty if it does not."""
    values = [f"{name} {both}" for name, both in pairs.items()]
    texts = [f"(A | B) {_joined(values, MOST_DIFFERENT)}"] if values else []
    for name, output, other in (("A", a, b), ("B", b, a)):
        alone = output.pairs_alone(other, known)
        if alone:
            texts.append(f"only {name} prints {_joined(alone)}")
        sentences = output.sentences_alone(other)
        if 0 < len(sentences) <= MOST_SENTENCES:
            texts.append(f"only {name} prints the words {', '.join(map(repr, sentences))}")
    if a.copies and b.copies and a.copies != b.copies:
        texts.append(f"each setting is printed {a.copies} | {b.copies} times, as by so many processes")
    return (
        f"printed before training, not judged, and maybe changed since: {'; '.join(texts)}" if texts else ""
    )


def _known_settings(sides: tuple[Side, Side]) -> set[tuple[str, str]]:
    """Return the settings of two runs, each by the last part of its name with its value as text."""
    known = set()
    for side in sides:
        settings = {} if side.training is None else side.training.settings
        known |= {(name.rpartition(".")[2], str(value)) for name, value in settings.items()}
    return known


def _missing_settings(sides: tuple[Side, Side], alike: Sequence[str]) -> str:
    """Return a sentence on runs of which one or both have no settings that are known.

    Args:
        sides: The two runs.
        alike: The names that both outputs print before training with equal values.
    """
    names = [name for name, side in zip("AB", sides, strict=True) if side.training is None]
    verb = "has" if len(names) == 1 else "have"
    text = f"{' and '.join(names)} {verb} no configuration in or beside the log that is read"
    if alike:
        printed = f"of what is printed before training, these are equal: {_joined(alike, MOST_EQUAL)}"
        return f"{text}; {printed}; nothing else was compared"
    return f"{text}, so model, data and settings were not compared"


def _methods_of(first: Side, second: Side) -> str:
    """Return the methods of two runs, with the share of the gradient on rare winners that each blocked."""
    shares = [summarize(side.rows).blocked_share if side.rows else None for side in (first, second)]
    if all(share is None for share in shares) or not (first.rows and second.rows):
        return ""
    texts = []
    for name, side, share in zip("AB", (first, second), shares, strict=True):
        measured = "not measured" if share is None else f"{share:.1%}"
        texts.append(f"{name} {side.method or 'an unknown method'}, {measured}")
    return f"blocked of the gradient on tokens of A > 0 and p < 0.1: {'; '.join(texts)}"


def _open_side(path: Path, names: Mapping[str, str] | None, run_name: str | None) -> Side:
    """Read the configuration and the log of a path.

    Args:
        path: The path.
        names: The log's keys for quantities.
        run_name: The name of the run in a log of several; None for a log of one.

    Raises:
        ValueError: if it has neither, or is a record of tokens.
        OSError: if it does not exist.
    """
    if not path.exists():
        raise FileProblem(f"{path} does not exist")
    if path.is_file() and path.name in READERS and path.suffix not in CONFIGURATIONS:
        return _saved_configuration(path, Run(path.parent))
    if path.is_file() and (path.suffix.lower() in CONFIGURATIONS or _is_configuration_in_json(path)):
        return Side(str(path), _training_of_file(path))
    run = open_run(path, names=names, run_name=run_name)
    if isinstance(run, RecordedRun):
        raise InvalidValue(
            f"{path} is a record of tokens: `rlvet diff` compares logs and configurations; run `rlvet diagnose` on it"
        )
    try:
        rows = run.rows
    except RlvetError:
        if path.is_dir() and run.configuration is not None:
            return _saved_configuration(path, run)
        raise
    if not any("reward" in row for row in rows):
        raise InvalidValue(
            f"{path} is no log of RL: no key is known to be the reward; name it by --map reward=KEY"
        )
    training, note = None, ""
    if run.configuration is None or run.configuration.framework == run.setup.framework:
        # A configuration of a framework that did not write the log belongs to another run.
        training, note = _training_of_run(run)
    diagnosis = diagnose(run)
    return Side(
        run.title,
        training,
        rows,
        note,
        run.setup.method or "",
        _headline_with_others(diagnosis),
        in_single_steps(Course(rows), diagnosis.findings),
        _faults_of_configuration(diagnosis),
        run.log,
        run.setup.framework or "",
        is_of_batches(run.setup),
    )


def _headline_with_others(diagnosis: Diagnosis) -> str:
    """Return the headline of a diagnosis, with the severity of its first finding, and its other findings."""
    findings = [finding for finding in diagnosis.findings if finding.severity != "note"]
    if diagnosis.no_verdict or not findings:
        return diagnosis.headline
    first = findings[0]
    others = {f"{one.code} ({one.severity})": None for one in findings[1:] if one.code != first.code}
    also = f"; also {', '.join(others)}" if others else ""
    return f"{first.severity}, {diagnosis.headline}{also}"


def _faults_of_configuration(diagnosis: Diagnosis) -> str:
    """Return a sentence on the findings on the configuration of a run, but for notes; empty without any."""
    findings = [] if diagnosis.configuration is None else diagnosis.configuration.findings
    texts = [f"{one.id} ({one.severity})" for one in findings if one.severity != "note"]
    return f"in its configuration: {', '.join(texts)}" if texts else ""


def _is_configuration_in_json(path: Path) -> bool:
    """Return whether a file is JSON with a configuration. Others are logs, such as trainer_state.json."""
    if path.suffix.lower() not in JSON:
        return False
    try:
        return bool(read_in_limits(read_configurations, path))
    except InvalidValue:
        return False


def _saved_configuration(path: Path, run: Run) -> Side:
    """Read the configuration that a run saved, of a folder without a log or a file.

    Raises:
        ValueError: if it is of another framework.
    """
    training, note = _training_of_run(run)
    if training is None:
        raise InvalidValue(note or f"{path} holds {NO_CONFIGURATION}")
    return Side(str(path), training)


def _training_of_run(run: Run) -> tuple[Training | None, str]:
    """Return what the configuration of a run trains; None with the reason if it is not compared."""
    saved = run.configuration
    if saved is None:
        return None, ""
    if saved.framework not in COMPARED:
        return None, f"the settings of {run.path} are of {saved.framework}, which is not compared"
    return read_training(saved), ""


def supervised_trainer(path: Path) -> str:
    """Return the name of a trainer of another kind than RL in a file; empty if there is none."""
    check_regular(path)
    with path.open("rb") as file:
        match = SUPERVISED.search(file.read(LARGEST_LINTED))
    return "" if match is None else match[0].decode()


def _training_of_file(path: Path) -> Training:
    """Return what the configuration in a file trains.

    Raises:
        ValueError: if there is none, there are several, or it is of another framework.
    """
    configurations = read_in_limits(read_configurations, path)
    if not configurations:
        name = gate.answer_of(supervised_trainer, path)
        if name:
            raise InvalidValue(
                f"{path} configures {name}, which is no RL: `rlvet diff` compares GRPO and PPO"
            )
        raise InvalidValue(f"{path} holds {NO_CONFIGURATION}")
    if len(configurations) > 1:
        lines = ", ".join(str(configuration.line) for configuration in configurations)
        raise InvalidValue(
            f"{path} holds {len(configurations)} runs, which begin at lines {lines}: put the one to compare into a "
            "file of its own"
        )
    (configuration,) = configurations
    if configuration.framework not in COMPARED:
        titles = ", ".join(FRAMEWORKS[key].title for key in COMPARED)
        raise InvalidValue(
            f"{path} configures {FRAMEWORKS[configuration.framework].title}: `rlvet diff` compares "
            f"{titles}; `rlvet lint` checks it"
        )
    return read_training(configuration)
