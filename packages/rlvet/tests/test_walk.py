"""MAINTAINING.md has the files through which a log goes from the command to the text, in the order of the calls."""

import json
import re
import sys
from pathlib import Path

from typer.testing import CliRunner

import rlvet
from pages import ROOT
from rlvet.cli.app import app
from rlvet.runs import gate

SOURCE = Path(rlvet.__file__).parent
ROW = re.compile(r"^\| (\d+) \| `([\w/.]+)`[^|]* \| `(\w+)` \|", re.M)


def stays():
    """Return the number, the file and the function of each row of the table."""
    page = (ROOT / "MAINTAINING.md").read_text(encoding="utf-8")
    return ROW.findall(page.partition("<!-- walk: begin -->")[2].partition("<!-- walk: end -->")[0])


def calls_of(command):
    """Return the file and the function of each call within rlvet, and what the command printed."""
    calls = []

    def note(frame, event, _):
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(SOURCE):
            calls.append((file.relative_to(SOURCE).as_posix(), frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        result = CliRunner().invoke(app, command)
    finally:
        sys.setprofile(before)
    return calls, result.output


def test_the_stays_are_in_the_order_of_the_calls(tmp_path, monkeypatch):
    rows = [
        {
            "step": step,
            "reward": 0.3 + 0.001 * step,
            "kl": 0.01 if step < 120 else 0.01 * 1.05 ** (step - 120),
        }
        for step in range(1, 240)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"importance_sampling_level": "token", "num_generations": 2, "learning_rate": 5e-4}
    (tmp_path / "config.yaml").write_text(json.dumps(settings))

    # What the gate runs in another process is followed in this one.
    def answer_of(function, *arguments, types=()):
        sys.getprofile()(GateFrame, "call", None)
        return function(*arguments)

    monkeypatch.setattr(gate, "answer_of", answer_of)
    calls, output = calls_of(["diagnose", str(tmp_path)])
    assert "the largest that counts as usual" in output

    assert calls.count(("runs/gate.py", "answer_of")) == 1, "one process reads all of a run's files"

    listed = stays()
    assert [int(number) for number, _, _ in listed] == [*range(1, len(listed) + 1)]
    rest = iter(calls)
    for number, file, function in listed:
        assert (file, function) in rest, (
            f"stay {number}: {file}, {function} is not called after the one before it"
        )


class GateFrame:
    """The frame of the function in whose place the test puts another one."""

    class f_code:
        co_filename = str(SOURCE / "runs/gate.py")
        co_name = "answer_of"
