"""The first sentence of `bandpo audit` about three small records is that of readings that were made before.

``scripts/small_records.py`` made both: the readings by formulas of its own, from the tensors that the trainers got.
"""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("rlvet")

from bandpo.audit.closing_lines import percent
from bandpo.cli.app import app
from bandpo.replay.record_audit import audit_record
from rlvet import diagnose, open_run
from rlvet.runs.effect import amount

pytest.importorskip("pyarrow")

FOLDER = Path(__file__).parent / "records"
READINGS = json.loads((FOLDER / "readings.json").read_text())


@pytest.mark.parametrize("name", READINGS)
def test_the_first_sentence_is_that_of_the_reading(name):
    reading = READINGS[name]
    audit = audit_record(open_run(FOLDER / name))
    assert audit.effect.tokens == reading["tokens"] >= 100
    for rule, share in reading["dropped"].items():
        assert audit.effect.dropped[rule] == pytest.approx(share, abs=2e-3), rule
    shares = {rule: f"{percent(share)} ({amount(share)})" for rule, share in reading["dropped"].items()}
    sentence = next(line for line in audit.lines if "rare winners (p < 0.1, A > 0) the run dropped" in line)
    assert f"of the gradient on {reading['tokens']:,} rare winners" in sentence
    assert (
        f"the run dropped {shares['the run']}, clip 0.2 would have dropped {shares['clip 0.2']}" in sentence
    )
    assert f"Clip-Higher {shares['Clip-Higher']}" in sentence
    # A report begins with it, also where another anchor is said.
    assert audit.opening[0] == sentence
    assert sorted(audit.opening) == sorted(audit.lines)


@pytest.mark.parametrize("name", READINGS)
def test_the_kinds_of_the_tokens_are_in_words(name):
    output = CliRunner().invoke(app, ["audit", str(FOLDER / name)], env={"COLUMNS": "200"}).output
    assert "of the rare winners' gradient that clip 0.2 would have dropped, " in output
    assert "shown as ids" not in output
    # Another anchor is said before the sentence.
    has_anchor = "anchor: rollout" in output.partition("of the gradient on")[0]
    assert has_anchor == (name != "trl")


def test_groups_that_a_record_of_trl_once_numbered_in_each_loss_are_not_judged():
    """Its answers were in groups of 16, and its advantages were TRL's."""
    diagnosis = diagnose(FOLDER / "trl")
    assert diagnosis.healthy
    assert [note for note in diagnosis.notes if "advantages" in note] == [
        "the formula of the advantages was not tested: groups have 2 to 24 answers, and no size is that of most, as "
        "where a batch is split over losses that number their groups anew"
    ]
    untested = {
        finding.subject for finding in diagnosis.tested if "no size is that of most" in finding.advice
    }
    assert untested == {"missing answers of a group", "formula of the advantages"}


def test_every_record_has_a_reading():
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} == READINGS.keys()
