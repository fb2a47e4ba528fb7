"""Diagnoses a log in the browser: what docs/doctor/worker.js asks for, as JSON."""

import json
import math
import warnings
from collections.abc import Mapping
from typing import Any

from rlvet import diagnose, open_run
from rlvet._numbers import format_step
from rlvet._severities import SEVERITIES
from rlvet._terminal import printable
from rlvet.checks import Diagnosis, Finding
from rlvet.errors import RlvetError
from rlvet.runs.quantities import QUANTITIES

RECORD = "A record of tokens is diagnosed by the command: rlvet diagnose FOLDER. This page reads logs."


def verdict(path: str, names: Mapping[str, str], run_name: str) -> str:
    """Return the diagnosis of a log as JSON, or the error in words.

    Args:
        path: The log, or the folder of the run.
        names: For quantities the keys that the user named.
        run_name: Which run is meant, where there are several; empty otherwise.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run = open_run(path, names=names or None, run_name=run_name or None)
            answer = _described(diagnose(run))
        except ImportError:
            answer = {"error": RECORD, "code": "record", "choices": []}
        except (RlvetError, OSError) as error:
            answer = {
                "error": printable(error),
                "code": getattr(error, "code", "unreadable"),
                "choices": list(getattr(error, "choices", ())),
            }
    answer["warnings"] = [printable(warning.message) for warning in caught]
    answer["quantities"] = list(QUANTITIES)
    return json.dumps(answer)


def _described(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis as texts that a page shows as they are."""
    log = diagnosis.log
    notes = [] if log is None else list(log.notes)
    if diagnosis.replaced_keys:
        notes.append(f"read from another key: {diagnosis.replaced_text}")
    notes += diagnosis.remarks
    notes += filter(None, [diagnosis.order_text])
    return {
        "text": str(diagnosis),
        "markdown": diagnosis.as_markdown(),
        "headline": printable(diagnosis.headline),
        "severity": min(
            (finding.severity for finding in diagnosis.findings), key=SEVERITIES.index, default=""
        ),
        "no_verdict": bool(diagnosis.no_verdict),
        "basis": printable(diagnosis.basis),
        "setup": printable(diagnosis.setup),
        "notes": [printable(note) for note in notes],
        "findings": [_finding(finding) for finding in diagnosis.findings],
        "read": {}
        if log is None
        else {name: [printable(key) for key in keys] for name, keys in log.read.items()},
        "has_reward": log is not None and "reward" in log.read,
        # As they are logged, because one of them may be given back as the key of a quantity.
        "unread": diagnosis.unread,
        "counts": diagnosis.counts,
        "passed": [printable(name) for name in dict.fromkeys(diagnosis.passed)],
        "untested": {printable(name): printable(how) for name, how in diagnosis.untested.items()},
    }


def _finding(finding: Finding) -> dict[str, str]:
    onset = finding.onset
    texts = {
        "code": finding.code,
        "severity": finding.severity,
        "cause": finding.cause,
        "since": "" if onset is None or not math.isfinite(onset) else f"step {format_step(onset)}",
        "cost": finding.cost,
        "evidence": finding.evidence,
        "advice": finding.advice,
    }
    return {name: printable(text) for name, text in texts.items()}
