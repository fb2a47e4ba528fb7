"""A path is opened as a log or as a record: what is read of it, when, and how often."""

import builtins
import gc
import io
import json
import math
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from bandpo.audit import Recorder
from rlvet import RecordedRun, Run, diagnose, open_run
from rlvet.errors import InvalidValue
from rlvet.records import LossBatch
from rlvet.records.record import read_record
from rlvet.records.run import TolerantCollector
from rlvet.runs import Setup

pa = pytest.importorskip("pyarrow")


def write_record(folder, steps=3, bad=False, **settings):
    g = torch.Generator().manual_seed(0)
    with Recorder(folder, **settings) as recorder:
        for step in range(steps):
            logp_old = -torch.rand(4, 6, generator=g) - 0.1
            logp = logp_old.clone()
            if bad and step == 1:
                logp[2, 3] = math.nan
            recorder.add(logp=logp, logp_old=logp_old, advantages=torch.randn(4, generator=g), step=step)
    return recorder.path


def write_log(folder, **settings):
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"step": step, "reward": 0.1 * step, "completions/mean_length": 9.0} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = {"importance_sampling_level": "token", "loss_type": "dapo", "epsilon": 0.2} | settings
    (folder / "config.yaml").write_text(json.dumps(arguments))
    return folder


@pytest.fixture
def opens(tmp_path, monkeypatch):
    """How often each file below the test's folder was opened, by its name, but for files of digests."""
    counts = Counter()

    def counting(function):
        def wrapper(file, *arguments, **options):
            path = Path(file) if isinstance(file, str | Path) else None
            is_digests = path is not None and path.suffix == ".sha256"
            if path is not None and not is_digests and path.resolve().is_relative_to(tmp_path.resolve()):
                counts[path.name] += 1
            return function(file, *arguments, **options)

        return wrapper

    monkeypatch.setattr(builtins, "open", counting(builtins.open))
    monkeypatch.setattr(io, "open", counting(io.open))
    monkeypatch.setattr(pa, "OSFile", counting(pa.OSFile))
    return counts


class Batches:
    """A collector of the batches themselves."""

    def __init__(self):
        self.batches = []

    def add(self, batch):
        self.batches.append(batch)


class Refusing(Batches):
    """A collector that refuses the batch of a step."""

    def __init__(self, step, error=None):
        super().__init__()
        self.step = step
        self.error = error or InvalidValue(f"step {step} has no bounds")

    def add(self, batch):
        if batch.step == self.step:
            raise self.error
        super().add(batch)


def test_a_log_and_its_configuration_are_read_once_and_not_before_they_are_asked_for(tmp_path, opens):
    folder = write_log(tmp_path / "run")
    opens.clear()
    run = open_run(folder, method="GSPO()")
    assert (type(run), run.path, opens) == (Run, folder, {})
    assert [row["step"] for row in run.rows] == [1, 2]
    assert opens == {"metrics.jsonl": 1, "config.yaml": 1}
    assert run.setup == Setup("trl", "FixedClip(0.2, 0.2)", "token", None, stale=False)
    assert opens == {"metrics.jsonl": 1, "config.yaml": 1}
    assert run.rows is run.rows
    assert run.setup is run.setup
    assert opens == {"metrics.jsonl": 1, "config.yaml": 1}


def test_a_diagnosis_reads_each_file_once_with_the_lines_of_the_settings(tmp_path, opens):
    folder = write_log(tmp_path / "run")
    (folder / "config.yaml").write_text("importance_sampling_level: token\nnum_generations: 2\n")
    opens.clear()
    diagnosis = diagnose(folder)
    assert [(finding.id, finding.line) for finding in diagnosis.configuration.findings] == [
        ("group-of-two", 2)
    ]
    assert opens == {"metrics.jsonl": 1, "config.yaml": 1}


def test_a_path_is_diagnosed_with_names_and_the_name_of_the_run(tmp_path):
    rows = [{"step": step, "run": name, "own/score": 0.1} for name in "ab" for step in range(12)]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = {"reward": "own/score"}
    diagnosis = diagnose(log, names=names, run_name="b")
    assert diagnosis.as_json() == diagnose(open_run(log, names=names, run_name="b")).as_json()
    assert diagnosis.log.read == {"reward": ("own/score",)}


@pytest.mark.parametrize("choice", [{"names": {"reward": "own"}}, {"run_name": "b"}])
def test_an_open_run_takes_no_names_any_more(choice, tmp_path):
    run = open_run(write_log(tmp_path))
    with pytest.raises(InvalidValue, match=r"is open already, .*give them to open_run"):
        diagnose(run, **choice)


def test_a_path_that_holds_nothing_is_refused_when_it_is_read(tmp_path):
    run = open_run(str(tmp_path / "nothing"))
    assert isinstance(run, Run)
    for read in (lambda: run.rows, lambda: run.setup):
        with pytest.raises(ValueError, match="nothing is no log of a run"):
            read()
    recorded = RecordedRun(run.path)
    for read in (lambda: list(recorded.batches()), lambda: recorded.scan([])):
        with pytest.raises(
            ValueError, match=r"nothing holds no record; give the folder that bandpo\.audit\.Recorder"
        ):
            read()


def test_a_record_is_opened_once_for_all_collectors(tmp_path, opens):
    """Two processes wrote it."""
    for process in (0, 1):
        write_record(tmp_path / "record", process=process, method="FixedClip(0.2)", framework="trl 1.16")
    opens.clear()
    run = open_run(tmp_path / "record")
    assert (type(run), run.record, opens) == (RecordedRun, tmp_path / "record", {})
    first, second = Batches(), Batches()
    run.scan(collector for collector in (first, second))
    assert opens == {"tokens-00000-0000.arrow": 1, "tokens-00001-0000.arrow": 1}
    assert all(isinstance(batch, LossBatch) for batch in first.batches)
    assert [batch.step for batch in first.batches] == [0, 1, 2, 0, 1, 2]
    assert all(one is other for one, other in zip(first.batches, second.batches, strict=True))
    for batch, apart in zip(first.batches, read_record(tmp_path / "record"), strict=True):
        np.testing.assert_array_equal(batch.logp, apart.logp)
        assert batch.location == apart.location
    opens.clear()
    assert run.setup == Setup("trl", first.batches[0].method)
    assert opens == {}  # it was in the first batch


def test_the_setup_of_a_record_is_in_its_first_batch(tmp_path, opens):
    write_record(tmp_path / "record", framework="verl 0.9.1", bad=True)
    opens.clear()
    run = open_run(tmp_path / "record", method="GSPO()")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run.setup == Setup("verl", "GSPO()")
        assert run.setup is run.setup
    gc.collect()
    assert opens == {"tokens-00000-0000.arrow": 1}
    with pytest.warns(UserWarning, match="1 sequences with values that cannot be right are left out"):
        run.scan([Batches()])
    assert opens == {"tokens-00000-0000.arrow": 2}


def test_what_a_record_names_comes_before_the_method_that_is_given(tmp_path):
    file = write_record(tmp_path, method="FixedClip(0.2)")
    for path in (tmp_path, file):
        assert open_run(path, method="GSPO()").setup.method == "FixedClip(low=0.2, high=0.2)"
        assert open_run(path).setup.framework is None


def test_a_record_within_a_run_s_folder_is_its_own(tmp_path):
    folder = write_log(tmp_path / "run")
    write_record(folder / "tokens", method="FixedClip(0.3)")
    run = open_run(folder)
    assert (type(run), len(run.rows)) == (Run, 2)
    assert run.setup.method == "FixedClip(0.2, 0.2)"  # its configuration's
    recorded = RecordedRun(folder)
    assert (recorded.record, recorded.setup.method) == (folder / "tokens", "FixedClip(low=0.3, high=0.3)")
    batches = Batches()
    recorded.scan([batches])
    assert [batch.step for batch in batches.batches] == [0, 1, 2]


def test_a_record_without_a_loss_is_refused(tmp_path):
    Recorder(tmp_path).close()
    run = open_run(tmp_path)
    with pytest.raises(ValueError, match="holds no tokens: nothing was added before it was closed or killed"):
        run.scan([Batches()])
    with pytest.raises(ValueError, match="holds no tokens: nothing was added"):
        _ = run.setup
    assert list(run.batches()) == []


def test_a_collector_that_refuses_a_batch_ends_the_scan(tmp_path):
    write_record(tmp_path)
    others = Batches()
    with pytest.raises(InvalidValue, match="step 1 has no bounds"):
        open_run(tmp_path).scan([others, Refusing(1)])
    assert [batch.step for batch in others.batches] == [0, 1]


def test_a_tolerant_collector_keeps_the_error_and_lets_the_others_go_on(tmp_path):
    write_record(tmp_path, steps=4)
    before, refusing, after, others = Batches(), Refusing(2), Batches(), Batches()
    tolerant = TolerantCollector(collector for collector in (before, refusing, after))
    assert tolerant.error is None
    open_run(tmp_path).scan([tolerant, others])
    assert tolerant.error is refusing.error
    assert [batch.step for batch in others.batches] == [0, 1, 2, 3]
    # The error ends all collectors of the tolerant one.
    assert [batch.step for batch in before.batches] == [0, 1, 2]
    assert [batch.step for batch in refusing.batches] == [0, 1]
    assert [batch.step for batch in after.batches] == [0, 1]


def test_a_tolerant_collector_without_an_error_is_as_if_it_were_not_there(tmp_path):
    write_record(tmp_path)
    batches = Batches()
    tolerant = TolerantCollector([batches])
    open_run(tmp_path).scan([tolerant])
    assert (tolerant.error, [batch.step for batch in batches.batches]) == (None, [0, 1, 2])


def test_a_tolerant_collector_tolerates_no_bug(tmp_path):
    write_record(tmp_path)
    tolerant = TolerantCollector([Refusing(1, ZeroDivisionError("a bug"))])
    with pytest.raises(ZeroDivisionError, match="a bug"):
        open_run(tmp_path).scan([tolerant])
    assert tolerant.error is None


def test_without_a_verdict_the_record_beside_the_log_is_named(tmp_path):
    write_record(tmp_path / "tokens")
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {s}, "reward": 0.{s}}}\n' for s in range(1, 6))
    )
    assert f"rlvet diagnose {tmp_path / 'tokens'}" in str(diagnose(tmp_path))
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {s}, "reward": 0.{s}}}\n' for s in range(1, 60))
    )
    assert "rlvet diagnose" not in str(diagnose(tmp_path))
