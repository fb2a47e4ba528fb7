"""Check configurations by the rules, and format the findings as text, JSON, Markdown or annotations for GitHub."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlvet._numbers import format_setting
from rlvet._severities import SEVERITIES, is_at_least
from rlvet._terminal import printable
from rlvet.lint.known import FRAMEWORKS
from rlvet.lint.names import MOST_UNKNOWN, Names, names_of
from rlvet.lint.readers import (
    THE_COMMAND,
    parse_configurations,
    read_configurations,
    read_in_limits,
)
from rlvet.lint.rules import Rule
from rlvet.lint.values import UnknownValue, Values
from rlvet.runs import Run
from rlvet.runs.configuration import Configuration, Setting, Unresolved


@dataclass(frozen=True)
class LintFinding:
    """A fault or risk in a configuration."""

    id: str
    """The id of the rule, see docs/lint.md."""
    severity: str
    """``fix``, ``look`` or ``note``, as for findings of `rlvet diagnose`."""
    framework: str
    path: str
    line: int | None
    """The line of one of the settings; None if the format has no lines."""
    settings: Mapping[str, Any]
    """The settings that the rule reads and the configuration sets, with their values; None for a value that is not
    known."""
    title: str
    """The fault, in a few words."""
    happens: str
    """The effect of the fault, in a sentence or two."""
    fix: str
    """The settings to change, under the framework's own names."""
    source: str
    """The evidence: a paper, the framework's source or documentation, or a thread."""


@dataclass(frozen=True)
class Unchecked:
    """A rule that could not be checked, since a value that it needs is not known."""

    id: str
    framework: str
    path: str
    line: int | None
    """The line where the configuration begins."""
    reason: str
    """The value, and the reason why it is not known."""


@dataclass(frozen=True)
class LintReport:
    """The result of checking the configurations in one file."""

    path: str
    configurations: Sequence[Configuration]
    """The configurations in the file; empty if there is none of a known framework."""
    findings: Sequence[LintFinding] = ()
    """The findings, the gravest first, then in the order of their lines."""
    unchecked: Sequence[Unchecked] = ()
    """The rules that could not be checked."""
    passed: int = 0
    """Number of checks without a finding."""

    @property
    def is_unjudged(self) -> bool:
        """Whether there is a configuration of which nothing could be checked."""
        return bool(self.configurations) and not self.findings and not self.passed

    def fails(self, severity: str) -> bool:
        """Return whether there is a finding of this severity or a graver one."""
        return any(is_at_least(finding.severity, severity) for finding in self.findings)

    def __str__(self) -> str:
        """Return the findings with their lines, and the rules that could not be checked, as safe text.

        Control characters are escaped.
        """
        if not self.configurations:
            return printable(f"{self.path}: {NO_CONFIGURATION}")
        lines = [self.text_of_findings] if self.findings else []
        for reason, ids in self._unchecked_by_reason():
            lines.append(printable(f"{self.path}: not checked, because {reason}: {', '.join(ids)}"))
        lines.append(printable(f"{self.path}: {self.summary}"))
        return "\n".join(lines)

    @property
    def text_of_findings(self) -> str:
        """The findings with their lines, as safe text; empty if there are none."""
        lines = []
        for finding in self.findings:
            lines.append(f"{_location(finding)}: {finding.severity}: {finding.title} [{finding.id}]")
            lines.append(f"    {finding.happens}")
            if finding.settings:
                lines.append(f"    set: {_format_settings(finding.settings)}")
            lines.append(f"    fix: {finding.fix}")
            lines.append(f"    see: {finding.source}")
        return "\n".join(map(printable, lines))

    @property
    def summary(self) -> str:
        """The frameworks and the number of findings, in one line."""
        titles = [FRAMEWORKS[configuration.framework].title for configuration in self.configurations]
        frameworks = []
        for title, count in Counter(titles).items():
            frameworks.append(title if count == 1 else f"{title} ({count} runs)")

        counts = Counter(finding.severity for finding in self.findings)
        findings = [f"{counts[severity]} {severity}" for severity in SEVERITIES if counts[severity]]
        checks = f"{self.passed} checks passed, {len(self.unchecked)} not made"
        if self.is_unjudged:
            return f"{', '.join(frameworks)}: unjudged, since nothing could be checked; {len(self.unchecked)} not made"
        return f"{', '.join(frameworks)}: {', '.join(findings) or 'nothing found'}; {checks}"

    def _unchecked_by_reason(self) -> list[tuple[str, list[str]]]:
        """Return each reason with the ids of the rules that could not be checked because of it."""
        ids: dict[str, list[str]] = {}
        for rule in self.unchecked:
            ids_of_reason = ids.setdefault(rule.reason, [])
            if rule.id not in ids_of_reason:
                ids_of_reason.append(rule.id)
        return list(ids.items())

    def as_json(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON."""
        return {
            "path": self.path,
            "frameworks": [configuration.framework for configuration in self.configurations],
            "findings": [asdict(finding) for finding in self.findings],
            "unchecked": [asdict(rule) for rule in self.unchecked],
            "passed": self.passed,
        }

    def as_markdown(self) -> str:
        """Return a table of the findings in Markdown, for the summary of a job of continuous integration."""
        if not self.configurations:
            return f"**{_cell(self.path)}**: {NO_CONFIGURATION}\n"
        lines = [f"**{_cell(self.path)}**: {_cell(self.summary)}"]
        if self.findings:
            lines += ["", "| line | | what | fix |", "|---|---|---|---|"]
        for finding in self.findings:
            description = (
                f"**{finding.title}** (`{finding.id}`). {_cell(finding.happens)} *{_cell(finding.source)}*"
            )
            lines.append(
                f"| {finding.line or ''} | {finding.severity} | {description} | {_cell(finding.fix)} |"
            )
        reasons = self._unchecked_by_reason()
        if reasons:
            lines.append("")
        for reason, ids in reasons:
            lines.append(f"- not checked, because {_cell(reason)}: {', '.join(ids)}")
        return "\n".join(lines) + "\n"

    def as_annotations(self) -> str:
        """Return a GitHub workflow command for each finding, which annotates its line in a pull request."""
        commands = {"stop": "error", "fix": "error", "look": "warning", "note": "notice"}
        lines = []
        for finding in self.findings:
            location = f"file={_property(finding.path)}"
            if finding.line:
                location += f",line={finding.line}"
            message = f"{finding.happens} Fix: {finding.fix} ({finding.source})"
            title = _property(f"{finding.title} ({finding.id})")
            lines.append(f"::{commands[finding.severity]} {location},title={title}::{_message(message)}")
        return "\n".join(lines)


NO_CONFIGURATION = (
    f"no configuration of {', '.join(framework.title for framework in FRAMEWORKS.values())} in a form that is read: "
    "no setting in it is one that only one of these has; rlvet diagnose reads those that a log printed"
)
"""The message for a file without a configuration of a known framework."""


def _location(finding: LintFinding) -> str:
    """Return the path of a finding, with its line if there is one."""
    return finding.path if finding.line is None else f"{finding.path}:{finding.line}"


def _format_settings(settings: Mapping[str, Any]) -> str:
    """Format settings with their values in one line."""
    texts = []
    for name, value in settings.items():
        if value is None:
            texts.append(name)
        elif isinstance(value, float):
            texts.append(f"{name}={format_setting(value)}")
        else:
            texts.append(f"{name}={str(value)[:80]}")
    return ", ".join(texts)


def _cell(text: str) -> str:
    """Escape a text for a cell of a Markdown table: one line, without characters that end the cell or are markup."""
    escaped = printable(text)
    for character in "\\`*_[]|":
        escaped = escaped.replace(character, f"\\{character}")
    return escaped.replace("&", "&amp;").replace("<", "&lt;")


def _message(text: str) -> str:
    """Escape a text for the message of a workflow command."""
    return printable(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Escape a text for a property of a workflow command."""
    return _message(text).replace(":", "%3A").replace(",", "%2C")


def lint_file(path: str | Path) -> LintReport:
    r"""Check the configurations in a file.

    Args:
        path: A Python script (TRL), a YAML, JSON or TOML file, or a shell script with the training command.

    Raises:
        ValueError: if the file cannot be read.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "train.py"
    >>> _ = file.write_text("from trl import GRPOConfig\nargs = GRPOConfig('out', num_generations=1)\n")
    >>> [(finding.id, finding.line) for finding in lint_file(file).findings]
    [('group-of-one', 2)]
    """
    configurations = read_in_limits(read_configurations, Path(path))
    return lint_configurations(configurations, str(path))


def lint_text(data: bytes, path: str) -> LintReport:
    """Check the configurations in the bytes of a file.

    Args:
        data: The bytes.
        path: The path of the file, for messages. Its suffix determines the format.

    Raises:
        ValueError: if the bytes cannot be read.
    """
    configurations = read_in_limits(parse_configurations, data, path)
    return lint_configurations(configurations, path)


def lint_configurations(
    configurations: Sequence[Configuration], path: str, *, started: bool = False
) -> LintReport:
    """Check configurations that were read from a file.

    Args:
        configurations: The configurations.
        path: The path of the file, for messages.
        started: True if a run saved them after its start. Rules with `Rule.only_before_start` are then left out.
    """
    findings: list[LintFinding] = []
    unchecked: list[Unchecked] = []
    passed = 0
    for configuration in configurations:
        has_started = started or configuration.is_saved
        if configuration.is_saved:
            configuration = without_defaults(configuration)
        for rule in FRAMEWORKS[configuration.framework].rules:
            if has_started and rule.only_before_start:
                continue
            result = _check(rule, configuration)
            if isinstance(result, LintFinding):
                findings.append(result)
            elif isinstance(result, Unchecked):
                unchecked.append(result)
            else:
                passed += 1
        if not has_started:
            findings += check_names(configuration)
    findings.sort(key=lambda finding: (SEVERITIES.index(finding.severity), finding.line or 0))
    return LintReport(path, configurations, findings, unchecked, passed)


def lint_findings(configuration: Configuration) -> list[LintFinding]:
    """Check one configuration, and return the findings, the gravest first.

    >>> from rlvet.runs.configs import configuration_of
    >>> configuration = configuration_of("trl", {"num_generations": 2})
    >>> [finding.id for finding in lint_findings(configuration)]
    ['group-of-two']
    """
    return list(lint_configurations([configuration], configuration.title).findings)


def lint_run(path: str | Path) -> list[LintFinding]:
    """Check the newest configuration of a run, and return the findings, the gravest first.

    Args:
        path: The run's folder, or its log. If there is no configuration of a known framework, the result is empty.

    >>> import json, tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> settings = {"importance_sampling_level": "token", "num_generations": 2}
    >>> _ = (folder / "config.yaml").write_text(json.dumps(settings))
    >>> [finding.id for finding in lint_run(folder)]
    ['group-of-two']
    """
    configuration = Run(path).configuration
    report = None if configuration is None else lint_run_configuration(configuration)
    return [] if report is None else list(report.findings)


def lint_run_configuration(newest: Configuration) -> LintReport | None:
    """Check the configuration that a run saved; return None if there are no rules for its framework.

    Args:
        newest: The newest configuration of the run.
    """
    if newest.framework not in FRAMEWORKS:
        return None
    return lint_configurations([newest], newest.title, started=True)


def without_defaults(saved: Configuration) -> Configuration:
    """Return the configuration of a run without the settings that have the framework's default: they count as not set.

    Settings that are missing are `Configuration.absent`: they are of a later version than the one that saved the file.

    Args:
        saved: A configuration that a run saved, of one of `FRAMEWORKS`.
    """
    framework = FRAMEWORKS[saved.framework]
    defaults = framework.defaults
    # Settings that are taken for their defaults where they are missing.
    assumed = framework.optional | framework.stable
    settings: dict[str, Setting] = {}
    if framework.key == "prime-rl":
        # Its file has the settings of the trainer alone, of which no other file has any.
        settings |= framework.default_settings("trainer.")
    for name, setting in saved.settings.items():
        if isinstance(setting.value, Mapping):
            default = defaults.get(name)
            is_known = not default or name in assumed
            value = default if is_known else Unresolved("an object of the program that saved it")
            setting = replace(setting, value=value)
        if name not in defaults or setting.value != defaults[name]:
            settings[name] = setting
    settings = framework.in_effect(settings)
    saved_names = {framework.older_names.get(name, name) for name in saved.settings}
    return replace(saved, settings=settings, absent=defaults.keys() - saved_names - assumed)


def check_names(configuration: Configuration) -> list[LintFinding]:
    """Check the names of the settings, and return a finding for each that is probably misspelt."""
    framework = FRAMEWORKS[configuration.framework]
    names = names_of(framework)
    findings: list[LintFinding] = []
    earlier: list[Setting] = []
    # A setting may stand under several names, such as its newest one, of which one is that of the file.
    paths: dict[int, list[str]] = {}
    settings = {id(setting): setting for setting in configuration.settings.values()}
    for path, setting in configuration.settings.items():
        paths.setdefault(id(setting), []).append(path)
    unknown = 0
    for key, setting in settings.items():
        if setting.name == THE_COMMAND or unknown > MOST_UNKNOWN:
            continue
        if any(names.is_known(path) for path in paths[key]):
            if all(names.last_version(path) for path in paths[key]):
                earlier.append(setting)
            continue
        unknown += 1
        meant = next(filter(None, map(names.meant, paths[key])), [])
        if meant:
            findings.append(_misspelt(configuration, setting, meant, names))
    is_of_earlier = any(name in framework.older_names for name in configuration.settings)
    if earlier and not is_of_earlier:
        findings.append(_of_earlier(configuration, earlier, names))
    return findings


def _misspelt(
    configuration: Configuration, setting: Setting, meant: Sequence[str], names: Names
) -> LintFinding:
    """Return the finding about a name that is near that of a setting."""
    title = FRAMEWORKS[configuration.framework].title
    return _finding_on_names(
        configuration,
        [setting],
        id="misspelt-setting",
        severity="fix",
        title=f"{setting.name}: did you mean {' or '.join(meant)}?",
        happens=f"{title} {names.version} has no setting {setting.name}: the run does not start, or the "
        "value has no effect.",
        fix=" or ".join(meant),
    )


def _of_earlier(configuration: Configuration, settings: Sequence[Setting], names: Names) -> LintFinding:
    """Return the finding about settings that only earlier versions have."""
    title = FRAMEWORKS[configuration.framework].title
    versions = {setting.name: names.last_version(setting.name) for setting in settings}
    texts = [f"{name} (last in {version})" for name, version in versions.items()]
    return _finding_on_names(
        configuration,
        settings,
        id="setting-of-earlier-versions",
        severity="note",
        title=f"{title} {names.version} does not have all of the settings",
        happens=f"Only earlier versions have {', '.join(texts)}.",
        fix=f"remove them, or run the version of {title} that the file is for",
    )


def _finding_on_names(configuration: Configuration, settings: Sequence[Setting], **texts: str) -> LintFinding:
    """Return a finding about the names of some settings."""
    values = {setting.name: setting.value for setting in settings}
    return LintFinding(
        **texts,
        framework=configuration.framework,
        path=configuration.title,
        line=next((setting.line for setting in settings if setting.line is not None), configuration.line),
        settings={name: None if isinstance(value, Unresolved) else value for name, value in values.items()},
        source=f"the settings in the code of {FRAMEWORKS[configuration.framework].title}, see docs/lint.md",
    )


def _check(rule: Rule, configuration: Configuration) -> LintFinding | Unchecked | None:
    """Apply a rule to a configuration; return None if the configuration does not have the fault."""
    framework = configuration.framework
    values = Values(configuration, FRAMEWORKS[framework], rule.reads)
    try:
        if not rule.condition(values):
            return None
    except UnknownValue as error:
        return Unchecked(rule.id, framework, configuration.title, configuration.line, str(error))
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        reason = (
            f"one of {', '.join(rule.reads.values())} has a value of another type than {framework} expects"
        )
        return Unchecked(rule.id, framework, configuration.title, configuration.line, reason)

    message_settings: dict[str, object] = {name: values.for_message(name) for name in rule.reads}
    concerned: Iterable[str] = rule.reads
    if rule.concerns is not None:
        concerned = rule.concerns(values)
        shown = [values.for_message(short_name) for short_name in concerned]
        message_settings["concerned"] = ", ".join(f"{setting.name} {setting}" for setting in shown)
    settings: list[Setting] = []
    for short_name in concerned:
        setting = values.setting(short_name)
        if setting is not None:
            settings.append(setting)
    # The line is that of the first setting. The command itself comes last, since its settings are more specific.
    settings.sort(key=lambda setting: setting.name == THE_COMMAND)
    line = next((setting.line for setting in settings if setting.line is not None), configuration.line)
    setting_values = {}
    for setting in settings:
        if setting.name != THE_COMMAND:
            setting_values[setting.name] = None if isinstance(setting.value, Unresolved) else setting.value
    return LintFinding(
        id=rule.id,
        severity=rule.severity,
        framework=framework,
        path=configuration.title,
        line=line,
        settings=setting_values,
        title=rule.title,
        happens=rule.happens.format(**message_settings),
        fix=rule.fix.format(**message_settings),
        source=rule.source,
    )
