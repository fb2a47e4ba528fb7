"""The study of four rules in TRL's asynchronous trainer: its runs, its rows, and its report."""

import gzip
import json

import pytest

from helpers.frameworks import needs
from studies import async_trainer
from studies.async_trainer import (
    ARMS,
    CLIP,
    LAGS,
    ROWS,
    SEEDS,
    SMALLEST,
    UPDATES,
    Key,
    gains_table,
    keys,
    main,
    page,
    read_rows,
    train,
    whole_seeds,
)
from studies.predictions import read_predictions

PILOT_SEEDS = {900}


def made(key, reward):
    """Return a row with one mean reward."""
    values = {"seconds": 1.0, "age": 2.0, "dropped": 0, "blocked": 0.1, "distance": [0.2, 0.3]}
    return {**key._asdict(), **values, "reward": [reward, reward]}


def test_the_runs_and_the_predictions_fit():
    assert len(set(keys())) == len(keys()) == len(LAGS) * len(ARMS) * len(SEEDS)
    assert not PILOT_SEEDS & set(SEEDS)
    predictions = read_predictions(async_trainer.PREDICTIONS)
    assert {prediction.world for prediction in predictions} == {f"lag {lag}" for lag in LAGS}
    assert {name for prediction in predictions for name in (prediction.arm, prediction.minus)} == set(ARMS)
    assert {prediction.metric for prediction in predictions} == {"reward"}


def test_parts_go_on_where_they_stopped(tmp_path, monkeypatch):
    trained = []

    def stand_in(key):
        if len(trained) == 10:
            raise KeyboardInterrupt
        trained.append(key)
        return made(key, 0.5)

    monkeypatch.setattr(async_trainer, "train", stand_in)
    with pytest.raises(KeyboardInterrupt):
        main([str(tmp_path), "--part", "1/2"])
    first = tmp_path / ROWS.format(1, 2)
    assert len(first.read_text().splitlines()) == 10
    first.write_text(first.read_text() + '{"lag": 0, "ar')  # a process that was killed
    monkeypatch.setattr(async_trainer, "train", lambda key: trained.append(key) or made(key, 0.5))
    main([str(tmp_path), "--part", "1/2"])
    main([str(tmp_path), "--part", "2/2"])
    assert sorted(trained) == sorted(keys())
    assert read_rows(tmp_path).keys() == set(keys())


def test_the_report_has_the_differences_of_the_rows(tmp_path):
    rows = {}
    for key in keys():
        gain = {"BandAbove": 0.1, "BandPO": 0.1}.get(key.arm, 0.0) if key.lag == 4 else 0.0
        rows[key] = made(key, 0.3 + gain + (0.002 * key.seed if key.arm == "BandAbove" else 0.0))
    text = page(rows)
    assert "| lag 4 | BandAbove − clip 0.2 | greater | 12 | +0.113 [" in text
    assert "provisional" not in text
    with (tmp_path / ROWS.format(1, 1)).open("w") as lines:
        lines.writelines(json.dumps(row) + "\n" for key, row in rows.items() if key.seed < 3)
    main([str(tmp_path), "--report", str(tmp_path / "report.md")])
    text = (tmp_path / "report.md").read_text()
    assert "24 of 144 runs" in text
    assert "its verdicts are provisional: the tables have the 2 of 12 seeds" in text
    assert f"a difference of {SMALLEST:g}" in text


def test_a_seed_counts_with_its_last_run(tmp_path):
    rows = {key: made(key, 0.3 + 0.01 * key.seed + 0.1 * (key.arm != CLIP)) for key in keys() if key.seed < 4}
    del rows[Key(4, "BandPO", 3)]
    assert whole_seeds(rows) == [1, 2]
    assert "| lag 0 | BandAbove − clip 0.2 | equal | 2 | +0.100 [" in page(rows)
    whole = {key: row for key, row in rows.items() if key.seed in (1, 2)}
    assert [line.split(" | ")[:3] for line in gains_table(whole).markdown().splitlines()[2:]] == [
        [f"| {lag} (2.0)", "0.315", "+0.100 [+0.100, +0.100]"] for lag in LAGS
    ]
    # The rows of a finished study are compressed, as one file.
    lines = "".join(json.dumps(row) + "\n" for row in rows.values())
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert read_rows(tmp_path) == rows


@pytest.mark.slow
def test_a_run_is_of_old_data_and_is_the_same_each_time():
    needs("trl", oldest="1.16.0")
    row, again = (train(Key(2, "BandAbove", 900), versions=4) for _ in range(2))
    assert row | {"seconds": 0} == again | {"seconds": 0}
    assert len(row["reward"]) == len(row["distance"]) == 4
    # Each of the first three versions is trained on data of the first one. The first update on data of the second
    # version is one version older, as TRL requests it early.
    ages = [*range(3 * UPDATES), 3 * UPDATES, *(2 * UPDATES + update for update in range(1, UPDATES))]
    assert row["age"] == pytest.approx(sum(ages) / len(ages), abs=0.01)
    assert row["dropped"] == 0
    assert row["distance"][0] < row["distance"][3]
