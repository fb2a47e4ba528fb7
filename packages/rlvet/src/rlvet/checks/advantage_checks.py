"""Run the checks of advantages, rewards and masks of a record, causes before their effects."""

from __future__ import annotations

from rlvet.checks.advantages.comparison import Comparison, check_advantages
from rlvet.checks.advantages.masks import check_ends, check_groups, check_losses, check_prompts
from rlvet.checks.advantages.rewards import check_rewards
from rlvet.checks.advantages.signal import check_signal
from rlvet.checks.findings import Finding
from rlvet.checks.recorded_advantages import RecordedAdvantages


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
    comparison = Comparison(recorded, whole_groups)
    findings = [
        ("missing answers of a group", check_groups(recorded, whole_groups=whole_groups)),
        ("losses without a token", check_losses(recorded)),
        ("end tokens in the mask", check_ends(recorded)),
        ("prompts in the mask", check_prompts(recorded)),
        ("advantages that are 0", check_signal(recorded)),
        ("formula of the advantages", check_advantages(comparison)),
        ("noise of the rewards", check_rewards(recorded)),
    ]
    notes = [comparison.note] if comparison.note else []
    return [finding._replace(subject=subject) for subject, finding in findings], notes


def advantage_notes(recorded: RecordedAdvantages) -> list[str]:
    """Return sentences that name the estimator of the advantages, or the reason why it cannot be determined."""
    note = Comparison(recorded).note
    return [note] if note else []
