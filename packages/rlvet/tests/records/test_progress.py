"""What a terminal shows while a record is read."""

import sys

import pytest
import torch

from bandpo.audit import Recorder
from rlvet import open_run
from rlvet.records import progress

pytest.importorskip("pyarrow")


class Steps:
    def __init__(self):
        self.steps = []

    def add(self, batch):
        self.steps.append(batch.step)


@pytest.mark.parametrize(("is_terminal", "is_shown"), [(True, True), (False, False)])
def test_a_long_read_is_shown_on_a_terminal(is_terminal, is_shown, tmp_path, monkeypatch, capsys):
    logp = torch.full((2, 3), -1.0)
    with Recorder(tmp_path) as recorder:
        for step in range(4):
            recorder.add(logp=logp, logp_old=logp, advantages=torch.ones(2), step=step)
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    steps = Steps()
    open_run(tmp_path).scan([steps])
    assert steps.steps == [0, 1, 2, 3]
    captured = capsys.readouterr()
    assert ("reading the record" in captured.err) is is_shown
    assert captured.out == ""
