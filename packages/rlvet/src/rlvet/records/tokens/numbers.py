"""Check that a record holds log-probabilities."""

from __future__ import annotations

from rlvet.checks.findings import Finding
from rlvet.checks.log.numbers import NOT_A_NUMBER
from rlvet.records.first_pass import FirstPass
from rlvet.records.registry import TOKENS


@TOKENS.check(
    "impossible values of tokens",
    after="",
    tested="values are numbers",
    explained="in a record, no log-probability is NaN or above 0",
    reports=(NOT_A_NUMBER,),
)
def check_numbers(first_pass: FirstPass) -> Finding:
    """Check that no sequence has NaN, an infinite value or a log-probability above 0."""
    bad = first_pass.bad_sequences
    count = bad + len(first_pass.batch)
    measure = "share of sequences with values that cannot be"
    passed = Finding("ok", True, "", bad / max(1, count), None, count, measure=measure)
    if not bad:
        return passed
    cause = f"{bad} of {count} sequences hold NaN, an infinite value or a log-probability above 0"
    return passed.failed(NOT_A_NUMBER, cause)
