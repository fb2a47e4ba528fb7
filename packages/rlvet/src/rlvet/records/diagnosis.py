"""Diagnose a record: check its tokens and advantages, then the course of its metrics; causes before their effects."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

from rlvet.checks.diagnosis import Diagnosis
from rlvet.checks.findings import Finding
from rlvet.checks.log_checks import log_findings
from rlvet.plugins import COLLECTORS, INSTALL_BANDPO, load_plugin, require_plugin
from rlvet.records.advantage_checks import advantage_findings, findings_and_notes
from rlvet.records.advantages.masks import END_TOKENS, PROMPTS
from rlvet.records.ages import AgeCollector
from rlvet.records.first_pass import FirstPass
from rlvet.records.recorded_advantages import AdvantageCollector, RecordedAdvantages
from rlvet.records.run import Collector, RecordedRun, TolerantCollector
from rlvet.records.token_checks import token_findings
from rlvet.runs.quantities import Row
from rlvet.runs.setup import Setup

FEW_TOKENS = 1000
"""Number of tokens of a record below which a note says that they are few."""


def diagnose_recorded_run(
    run: RecordedRun, *, method: object | None = None, collectors: Sequence[Collector] = ()
) -> Diagnosis:
    """Diagnose a run from its record of tokens, or from the batches that its framework saved.

    The effect of the clip is checked only if bandpo is installed.

    Args:
        run: The run, whose loss batches are read once.
        method: The method that the run was trained with, if no file of the run names one: its text, or an object of
            bandpo with this text.
        collectors: Further collectors to feed during the pass over the record.

    Raises:
        ValueError: if the run cannot be read.
        ImportError: if a method is given, and bandpo is not installed.
    """
    if method is None:
        plugin = load_plugin(COLLECTORS, "replay")
    else:
        plugin = require_plugin(COLLECTORS, "replay", "the method of a record")
    replay = None if plugin is None else plugin(method)
    first_pass = FirstPass.collector()
    ages = AgeCollector()
    advantages = AdvantageCollector()
    all_collectors: list[Collector] = [first_pass, advantages, ages, *collectors]
    if replay is not None:
        all_collectors.append(TolerantCollector([replay]))
    with warnings.catch_warnings():
        # The findings report impossible values.
        warnings.filterwarnings("ignore", "(?s).*values that cannot be right")
        run.scan(all_collectors)
    replayed = None if replay is None else replay.result()
    rows = [] if replayed is None else replayed.rows
    diagnosis = diagnose_record(first_pass.result(), advantages.result(), run.setup, rows)
    blocked = None if replayed is None else replayed.blocked_by_age
    diagnosis = replace(diagnosis, notes=[*ages.result().lines(blocked), *diagnosis.notes])
    if replay is None and run.has_losses:
        note = f"the effect of the clip was not checked, which needs bandpo: {INSTALL_BANDPO}"
        diagnosis = replace(diagnosis, notes=[*diagnosis.notes, note])
    return diagnosis


def diagnose_record(
    first_pass: FirstPass,
    advantages: RecordedAdvantages,
    setup: Setup,
    replayed_rows: Sequence[Row] = (),
) -> Diagnosis:
    """Diagnose a record from its first pass, and from a replay of its tokens if there is one.

    Args:
        first_pass: The tokens of every sequence when it was first recorded.
        advantages: Rewards, advantages and masks of the sequences.
        setup: The framework, method and settings of the run.
        replayed_rows: The rows of a replay, see `rlvet.plugins`.
    """
    of_advantages, notes = findings_and_notes(advantages)
    tokens = first_pass.coverage.total_tokens
    if 0 < tokens < FEW_TOKENS:
        notes = [
            *notes,
            f"{tokens:,} tokens are few: a small fault, or a fault of few tokens, would not show",
        ]
    findings = _findings_in_order(first_pass, of_advantages)
    batch_rows = first_pass.batch_rows()

    # The clip and the learning rate are not judged if the tokens violate an assumption that every method makes.
    if any(finding.ok is False for finding in findings):
        return Diagnosis(findings, setup, batch_rows, first_pass.coverage, notes=notes)

    # A replay only estimates the entropy; the batch rows have the recorded one.
    clip_rows = [{name: x for name, x in row.items() if name != "entropy"} for row in replayed_rows]
    findings += log_findings([*clip_rows, *batch_rows])
    return Diagnosis(findings, setup, batch_rows, first_pass.coverage, notes=notes)


def record_findings(
    first_pass: FirstPass, advantages: RecordedAdvantages, *, whole_groups: bool = True
) -> list[Finding]:
    """Run all checks of a record's tokens, advantages, rewards and masks, causes before their effects.

    Args:
        first_pass: The tokens of every sequence when it was first recorded.
        advantages: Rewards, advantages and masks of the sequences.
        whole_groups: True if `advantages` has all answers to each prompt. It has not in a micro-batch.
    """
    findings = advantage_findings(advantages, whole_groups=whole_groups)
    return _findings_in_order(first_pass, findings)


def _findings_in_order(first_pass: FirstPass, of_advantages: Sequence[Finding]) -> list[Finding]:
    """Run the checks of tokens, and return all findings of a record, causes before their effects.

    Args:
        first_pass: The tokens of every sequence when it was first recorded.
        of_advantages: The findings on advantages, rewards and masks.
    """
    mask_findings = [finding for finding in of_advantages if finding.subject in (END_TOKENS, PROMPTS)]
    counts_drawn_tokens = all(finding.ok is not False for finding in mask_findings)
    findings = token_findings(first_pass, counts_drawn_tokens=counts_drawn_tokens)
    numbers, *probability_findings, updates = findings

    # If a micro-batch of each batch is lost, the advantages of incomplete groups look wrong.
    if updates.code == "micro-batch-lost":
        return [numbers, updates, *of_advantages, *probability_findings]

    # A wrong mask, or missing answers, change the statistics of the tokens, so they come first.
    return [numbers, *of_advantages, *probability_findings, updates]
