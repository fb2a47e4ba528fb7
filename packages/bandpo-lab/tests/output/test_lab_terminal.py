"""What the lab's commands print: text of others is neither obeyed by the terminal nor taken for markup."""

import ast
import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.frameworks import needs

pytest.importorskip("math_verify")

import bandpo_lab
from bandpo_lab.cli.app import app
from bandpo_lab.evals.run import SAMPLES, SETTINGS
from bandpo_lab.files.validation import with_seal
from bandpo_lab.study.execute import Execution

HOSTILE = "[red]x[/red]\x1b[31m\x1b]0;t\x07\u202e\u2066\x9b"
SHOWN = r"[red]x[/red]\x1b[31m\x1b]0;t\x07\u202e\u2066\x9b"

STUDY = {
    "title": HOSTILE,
    "question": HOSTILE,
    "primary": HOSTILE,
    "stopping": HOSTILE,
    "baseline": "a",
    "arms": {"a": {"method": "DAPO()"}},
    "options": {},
    "experiments": {"main": {"question": "?", "seeds": [0]}},
}


def printed(*arguments) -> str:
    """Run a command in this process; return all that it printed."""
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False).output


def check(output: str) -> None:
    """Check that no character of the hostile text reached the terminal as such."""
    assert not any(letter in output for letter in "\x1b\x07\x9b\u202e\u2066"), ascii(output)


def test_a_study_s_texts(tmp_path, monkeypatch):
    results = {"failed": [HOSTILE]}
    monkeypatch.setattr(Execution, "__call__", lambda self: self.say(HOSTILE) or results)
    file = tmp_path / "study.yaml"
    file.write_text(json.dumps(STUDY))
    output = printed("study", "run", file, "--output-dir", tmp_path / f"out{HOSTILE.replace('/', '')}")
    check(output)
    assert output.count(SHOWN) == 6  # title, question, metric, stopping rule, what it says and what failed
    assert r"out[red]x[red]\x1b[31m" in output


def evaluation(folder):
    folder.mkdir()
    lines = []
    for k, score in enumerate((1.0, 0.0)):
        row = {
            "problem": f"{k}{HOSTILE}", "sample": 0, "data_source": f"{HOSTILE} [a](https://b.example)", "score": score,
            "answer": HOSTILE, "reason": "right", "finish": "stop", "tokens": 3, "completion": HOSTILE, "gold": HOSTILE,
        }  # fmt: skip
        digest = hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()
        lines.append(json.dumps({**row, "sha256": digest}) + "\n")
    (folder / SAMPLES).write_text("".join(lines))
    (folder / SETTINGS).write_text(json.dumps(with_seal({"n": 1, "problems": 2})))
    return folder


def test_the_names_of_evaluated_data(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    first, second = (evaluation(tmp_path / name) for name in ("a", "b"))
    output = printed("compare-evals", first, second)
    check(output)
    assert SHOWN in output


@pytest.mark.usefixtures("one_grader")
def test_a_report_on_a_terminal_with_colours(tmp_path, monkeypatch):
    """Rich writes its own colours there, and no link, title or writing direction of others."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("FORCE_COLOR", "1")
    output = printed("eval", "--regrade", "--output-dir", evaluation(tmp_path / "a"))
    assert not any(text in output for text in ("\x1b]", "\x07", "\x9b", "\u202e", "\u2066")), ascii(output)


PRINTING = {
    "__main__.py",  # fixed words, before anything else could be imported
    "cli/__init__.py",  # so too
    "cli/compare.py",  # JSON, which escapes by itself,
    "cli/compare_evals.py",
    "evals/math_worker.py",  # which the grader reads,
    "rehearsal/rollout.py",  # and into a file
}
"""Modules that call ``print``; what it is given is no text of others."""


def test_all_else_is_printed_by_one_module():
    folder = Path(bandpo_lab.__file__).parent
    calls = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert calls == PRINTING


class State:
    """What transformers tells a callback."""

    global_step, max_steps, is_world_process_zero = 3, 8, True


def test_the_line_of_a_training_step_goes_through_it(capsys):
    needs("trl")
    from bandpo_lab.training.callbacks import ProgressBar

    bar = ProgressBar()
    bar.on_train_begin(None, State, None)
    assert bar.training_bar is not None
    bar.training_bar.disable = True
    bar.on_log(None, State, None, {"reward": 0.25, "entropy": None})
    assert capsys.readouterr().err.endswith("step 3/8: reward 0.250\n")


def test_the_name_of_a_folder_makes_no_line_of_its_own(tmp_path, capsys):
    needs("trl")
    from bandpo_lab.training.run_folder import RunFolder

    folder = RunFolder(tmp_path / "a\nerror: b\x1b[31m")
    folder.path.mkdir()
    folder.errors.mkdir()
    folder.record_error()
    (line,) = capsys.readouterr().err.splitlines()
    check(line)
    assert r"a\nerror: b\x1b[31m" in line
