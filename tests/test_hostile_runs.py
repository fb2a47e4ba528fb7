"""A run written by a stranger is data: reading it imports and executes nothing that lies in it or that it names."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from bandpo import Recorder, parse
from bandpo.runs.record_format import META
from helpers.records import write_digests

pytest.importorskip("typer")
pa = pytest.importorskip("pyarrow")

PLANTED = (
    *("evilmod", "cuda", "pynvml", "opt_einsum", "mlx", "trl", "tokenizers_extra"),
    *("yaml", "numpy", "pyarrow", "rich", "typer", "json", "sqlite3"),
)
"""Modules that lie in the stranger's folder: one that its texts name, and some that libraries try to import."""

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

LOADED = """
import json, os, sys

opened = []


def hook(event, arguments):
    if event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "socket.connect"):
        opened.append(event)
    if event in ("socket.bind", "socket.getaddrinfo"):
        opened.append(event)
    if event == "exec" and arguments[0].co_filename.startswith(folder):
        opened.append(f"exec {arguments[0].co_filename}")
    if event == "open" and isinstance(arguments[0], str):
        path, mode, flags = arguments
        writes = set(mode or "") & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        outside = not os.path.abspath(path).startswith(folder)
        if writes and outside and not path.startswith("/dev/") and not path.endswith(".pyc"):
            # Python caches what it has compiled under a name with a number.
            if ".pyc." not in path:
                opened.append(f"open {path}")


folder = os.getcwd()
sys.addaudithook(hook)
from bandpo.cli import main

sys.argv = ["bandpo", *json.loads(os.environ["COMMAND"])]
try:
    main()
except SystemExit:
    pass
inside = [
    name
    for name, module in sys.modules.items()
    if str(getattr(module, "__file__", None) or "").startswith(os.getcwd())
]
print("RESULT", json.dumps({"events": opened, "modules": inside, "path": os.getcwd() in sys.path or "" in sys.path}))
"""


def planted(folder: Path) -> Path:
    """Put modules into the folder that leave a file behind when they are imported."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PLANTED:
        (folder / f"{name}.py").write_text(f"open('ran-{name}', 'w').close()\n")
    return folder


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


def result_of(folder: Path, command: list[str], **environment: str) -> dict:
    """Run a command of `bandpo` within the folder; return what it imported and started."""
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    run = subprocess.run(
        [sys.executable, "-P", "-c", LOADED],
        cwd=folder,
        env={
            "COMMAND": json.dumps(command),
            "PATH": "",
            "PYTHONPATH": str(Path(__file__).parents[1] / "src"),
            "TMPDIR": str(temporary),
        }
        | environment,
        capture_output=True,
        text=True,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, run.stdout + run.stderr
    assert "Traceback" not in run.stderr
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [with_log, with_record])
@pytest.mark.parametrize("command", ["diagnose", "audit", "report", "lint"])
def test_commands_run_nothing_of_a_stranger(kind, command, tmp_path):
    """One process for each command: the first text stands for all, which the next test takes one by one."""
    folder = planted(tmp_path / "run")
    kind(folder, TEXTS[0])
    if command == "lint":
        (folder / "config.yaml").write_text(f"loss_type: dapo\nnum_generations: 1\nmethod: {TEXTS[0]}\n")
    result = result_of(folder, [command, "config.yaml" if command == "lint" else "."])
    assert result == {"events": [], "modules": [], "path": False}
    assert [file.name for file in folder.glob("ran*")] == []


@pytest.mark.parametrize("kind", [with_log, with_record])
@pytest.mark.parametrize("text", TEXTS)
def test_a_run_s_text_names_only_classes_of_bandpo(kind, text, tmp_path, monkeypatch):
    """Where a log is diagnosed its method is a text that is shown; where an audit needs it, a warning says so."""
    from bandpo.audit.replay import method_of
    from bandpo.doctor.diagnosis import diagnose

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


def test_python_m_bandpo_has_no_current_folder_on_its_path(tmp_path):
    folder = planted(tmp_path)
    with_log(folder, TEXTS[0])
    run = subprocess.run(
        [sys.executable, "-m", "bandpo", "diagnose", "."], cwd=folder, capture_output=True, text=True
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
