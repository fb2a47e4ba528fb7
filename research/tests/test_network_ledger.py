"""The study of the entropy ledger in the network: a record by hand, its report, and the committed records."""

import gzip
import hashlib
import json
from dataclasses import replace

import pytest
import torch

from bandpo.audit import entropy_ledger
from bandpo.core.text import as_method
from bandpo_lab.study.interval import Interval
from pages import ROOT
from reports import check_same_report
from studies import paper_setting
from studies.network_ledger import (
    ARMS,
    BATCHES,
    CLIP,
    EVERY,
    FIELDS,
    SECOND_TERMS,
    Key,
    Pair,
    RecordingTraining,
    Study,
    ledger_of,
    page,
    planned,
    read_records,
)

RECORDS = ROOT / "research/results/network-ledger/records.jsonl.gz"
REPORT = ROOT / "research/reports/network-ledger.md"
ROWS = ROOT / "research/results/paper-setting/rows.jsonl.gz"
AS_COMMITTED_BEFORE_THE_RECORDS = "e091386e6e25c6ab2b1654ba7085c1695d39c568de27aec8f77014abf09c3490"


def test_the_predictions_are_those_that_were_committed_before_the_records():
    file = ROOT / "research/studies/network-ledger-predictions.md"
    text = file.read_bytes().replace(b"\r\n", b"\n")
    assert hashlib.sha256(text).hexdigest() == AS_COMMITTED_BEFORE_THE_RECORDS


def test_the_runs_are_those_of_the_rows():
    runs = [*planned()]
    assert len(runs) == 4 * 9
    of_study = {(*key,) for _, key in paper_setting.NETWORK.runs()}
    assert {(*key,) for _, key in runs} <= of_study
    assert {cell.name for cell, _ in runs} == {*EVERY} == {*BATCHES}


@pytest.mark.slow
def test_a_record_is_of_its_run_and_does_not_change_it():
    """With the reward of the first batches, the tokens of the updates of a batch, and the entropies of the row."""
    cell, key = next(run for run in planned() if run[0].name == "4 x 4")
    training = RecordingTraining(replace(cell, batches=cell.batches), key)
    training.every = 2
    for _ in range(2):
        training.log.append(training.train_batch())
    row = training.row(key)
    with gzip.open(ROWS, "rt") as lines:
        stored = next(
            row
            for row in map(json.loads, lines)
            if all(row[name] == getattr(key, name) for name in Key._fields)
        )
    assert row["curve"] == stored["curves"]["entropy"][:2]
    tokens = {name: torch.tensor(row["tokens"][name]) for name in FIELDS}
    assert len({len(values) for values in tokens.values()}) == 1
    # One over the length of its answer, summed over the tokens: the answers, in each of four epochs.
    assert (1 / tokens["length"]).sum().item() == pytest.approx(4 * 8 * 16, rel=1e-3)
    assert tokens["log ratio"].std() > 0
    assert (tokens["logp"] <= 0).all()
    assert (tokens["entropy"] >= 0).all()


def test_a_ledger_by_hand():
    """Three answers of one token: a winner beyond 1.2 that is surprising, a loser below 0.8, and one inside."""
    probabilities = torch.tensor([0.1, 0.05, 0.5])
    entropy, collision = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0.1, 0.2, 0.3])
    advantage, ratio = torch.tensor([1.0, -1.0, 1.0]), torch.tensor([1.5, 0.5, 1.1])
    length = torch.tensor([2.0, 4.0, 1.0])
    columns = (probabilities.log(), ratio.log(), entropy, collision, advantage, length)
    record = {"tokens": {name: values.tolist() for name, values in zip(FIELDS, columns, strict=True)}}
    surprise = probabilities * (probabilities.log() + entropy)
    kept = {
        "Clip-Higher": [False, False],
        "clip [.8, 2]": [True, False],
        "no bound": [True, True],
        "BandAbove": [True, False],
    }
    weights = 1 / length
    terms = {"exact": collision, "mean": surprise.mean(), "none": torch.tensor(0.0)}
    for arm, (above, below) in kept.items():
        gained = torch.tensor([1.5 * above, -0.5 * below, 0.0])
        for second, term in terms.items():
            expected = (-gained * (surprise - term) * weights).sum() / weights.sum()
            assert ledger_of(record, arm, second) == pytest.approx(expected.item(), abs=1e-6), (arm, second)
    assert ledger_of(record, CLIP, "exact") == 0
    assert as_method(ARMS["BandAbove"]).clip.bounds((probabilities / ratio).log()).upper[0] > 1.5


def made_study(effects):
    """Return a study whose pairs have these ledgers and effects."""
    study = Study({}, {})
    study.__dict__["pairs"] = [
        Pair(
            "fresh",
            1e-4,
            arm,
            dict.fromkeys(SECOND_TERMS, ledger),
            Interval(value, value - half, value + half),
        )
        for arm, ledger, value, half in effects
    ]
    return study


def test_signs_are_of_sure_effects():
    study = made_study(
        [
            ("BandPO", -1.0, -0.1, 0.05),
            ("BandPO", 1.0, 0.1, 0.05),
            ("BandAbove", -1.0, 0.1, 0.05),
            ("no bound", 1.0, -0.1, 0.2),
        ]
    )
    assert study.signs(study.pairs) == {"sure": 3, "vote": 2, "exact": 2, "mean": 2, "none": 2}


# The committed records ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def study():
    with gzip.open(ROWS, "rt") as lines:
        rows = {Key(*(row[name] for name in Key._fields)): row for row in map(json.loads, lines)}
    return Study(read_records(RECORDS), rows)


def test_the_records_are_planned_and_have_the_entropies_of_their_rows(study):
    assert study.records.keys() <= {key for _, key in planned()}
    for key, record in study.records.items():
        batches = BATCHES[key.cell]
        assert record["curve"] == study.rows[key]["curves"]["entropy"][:batches]
    assert RECORDS.stat().st_size < 10e6


def test_the_committed_report_is_that_of_the_records(study):
    check_same_report(REPORT.read_text(encoding="utf-8"), page(study))


def test_what_pages_say_of_the_ledger(study):
    signs = study.signs(study.pairs)
    by_data = {name: study.signs(pairs) for name, pairs in study.groups().items()}
    reports = " ".join((ROOT / "research/reports/README.md").read_text(encoding="utf-8").split())
    assert (
        f"the ledger had {signs['exact']} of {signs['sure']} signs, a guess by rule {signs['vote']}."
        in reports
    )
    old, reused = by_data["lag 4"], by_data["4 x 4"]
    assert f"On old data it had {old['exact']} of {old['sure']} and ordered the rules" in reports
    assert f"on reused data {reused['exact']} of {reused['sure']}." in reports
    assert study.correlation(study.groups()["lag 4"], "exact") > 0.8
    verdicts = [cells[-1] for cells in study.verdicts_table().rows]
    assert (verdicts.count("held"), verdicts.count("failed")) == (1, 4)
    assert "one held and four failed" in reports
    module = " ".join((entropy_ledger.__doc__ or "").split())
    assert f"had the sign of {signs['exact']} of {signs['sure']} sure differences" in module
    assert f"a guess by rule that of {signs['vote']}" in module
    when = (ROOT / "docs/when.md").read_text(encoding="utf-8")
    assert signs["exact"] < signs["vote"]
    assert "had fewer right signs than a guess by rule" in when
