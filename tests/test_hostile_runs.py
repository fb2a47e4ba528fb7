"""A run written by a stranger is data: reading it imports and executes nothing that lies in it or that it names."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import yaml  # noqa: F401  (before a stranger's folder is first on the path)

from bandpo import parse
from bandpo.audit import Recorder
from helpers.hostile import check_nothing_ran, is_gate, planted, result_of
from helpers.records import write_digests
from rlvet.records.format import META

pytest.importorskip("typer")
pa = pytest.importorskip("pyarrow")

TEXTS = (
    "evilmod.__doc__()",
    "evilmod.__init__()",
    "evilmod.__class__()",
    "evilmod.Rule()",
    "Band(evilmod.__doc__(), 0.1)",
    "Method(evilmod.Rule(), evilmod.__name__())",
    "os.system('touch ran')",
    "bandpo.cli.stop('x', 0)",
)


def with_log(folder: Path, method: str) -> None:
    """Write a log in TRL's form, and a configuration that names the method."""
    rows = [{"step": step, "reward": 0.1 * step, "entropy": 1.0} for step in range(1, 12)]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    settings = {"loss_type": "dapo", "importance_sampling_level": "token", "epsilon": 0.2, "method": method}
    (folder / "config.yaml").write_text(json.dumps(settings))


def with_record(folder: Path, method: str) -> None:
    """Write a record whose metadata name the method."""
    with Recorder(folder, method="DAPO()") as recorder:
        for step in range(3):
            logp_old = -torch.rand(4, 6)
            logp = (logp_old + 0.1 * torch.randn(4, 6)).clamp(max=-0.01)
            recorder.add(logp=logp, logp_old=logp_old, advantages=torch.randn(4), step=step)
    (file,) = folder.glob("tokens-*.arrow")
    with pa.OSFile(str(file)) as source:
        stream = pa.ipc.open_stream(source)
        metadata = json.loads(stream.schema.metadata[META]) | {"method": method}
        batches = [*stream]
    with pa.OSFile(str(file), "wb") as sink:
        schema = stream.schema.with_metadata({META: json.dumps(metadata)})
        with pa.ipc.new_stream(sink, schema) as writer:
            for batch in batches:
                writer.write_batch(batch.replace_schema_metadata(schema.metadata))
    write_digests(file)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [with_log, with_record])
@pytest.mark.parametrize(
    ("program", "command"),
    [("rlvet", "diagnose"), ("bandpo", "audit"), ("rlvet", "report"), ("rlvet", "lint")],
)
def test_commands_run_nothing_of_a_stranger(kind, program, command, tmp_path):
    """One process for each command: the first text stands for all, which a later test takes one by one.

    The command starts the processes of rlvet's gate, which read the folder, and nothing else. These start nothing.
    """
    folder = planted(tmp_path / "run")
    kind(folder, TEXTS[0])
    if command == "lint":
        (folder / "config.yaml").write_text(f"loss_type: dapo\nnum_generations: 1\nmethod: {TEXTS[0]}\n")
    result = result_of(folder, [command, "config.yaml" if command == "lint" else "."], program=program)
    gates = [event for event in result["events"] if is_gate(event, folder)]
    check_nothing_ran(folder, {**result, "events": [one for one in result["events"] if one not in gates]})
    assert len(gates) == len(result["readers"]) > 0
    for reader in result["readers"]:
        assert reader["reads"]  # the files are read there, and this is seen
        assert reader["events"] == []


@pytest.mark.slow
@pytest.mark.parametrize("start", ["forked", "spawned"])
def test_what_a_reader_starts_is_seen(start, tmp_path):
    """The test before would notice a reader of the gate that runs a program, or writes a file."""
    folder = planted(tmp_path / "run")
    code = (
        "import os, rlvet.runs.gate as gate; from helpers.watched import main; "
        f"gate._can_fork = lambda: {start == 'forked'}; "
        "main(lambda command: [gate.answer_of(os.system, command[1]), gate.answer_of(os.open, command[2], os.O_CREAT)])"
    )
    result = result_of(folder, ["true", "../outside"], code=code)
    assert [is_gate(event, folder) for event in result["events"]] == [True, True]
    assert [reader["events"] for reader in result["readers"]] == [["os.system"], ["open ../outside"]]
    assert (tmp_path / "outside").exists()


@pytest.mark.parametrize("kind", [with_log, with_record])
@pytest.mark.parametrize("text", TEXTS)
def test_a_run_s_text_names_only_classes_of_bandpo(kind, text, tmp_path, monkeypatch):
    """A diagnosis of a log shows the method's text; an audit, which needs the method, warns."""
    from bandpo.replay.record import method_of
    from rlvet import diagnose

    folder = planted(tmp_path)
    kind(folder, text)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    unknown = "the method that the run was trained with is not known"
    with nullcontext() if kind is with_log else pytest.warns(UserWarning, match=unknown):
        diagnosis = diagnose(folder)
    assert diagnosis.setup.method == text
    with pytest.warns(UserWarning, match=unknown):
        assert method_of(diagnosis.setup) is None
    assert method_of(diagnosis.setup, parse("GSPO()")) == parse("GSPO()")
    assert [file.name for file in folder.glob("ran*")] == []
    assert "evilmod" not in sys.modules


def test_a_class_that_is_loaded_is_not_reached_by_a_stranger_s_text(tmp_path, monkeypatch):
    """The folder's owner may have the module loaded, but a text of a run does not choose among loaded modules."""
    from bandpo import ClipRule, FixedClip

    loaded = type("Loaded", (FixedClip,), {"__module__": "loaded_for_hostile"})
    module = type(sys)("loaded_for_hostile")
    module.Loaded = loaded
    monkeypatch.setitem(sys.modules, "loaded_for_hostile", module)
    assert parse("loaded_for_hostile.Loaded()", ClipRule) == loaded()
    for text in ("loaded_for_hostile.Loaded()", "Loaded()"):
        with pytest.raises(ValueError, match="Loaded"):
            parse(text, ClipRule, imports=False)


@pytest.mark.parametrize(
    ("program", "command"), [("rlvet", "diagnose"), pytest.param("bandpo", "audit", marks=pytest.mark.slow)]
)
def test_python_m_has_no_current_folder_on_its_path(program, command, tmp_path):
    folder = planted(tmp_path)
    with_log(folder, TEXTS[0])
    run = subprocess.run(
        [sys.executable, "-m", program, command, "."], cwd=folder, capture_output=True, text=True
    )
    assert "Traceback" not in run.stderr
    assert [file.name for file in folder.glob("ran*")] == []


@pytest.mark.slow
def test_an_option_may_name_a_module_of_the_current_folder(tmp_path):
    with_record(tmp_path, "DAPO()")
    rule = "from bandpo import FixedClip\n\n\nclass Mine(FixedClip):\n    pass\n"
    (tmp_path / "mine_for_option.py").write_text(rule)
    result = result_of(tmp_path, ["audit", ".", "--method", "mine_for_option.Mine(0.3)"])
    assert result["modules"] == ["mine_for_option"]
    assert not result["path"]
