"""Check configurations by the rules, and show the findings as text, JSON, Markdown or GitHub's annotations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bandpo._severities import SEVERITIES, is_at_least
from bandpo._terminal import printable
from bandpo.errors import InvalidValue
from bandpo.lint.configuration import Configuration, Setting, Unread
from bandpo.lint.frameworks import FRAMEWORKS
from bandpo.lint.openrlhf_rules import OPENRLHF_RULES
from bandpo.lint.prime_rl_rules import PRIME_RL_RULES
from bandpo.lint.readers import THE_COMMAND, read_configurations
from bandpo.lint.rules import NotRead, Rule, Values
from bandpo.lint.skyrl_rules import SKYRL_RULES
from bandpo.lint.trl_rules import TRL_RULES
from bandpo.lint.verl_rules import VERL_RULES
from bandpo.runs.configs import RunConfiguration, newest_configuration

RULES: tuple[Rule, ...] = (*TRL_RULES, *VERL_RULES, *SKYRL_RULES, *PRIME_RL_RULES, *OPENRLHF_RULES)
"""All rules."""


@dataclass(frozen=True)
class LintFinding:
    """A fault or risk in a configuration."""

    id: str
    """The rule, as docs/lint.md lists them."""
    severity: str
    """``fix``, ``look`` or ``note``, as of a finding of `bandpo diagnose`."""
    framework: str
    path: str
    line: int | None
    """The line of a setting that it is about; None where the format has no lines."""
    settings: Mapping[str, Any]
    """Those that the rule reads and the configuration names, with their values; an unread value is None."""
    title: str
    """What is wrong, in a few words."""
    happens: str
    """What happens, in a sentence or two."""
    fix: str
    """What to change, in the framework's own names."""
    source: str
    """Where it is shown: a paper, the framework's source or documentation, or a thread."""


@dataclass(frozen=True)
class Unchecked:
    """A rule that needs a value which the configuration does not tell."""

    id: str
    framework: str
    path: str
    line: int | None
    """The line where the configuration begins."""
    reason: str
    """Which value, and why it is not known."""


@dataclass(frozen=True)
class LintReport:
    """Result of checking the configurations in one file."""

    path: str
    configurations: Sequence[Configuration]
    """Those that the file holds; empty if it holds none of a known framework."""
    findings: Sequence[LintFinding] = ()
    """The gravest first, then in the order of their lines."""
    unchecked: Sequence[Unchecked] = ()
    passed: int = 0
    """Number of checks that were made and found nothing."""

    def fails(self, severity: str) -> bool:
        """Return whether there is a finding of this severity or a worse one."""
        return any(is_at_least(finding.severity, severity) for finding in self.findings)

    def __str__(self) -> str:
        """Return the findings with their lines, and what was not checked. Control characters are escaped."""
        if not self.configurations:
            return printable(f"{self.path}: {NO_CONFIGURATION}")
        lines = []
        for finding in self.findings:
            lines.append(f"{_place(finding)}: {finding.severity}: {finding.title} [{finding.id}]")
            lines.append(f"    {finding.happens}")
            if finding.settings:
                lines.append(f"    set: {_shown_settings(finding.settings)}")
            lines.append(f"    fix: {finding.fix}")
            lines.append(f"    see: {finding.source}")
        for reason, ids in self._unchecked_by_reason():
            lines.append(f"{self.path}: not checked, because {reason}: {', '.join(ids)}")
        lines.append(f"{self.path}: {self.summary}")
        return "\n".join(map(printable, lines))

    @property
    def summary(self) -> str:
        """The frameworks and the number of findings, in one line."""
        titles = [FRAMEWORKS[one.framework].title for one in self.configurations]
        counts = {title: titles.count(title) for title in titles}
        read = ", ".join(
            title if count == 1 else f"{title} ({count} runs)" for title, count in counts.items()
        )
        findings = [
            f"{count} {severity}"
            for severity in SEVERITIES
            if (count := sum(finding.severity == severity for finding in self.findings))
        ]
        checks = f"{self.passed} checks passed, {len(self.unchecked)} not made"
        return f"{read}: {', '.join(findings) or 'nothing found'}; {checks}"

    def _unchecked_by_reason(self) -> list[tuple[str, list[str]]]:
        ids: dict[str, list[str]] = {}
        for one in self.unchecked:
            ids.setdefault(one.reason, []).append(one.id)
        return [(reason, list(dict.fromkeys(names))) for reason, names in ids.items()]

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON has it."""
        return {
            "path": self.path,
            "frameworks": [one.framework for one in self.configurations],
            "findings": [asdict(finding) for finding in self.findings],
            "unchecked": [asdict(one) for one in self.unchecked],
            "passed": self.passed,
        }

    def as_markdown(self) -> str:
        """Return a table of the findings, as a summary of continuous integration shows it."""
        if not self.configurations:
            return f"**{_cell(self.path)}**: {NO_CONFIGURATION}\n"
        lines = [f"**{_cell(self.path)}**: {_cell(self.summary)}"]
        if self.findings:
            lines += ["", "| line | | what | fix |", "|---|---|---|---|"]
        for finding in self.findings:
            happens, fix, source = map(_cell, (finding.happens, finding.fix, finding.source))
            what = f"**{finding.title}** (`{finding.id}`). {happens} *{source}*"
            lines.append(f"| {finding.line or ''} | {finding.severity} | {what} | {fix} |")
        reasons = self._unchecked_by_reason()
        if reasons:
            lines += [
                "",
                *(f"- not checked, because {_cell(reason)}: {', '.join(ids)}" for reason, ids in reasons),
            ]
        return "\n".join(lines) + "\n"

    def as_annotations(self) -> str:
        """Return a workflow command of GitHub for each finding, which marks its line in a pull request."""
        commands = {"stop": "error", "fix": "error", "look": "warning", "note": "notice"}
        lines = []
        for finding in self.findings:
            place = f"file={_property(finding.path)}"
            if finding.line:
                place += f",line={finding.line}"
            message = f"{finding.happens} Fix: {finding.fix} ({finding.source})"
            title = _property(f"{finding.title} ({finding.id})")
            lines.append(f"::{commands[finding.severity]} {place},title={title}::{_message(message)}")
        return "\n".join(lines)


NO_CONFIGURATION = "no configuration of " + ", ".join(framework.title for framework in FRAMEWORKS.values())


def _place(finding: LintFinding) -> str:
    return finding.path if finding.line is None else f"{finding.path}:{finding.line}"


def _shown_settings(settings: Mapping[str, Any]) -> str:
    """Return settings with their values in a line."""
    shown = []
    for name, value in settings.items():
        text = f"{value:g}" if isinstance(value, float) else str(value)[:80]
        shown.append(name if value is None else f"{name}={text}")
    return ", ".join(shown)


def _cell(text: str) -> str:
    """Return a text for a cell of a Markdown table: in one line, without what would end the cell or be markup."""
    escaped = printable(text)
    for character in "\\`*_[]|":
        escaped = escaped.replace(character, f"\\{character}")
    return escaped.replace("&", "&amp;").replace("<", "&lt;")


def _message(text: str) -> str:
    """Return a text for the message of a workflow command."""
    return printable(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Return a text for a property of a workflow command."""
    return _message(text).replace(":", "%3A").replace(",", "%2C")


def lint_file(path: str | Path) -> LintReport:
    """Check the configurations in a file.

    Args:
        path: A Python script (TRL), a YAML or TOML file, or a shell script with the command that trains.

    Raises:
        ValueError: if the file cannot be read.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "train.py"
    >>> _ = file.write_text("from trl import GRPOConfig\\nargs = GRPOConfig('out', num_generations=1)\\n")
    >>> [(finding.id, finding.line) for finding in lint_file(file).findings]
    [('group-of-one', 2)]
    """
    return lint_configurations(read_configurations(Path(path)), str(path))


def lint_configurations(
    configurations: Sequence[Configuration], path: str, *, started: bool = False
) -> LintReport:
    """Check configurations that were read from a file.

    Args:
        configurations: All that the file holds.
        path: The file, as it was named.
        started: Whether a run that has begun saved them.
    """
    findings: list[LintFinding] = []
    unchecked: list[Unchecked] = []
    passed = 0
    for configuration in configurations:
        for rule in RULES:
            if rule.framework != configuration.framework or (started and rule.only_before_start):
                continue
            result = _check(rule, configuration)
            if isinstance(result, LintFinding):
                findings.append(result)
            elif isinstance(result, Unchecked):
                unchecked.append(result)
            else:
                passed += 1
    findings.sort(key=lambda finding: (SEVERITIES.index(finding.severity), finding.line or 0))
    return LintReport(path, configurations, findings, unchecked, passed)


def lint_findings(configuration: Configuration) -> list[LintFinding]:
    """Return what is wrong or risky in one configuration, the gravest first.

    >>> configuration = Configuration.from_mapping("trl", {"num_generations": 2})
    >>> [finding.id for finding in lint_findings(configuration)]
    ['group-of-two']
    """
    return list(lint_configurations([configuration], configuration.path).findings)


def lint_run(path: str | Path) -> list[LintFinding]:
    """Return what is wrong or risky in the newest configuration of a run, the gravest first.

    Args:
        path: The run's folder, or its log. Without a configuration of a known framework the list is empty.

    >>> import json, tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> settings = {"importance_sampling_level": "token", "num_generations": 2}
    >>> _ = (folder / "config.yaml").write_text(json.dumps(settings))
    >>> [finding.id for finding in lint_run(folder)]
    ['group-of-two']
    """
    report = lint_run_configuration(newest_configuration(Path(path)))
    return [] if report is None else list(report.findings)


def lint_run_configuration(newest: RunConfiguration) -> LintReport | None:
    """Check the configuration that was found with a run; None if it is of no framework that has rules.

    Args:
        newest: The configuration.
    """
    if newest.framework is None or newest.framework not in FRAMEWORKS:
        return None
    path = str(newest.file)
    nested = newest.settings
    if newest.framework == "prime-rl":
        # The trainer writes its settings alone.
        nested = {"trainer": nested}
    configuration = Configuration.from_mapping(newest.framework, nested, path)
    if newest.framework == "prime-rl":
        configuration = configuration.with_defaults("trainer.")
        configuration = replace(configuration, incomplete="the file of the orchestrator")
    configuration = _with_lines(configuration, newest.file)
    if newest.framework == "trl" and (newest.adapter is not None or "LoRA rank" in newest.values):
        # TRL is given the adapter beside its own settings.
        adapter = {"use_peft": Setting("use_peft", True)}
        configuration = replace(configuration, settings={**adapter, **configuration.settings})
    return lint_configurations([configuration], path, started=True)


def _with_lines(configuration: Configuration, file: Path) -> Configuration:
    """Return a configuration with the lines of its settings, where the file has lines."""
    if file.suffix not in (".yaml", ".toml"):
        return configuration
    lines: dict[str, Setting] = {}
    with suppress(InvalidValue):
        for one in read_configurations(file):
            lines.update(one.settings)
    settings = {
        name: replace(setting, line=lines[name].line) if name in lines else setting
        for name, setting in configuration.settings.items()
    }
    return replace(configuration, settings=settings)


def _check(rule: Rule, configuration: Configuration) -> LintFinding | Unchecked | None:
    """Apply a rule; None if the configuration does not have the fault."""
    values = Values(configuration, rule.reads)
    try:
        if not rule.condition(values):
            return None
    except NotRead as error:
        return Unchecked(rule.id, rule.framework, configuration.path, configuration.line, str(error))
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        reason = f"one of {', '.join(rule.reads.values())} has a value of another kind than {rule.framework} expects"
        return Unchecked(rule.id, rule.framework, configuration.path, configuration.line, reason)

    shown = {short_name: values.shown(short_name) for short_name in rule.reads}
    settings = [setting for short_name in rule.reads if (setting := values.setting(short_name)) is not None]
    # The command itself comes last, as any of its settings tells more.
    settings.sort(key=lambda setting: setting.name == THE_COMMAND)
    line = next((setting.line for setting in settings if setting.line is not None), configuration.line)
    return LintFinding(
        id=rule.id,
        severity=rule.severity,
        framework=rule.framework,
        path=configuration.path,
        line=line,
        settings={
            setting.name: None if isinstance(setting.value, Unread) else setting.value
            for setting in settings
            if setting.name != THE_COMMAND
        },
        title=rule.title,
        happens=rule.happens.format(**shown),
        fix=rule.fix.format(**shown),
        source=rule.source,
    )
