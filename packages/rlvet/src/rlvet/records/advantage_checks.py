"""Run the checks of advantages, rewards and masks of a record, causes before their effects."""

from __future__ import annotations

from rlvet.checks.findings import Finding
from rlvet.records.advantages.comparison import Comparison, compare_advantages
from rlvet.records.recorded_advantages import RecordCase, RecordedAdvantages
from rlvet.records.registry import ADVANTAGES


def advantage_findings(recorded: RecordedAdvantages, *, whole_groups: bool = True) -> list[Finding]:
    """Run all checks of advantages, rewards and masks, causes before their effects.

    Args:
        recorded: Rewards, advantages and masks of the sequences.
        whole_groups: True if `recorded` has all answers to each prompt.

    Returns:
        One finding per check.
    """
    findings, _ = findings_and_notes(recorded, whole_groups=whole_groups)
    return findings


def findings_and_notes(
    recorded: RecordedAdvantages, *, whole_groups: bool = True
) -> tuple[list[Finding], list[str]]:
    """Return the results of `advantage_findings` and of `advantage_notes`, computed together.

    Args:
        recorded: Rewards, advantages and masks of the sequences.
        whole_groups: True if `recorded` has all answers to each prompt.
    """
    case = RecordCase(recorded, whole_groups=whole_groups)
    findings = [case.of(check.function) for check in ADVANTAGES.checks()]
    note = case.of(compare_advantages).note
    return findings, [note] if note else []


def advantage_notes(recorded: RecordedAdvantages) -> list[str]:
    """Return sentences that name the estimator of the advantages, or the reason why it cannot be determined."""
    note = Comparison(recorded).note
    return [note] if note else []
