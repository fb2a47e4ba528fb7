import json
import os
import random
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bandpo.cli.app import app as bandpo_app
from bandpo.core.text import as_method, parse
from bandpo.replay.record import method_of
from rlvet import diagnose
from rlvet.cli.app import app
from rlvet.runs.configs import read_setup
from rlvet.runs.logs import Log, read_log
from rlvet.runs.setup import Setup
from rlvet.runs.summary import summarize


def row(step, **changed):
    """One log step of an audited TRL run."""
    audit = {"tokens": 1000, "calls": 4, "on_policy": 0.25, "inert": 0.5, "radius_used": 0.1}
    audit |= {"clip_high": 0.01, "clip_low": 0.02, "clip_high/0.01_to_0.1": 0.4, "clip_high_below_0.1": 0.4}
    audit |= {"blocked_mass_below_0.1": 0.3, "blocked_mass_below_0.01": 0.5}
    audit |= {"if/Band/clip_high": 0.005, "if/Band/clip_low": 0.01, "if/Band/blocked_mass_below_0.1": 0.02}
    audit |= {"tokens_positive/0.01_to_0.1": 100, "tokens_positive_below_0.1": 100}
    audit |= {"mass_positive_below_0.1": 50, "mass_positive_below_0.01": 20}
    trl = {"step": step, "entropy": 1.0, "reward": 0.1, "clip_ratio/high_mean": 0.5, "note": "text"}
    return trl | {"nan": None} | {f"audit/{k}": v for k, v in (audit | changed).items()}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_reads_three_formats_alike(tmp_path):
    rows = [row(1), row(2) | {"audit_detail": {"audit/ratio_mean": 2.0}}]
    write(tmp_path / "run" / "metrics.jsonl", rows)
    for step in (9, 10):  # of several checkpoints the newest counts
        history = [*rows, {"step": 2, "train_runtime": 1.0}] if step == 10 else rows[:1]
        write(tmp_path / f"trl/checkpoint-{step}/trainer_state.json", [{"log_history": history}])
    ours, trl = read_log(tmp_path / "run").rows, read_log(tmp_path / "trl").rows
    assert ours == trl
    assert [r["step"] for r in ours] == [1, 2]
    assert ours[0]["clip_high"] == 0.01  # the audit's, not TRL's mean of means
    assert ours[1]["audit/ratio_mean"] == 2.0  # the detail of a row is laid beside the rest
    verl = [
        {"step": 1, "data": {"actor/entropy": 0.7, "critic/score/mean": 0.2, "actor/pg_clipfrac": 0.03}},
        {"step": 2, "data": {"val-core/acc": 0.5}},
    ]
    only = read_log(write(tmp_path / "verl.jsonl", verl)).rows[0]
    assert only.items() >= {"step": 1, "entropy": 0.7, "reward": 0.2, "clip": 0.03}.items()
    assert summarize([only]).clipped == 0.03
    write(tmp_path / "other" / "metrics.jsonl", rows)
    with pytest.raises(ValueError, match=r"holds 2 runs: name those .* bandpo-lab study page"):
        read_log(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("trainer_state.json", '{"log_history": [{"step": 1', "is no trainer_state.json, or only a part"),
        ("metrics.jsonl", None, "is no log of a run: there is nothing of that name; give the folder"),
        ("metrics.jsonl", '{"step": 1, "data": 2}\n', "metrics.jsonl, line 1: data is no object"),
        ("metrics.jsonl", '{"step": 1, "loss": 2.0}\n', "it is thought to be of supervised training"),
    ],
)
def test_says_what_is_wrong_with_a_log(name, content, message, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_log(path)


def test_a_log_that_is_cut_off_or_still_being_written_is_read_up_to_there(tmp_path, monkeypatch):
    """By `bandpo audit` too."""
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "run" / "metrics.jsonl", [row(1), row(2)])
    with path.open("a") as file:
        file.write(json.dumps(row(3))[:30])
    with pytest.warns(UserWarning, match=r"run/metrics.jsonl, line 3: the last line is cut off"):
        result = CliRunner().invoke(bandpo_app, ["audit", "run"])
    assert result.exit_code == 0, result.output
    assert "run, 2 steps" in result.output


@pytest.mark.filterwarnings("ignore:.*the last line is cut off:UserWarning")
def test_the_diagnosis_says_that_a_run_is_still_at_work(tmp_path):
    """In the text and in JSON."""
    path = write(tmp_path / "metrics.jsonl", [row(1), row(2)])
    incomplete = "the last line of metrics.jsonl is incomplete"
    assert incomplete not in str(diagnose(path))
    with path.open("a") as file:
        file.write(json.dumps(row(3))[:30])
    printed = CliRunner().invoke(app, ["diagnose", str(tmp_path)]).output
    assert re.search(rf"{incomplete} and is left out: the run is thought to be still at work", printed)
    as_json = diagnose(path).as_json()
    assert any(note.startswith(incomplete) for note in as_json["log"]["notes"])
    os.utime(path, (1e9, 1e9))
    assert "the run was killed, or this is not the whole file; it was last written to on 2001-09-0" in str(
        diagnose(path)
    )
    # A whole line without its end is read.
    write(path, [row(1), row(2)])
    path.write_text(path.read_text().rstrip("\n"))
    assert incomplete not in str(diagnose(path))


def test_the_command_compares_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    write(tmp_path / "a" / "metrics.jsonl", [row(1), row(2)])
    history = [{"step": 1, "entropy": 0.4, "clip_ratio/high_mean": 0.0}]
    write(tmp_path / "b" / "trainer_state.json", [{"log_history": history}])
    result = CliRunner().invoke(bandpo_app, ["audit", "a", "b"])
    assert result.exit_code == 0, result.output
    assert "30.00%" in result.output  # of the gradient on rare tokens
    assert "Band would clip high" in result.output
    told = json.loads(CliRunner().invoke(bandpo_app, ["audit", "a", "b", "--json"]).output)
    assert told["a"]["methods"]["the run"]["blocked_mass_below_0.1"] == pytest.approx(0.3)
    assert told["b"]["methods"]["the run"]["clip_high"] == 0.0
    failed = CliRunner().invoke(bandpo_app, ["audit", "nowhere"])
    assert isinstance(failed.exception, ValueError)


@pytest.mark.parametrize(
    ("text", "method"),
    [("FixedClip(0.2)", "Method(FixedClip(0.2), level='sequence')"), ("DAPO()", "DAPO()")],
)
def test_a_run_folder_tells_its_method(text, method, tmp_path):
    arguments = {"method": text, "importance_sampling_level": "sequence"}
    (tmp_path / "config.yaml").write_text(json.dumps({"arguments": arguments}))
    setup = read_setup(tmp_path, row(1), "GMPO()")  # which the folder overrules
    assert (setup.method, setup.level) == (text, "sequence")
    assert repr(method_of(setup)) == repr(parse(method))


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """Create a module that writes a file when it is imported; return the folder and the text of a rule in it."""
    name = f"evil_{abs(hash(tmp_path))}"  # a text is read once in a process
    (tmp_path / f"{name}.py").write_text(
        "import pathlib\nfrom bandpo import Unclipped\npathlib.Path('imported').touch()\nclass X(Unclipped): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return f"{name}.X()"


@pytest.mark.parametrize("method", ["EVIL", "Method(TwoSided(FixedClip(), EVIL), EVIL)"])
def test_a_run_folder_cannot_have_its_modules_imported(method, evil):
    """Nor can a log; the user's own word has it imported."""
    arguments = {"method": method, "importance_sampling_level": "token"}
    Path("config.yaml").write_text(
        json.dumps({"arguments": arguments}).replace("EVIL", evil), encoding="utf-8"
    )
    rows = [row(1) | {"method": evil}, row(2)]
    write(Path("metrics.jsonl"), rows)
    Path("trainer_state.json").write_text(json.dumps({"log_history": rows, "method": evil}), encoding="utf-8")
    results = [CliRunner().invoke(app, ["diagnose", run, "-v"]) for run in (".", "trainer_state.json")]
    # Two log steps allow no verdict.
    assert [result.exit_code for result in results] == [2, 2]
    assert all(
        f"the run: trl, {method.replace('EVIL', evil)} per token" in result.output for result in results
    )
    setup = read_setup(Path(), read_log(".").keys)
    with pytest.warns(UserWarning, match=r"X would have to be imported.*name it yourself by --run-method"):
        assert method_of(setup) is None
    assert not Path("imported").exists()
    setup = read_setup(Path(), read_log(".").keys, evil)
    assert setup.method == method.replace("EVIL", evil)
    assert not Path("imported").exists()
    assert method_of(setup, as_method(evil)).clip == parse(evil).clip
    assert Path("imported").exists()


def test_a_framework_is_told_from_its_log_or_not_at_all():
    assert read_setup(Path("log"), {"step": 1, "actor/pg_loss": 0.1}).framework == "verl"
    assert read_setup(Path("log"), {"step": 1, "completions/clipped_ratio": 0.1}).framework == "trl"
    assert read_setup(Path("log"), {"step": 1, "entropy": 0.1}).framework is None
    assert Setup().setting("learning rate") == Setup("prime-rl").setting("clip") == ""
    assert Setup("slime").fill("smaller{learning rate}, or not") == "smaller (--lr), or not"


def test_a_run_folder_says_its_method(tmp_path):
    keys = ["step", "completions/clipped_ratio"]
    assert read_setup(tmp_path, keys) == Setup("trl")
    assert read_setup(tmp_path, keys, "GSPO()") == Setup("trl", "GSPO()")
    (tmp_path / "config.yaml").write_text("model: other\n")
    assert read_setup(tmp_path, keys).method is None


def written_in_each(every, blocks, **metrics):
    """Return rows as a callback writes them at each step from what the trainer logs every few steps."""
    draw = random.Random(1)
    rows = []
    for block in range(blocks):
        values = {name: round(draw.random(), 6) for name in metrics}
        rows += [{"step": block * every + row + 1, "epoch": row, **values} for row in range(every)]
    return rows


def test_rows_that_repeat_what_was_last_logged_are_read_once():
    rows = written_in_each(10, 40, reward=0, kl=0, my_loss=0)[3:-2]
    log = Log.of(rows)
    assert [row["step"] for row in log.rows] == [4, *range(11, 400, 10)]
    assert [row["reward"] for row in log.rows] == [
        row["reward"] for row in rows if row["epoch"] == 0 or row["step"] == 4
    ]
    (note,) = (note for note in log.notes if "copies" in note)
    assert note.startswith(f"{len(rows) - 40} of {len(rows)} rows are copies of the one before")


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([{"step": step, "reward": 0.0, "kl": 0.0} for step in range(100)], id="constant"),
        pytest.param([{"step": step, "reward": step // 10 / 10} for step in range(80)], id="few"),
        pytest.param(
            [{"step": step, "reward": step % 7 // 3} for step in range(100)], id="stands still at times"
        ),
        pytest.param([{"step": step, "reward": step / 10} for step in range(100)], id="no copies"),
    ],
)
def test_rows_of_a_run_that_stands_still_are_all_read(rows):
    log = Log.of(rows)
    assert len(log.rows) == len(rows)
    assert not any("copies" in note for note in log.notes)
