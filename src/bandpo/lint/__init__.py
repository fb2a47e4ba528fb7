"""Checks of a training configuration before the run: what is wrong or risky in it, and the setting that mends it.

Nothing of a configuration is imported or executed. The standard library and PyYAML are enough.
"""

from bandpo.lint.checks import LintFinding, LintReport, Unchecked, lint_file, lint_findings, lint_run
from bandpo.lint.configuration import Configuration

__all__ = [
    "Configuration",
    "LintFinding",
    "LintReport",
    "Unchecked",
    "lint_file",
    "lint_findings",
    "lint_run",
]
