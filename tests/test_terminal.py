"""Text of a run on a terminal: the terminal obeys nothing in it, and no tokenizer but the run's decodes it."""

import json
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import bandpo._terminal
import rlvet._terminal
import rlvet.cli
from bandpo._terminal import printable
from bandpo.audit import Recorder
from bandpo.cli.app import app
from bandpo.core.errors import InvalidValue
from bandpo.replay.blocked_tokens import BlockedToken, decoder, format_tokens
from rlvet.cli.app import app as rlvet_app

TERMINALS = (bandpo._terminal, rlvet._terminal)
"""Each package has this module."""
RED = "\x1b[31mred\x1b[0m"
CONTROLS = {
    "an escape sequence": (RED, r"\x1b[31mred\x1b[0m"),
    "a title": ("\x1b]0;mine\x07", r"\x1b]0;mine\x07"),
    "a CSI of one character": ("\x9b2J", r"\x9b2J"),
    "what deletes": ("a\x7f\x08b", r"a\x7f\x08b"),
    "lines": ("a\r\nb\u2028c\u2029d\x85e", r"a\r\nb\u2028c\u2029d\x85e"),
    "a tab": ("a\tb", r"a\tb"),
    "an override of the direction": ("a\u202eb\u202c", r"a\u202eb\u202c"),
    "an isolate": ("\u2066a\u2069", r"\u2066a\u2069"),
    "marks of direction": ("a\u200e\u200f\u061c", r"a\u200e\u200f\u061c"),
    "half a character": ("\ud800", r"\ud800"),
    "hidden tags": ("a\U000e0041", r"a\U000e0041"),
    "nothing to be seen": ("a\ufeff\u00ad\u200b", r"a\ufeff\xad\u200b"),
}
ORDINARY = (
    "½ · naïve π₀ ⟦word⟧ – “quoted”",
    "中文 日本語　한국어",
    "नमस्ते العربية עברית ไทย",
    "می\u200cخواهم",
    "👩\u200d🔬 👍🏽 ❤️",
    r"\frac{1}{2}",
    "a\u00a0b\u3000c",
    "",
)


@pytest.mark.parametrize("module", TERMINALS)
@pytest.mark.parametrize("name", CONTROLS)
def test_what_a_terminal_would_obey_is_shown(name, module):
    text, expected = CONTROLS[name]
    assert module.printable(text) == expected


@pytest.mark.parametrize("module", TERMINALS)
@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_stays(text, module):
    assert module.printable(text) == text


@pytest.mark.slow
@pytest.mark.parametrize("module", TERMINALS)
def test_no_control_of_unicode_is_left(module):
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    letters_by_category: dict[str, set[str]] = {}
    for letter in set(module.printable(every)):
        letters_by_category.setdefault(unicodedata.category(letter), set()).add(letter)
    assert not letters_by_category.keys() & {"Cc", "Cs", "Co", "Cn", "Zl", "Zp"}
    assert letters_by_category["Cf"] == {"\u200c", "\u200d"}


def test_words_are_shown_without_controls():
    token = BlockedToken(1.0, 3, [0, 1, 2], 1, 0.1, 2.0, 1.0, {"the run": 0.0})
    texts = {0: f"before{RED}", 1: "one\ntwo\u202e", 2: "after\x9b"}
    lines = format_tokens([token], lambda ids: "".join(texts[k] for k in ids))
    assert lines.splitlines()[0] == r" 1. before\x1b[31mred\x1b[0m ⟦one\ntwo\u202e⟧ after\x9b"


def tokenizer(folder: Path, word: str) -> Path:
    """Write a tokenizer that decodes each id below 16 to a word followed by the id."""
    tokenizers = pytest.importorskip("tokenizers")
    folder.mkdir(parents=True, exist_ok=True)
    model = tokenizers.models.WordLevel({f"{word}{k}": k for k in range(16)}, unk_token=f"{word}0")
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    return folder


def record(folder: Path, framework: str = "") -> Path:
    """Write a record of one loss with ids, some of them of blocked tokens."""
    pytest.importorskip("pyarrow")
    old = torch.tensor([[0.5, 0.01, 0.5], [0.5, 0.5, 0.2]]).log()
    new = torch.tensor([[0.5, 0.04, 0.5], [0.5, 0.5, 0.1]]).log()
    ids = torch.tensor([[7, 8, 9], [4, 5, 6]])
    with Recorder(folder, method="FixedClip(0.2)", framework=framework) as recorder:
        recorder.add(logp=new, logp_old=old, tokens=ids, advantages=torch.tensor([2.0, -1.0]), step=3)
    return folder


def decoded(run: Path, name: str | None = None) -> str:
    return decoder(run, name)([7])


def test_words_are_decoded_by_the_runs_own_tokenizer(tmp_path):
    run = tmp_path / "runs" / "mine"
    tokens = record(run / "tokens")
    assert decoded(tokens) == "7"
    tokenizer(run / "checkpoint-8", "eighth")
    tokenizer(run / "checkpoint-16", "sixteenth")
    assert decoded(tokens) == "sixteenth7"
    assert decoded(next(tokens.glob("*.arrow"))) == "sixteenth7"
    tokenizer(run, "run")
    assert decoded(tokens) == "run7"
    tokenizer(tokens, "record")
    assert decoded(tokens) == "record7"
    assert decoded(tokens, str(tokenizer(tmp_path / "other", "other"))) == "other7"


def test_the_final_model_of_bandpo_train_is_the_runs_own(tmp_path):
    run = tmp_path / "runs" / "mine"
    tokens = record(run / "tokens")
    tokenizer(run / "model", "final")
    assert decoded(tokens) == "7"
    (run / "config.yaml").touch()
    (run / "metrics.jsonl").touch()
    assert decoded(tokens) == "final7"


@pytest.mark.parametrize("place", ["runs/other", "runs/other/checkpoint-8", "runs", "runs/checkpoint-8", "."])
def test_no_neighbours_tokenizer_decodes_words(tmp_path, place, monkeypatch):
    run = record(tmp_path / "runs" / "mine")
    (run / "metrics.jsonl").touch()  # the record lies in the run's folder itself
    tokenizer(tmp_path / place, "neighbour")
    assert decoded(run) == "7"
    monkeypatch.chdir(run)
    assert decoded(Path()) == "7"


@pytest.mark.parametrize("place", ["runs/other", "runs/mine/other", "runs", "."])
def test_nor_does_one_beside_a_run_whose_record_has_a_folder_of_its_own(tmp_path, place):
    tokens = record(tmp_path / "runs" / "mine" / "tokens")
    tokenizer(tmp_path / place, "neighbour")
    assert decoded(tokens) == "7"


def test_a_folder_of_several_records_is_no_runs(tmp_path):
    first, _ = record(tmp_path / "first"), record(tmp_path / "second")
    tokenizer(tmp_path, "whose")
    assert decoded(first) == "7"


def test_a_tokenizer_runs_nothing_of_the_run(tmp_path, monkeypatch):
    run = record(tmp_path / "run")
    tokenizer(run, "run")
    (run / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}})
    )
    (run / "config.json").write_text(
        json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}})
    )
    (run / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run code"))
    assert decoded(run) == "run7"
    assert decoded(tmp_path, str(run)) == "run7"
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path):
    pytest.importorskip("tokenizers")
    run = record(tmp_path / "run")
    (run / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidValue, match=r"run/tokenizer\.json cannot be read .*--tokenizer"):
        decoder(run)
    with pytest.raises(InvalidValue, match=r"--tokenizer .*/missing: there is no such folder"):
        decoder(run, f"{tmp_path}/missing")


def test_a_tokenizer_that_is_missing_is_one_line(tmp_path, monkeypatch, capsys):
    """bandpo decodes the ids, and its error is rlvet's."""
    run = record(tmp_path / "run")
    monkeypatch.setattr(rlvet.cli, "escape_warnings", lambda: None)  # it would hold for all later tests
    for command in (["diagnose", "--words"], ["report"]):
        monkeypatch.setattr(sys, "argv", ["rlvet", *command, str(run), "--tokenizer", f"{tmp_path}/missing"])
        with pytest.raises(SystemExit) as end:
            rlvet.cli.main()
        assert end.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: --tokenizer {tmp_path}/missing: there is no such folder")


HOSTILE = f"{RED}\u202e[bold]\x9b"


def commanded(*words: str) -> str:
    """Return the output of `rlvet` in a separate process, on both streams."""
    run = subprocess.run(
        [sys.executable, "-m", "rlvet", *words], capture_output=True, text=True, encoding="utf-8"
    )
    return run.stdout + run.stderr


def obeyed(text: str) -> set[str]:
    """Return the characters of a text that `printable` escapes, except for line ends."""
    return {letter for line in text.split("\n") for letter in line if printable(letter) != letter}


def hostile_log(folder: Path) -> Path:
    """Write a log with a fault whose folder and keys contain control characters."""
    run = folder / f"run{HOSTILE}"
    run.mkdir()
    key = f"{HOSTILE}/learning_rate"
    rows = [{"step": k, "reward": 0.5, "clip_ratio/region_mean": 0.1, key: 0.0} for k in range(20)]
    for k, row in enumerate(rows):
        row |= {f"rewards/{HOSTILE}/mean": 0.0, "rewards/other/mean": 0.1 * k, f"own/{HOSTILE}": 1.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_diagnose_prints_no_controls_of_a_log(tmp_path):
    run = hostile_log(tmp_path)
    printed = CliRunner().invoke(rlvet_app, ["diagnose", str(run), "--verbose"]).output
    assert r"\x1b[31mred\x1b[0m\u202e[bold]\x9b is 0 in every one of 20 log steps" in printed
    assert r"not read: own/\x1b[31mred" in printed
    assert obeyed(printed) == set()
    of_scripts = CliRunner().invoke(rlvet_app, ["diagnose", str(run), "--json"]).output
    assert obeyed(of_scripts) == set()
    assert any(HOSTILE in finding["cause"] for finding in json.loads(of_scripts)["findings"])
    in_markdown = CliRunner().invoke(rlvet_app, ["diagnose", str(run), "--format", "markdown"]).output
    assert obeyed(in_markdown) == set()


def test_diagnose_prints_no_controls_of_a_record(tmp_path):
    run = record(tmp_path / f"run{HOSTILE}", framework=f"trl {HOSTILE}")
    tokenizer(run, HOSTILE)
    printed = CliRunner().invoke(rlvet_app, ["diagnose", str(run), "--words"]).output
    assert rf"⟦{printable(HOSTILE)}8⟧" in printed
    assert obeyed(printed) == set()


@pytest.mark.parametrize("what", ["log", "record"])
def test_audit_and_report_print_no_controls(tmp_path, what):
    run = hostile_log(tmp_path) if what == "log" else record(tmp_path / f"run{HOSTILE}")
    printed = CliRunner().invoke(app, ["audit", str(run)], catch_exceptions=False, terminal_width=400).output
    assert r"\x9b" in printed
    assert obeyed(printed) == set()
    printed = CliRunner().invoke(rlvet_app, ["report", str(run)], catch_exceptions=False).output
    assert rf"run{printable(HOSTILE)}" in printed
    assert obeyed(printed) == set()


def test_errors_and_warnings_print_no_controls(tmp_path):
    missing = commanded("diagnose", str(tmp_path / f"none{HOSTILE}"))
    assert rf"none{printable(HOSTILE)} is no log of a run" in missing
    assert obeyed(missing) == set()
    cut = hostile_log(tmp_path) / "metrics.jsonl"
    cut.write_text(cut.read_text() + '{"step": 21, "rew')
    warned = commanded("diagnose", str(cut))
    assert "the last line is cut off" in warned
    assert obeyed(warned) == set()


def test_the_name_of_a_file_begins_no_line_of_its_own(tmp_path):
    """A stranger's folder may hold a file whose name ends in a line that looks like one of rlvet's."""
    (tmp_path / "a\nok: all is well\n.jsonl").write_text("no JSON\n")
    (tmp_path / "a\nerror: b\n.yaml").write_text("[1\n")
    for command in (["diagnose", str(tmp_path)], ["lint", str(tmp_path / "a\nerror: b\n.yaml")]):
        (line,) = commanded(*command).splitlines()
        assert line.startswith("error: ")
        assert r"\n" in line
