"""Check a training configuration before the run: report settings that are wrong or risky, with the settings to change.

What a run did with its settings is not here, but in `rlvet.checks`.
Nothing in a configuration is imported or executed. Only the standard library and PyYAML are needed.
"""

from rlvet.lint.checks import LintFinding, LintReport, Unchecked, lint_file, lint_findings, lint_run
from rlvet.runs.configuration import Configuration

__all__ = [
    "Configuration",
    "LintFinding",
    "LintReport",
    "Unchecked",
    "lint_file",
    "lint_findings",
    "lint_run",
]
