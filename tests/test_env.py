import platform
import subprocess
import sys
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

import bandpo.cli.env
from bandpo._adapters import ADAPTERS, Adapter
from bandpo.cli.app import app

env = sys.modules["bandpo.cli.env"]


@pytest.fixture
def framework(tmp_path, monkeypatch):
    """Install a package `house` of version 1.0 and an adapter for it with a given source."""
    (tmp_path / "house.py").touch()
    metadata = tmp_path / "house-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: house\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import bandpo.integrations

    monkeypatch.setattr(bandpo.integrations, "__path__", [*bandpo.integrations.__path__, str(tmp_path)])

    def make(source, tested):
        (tmp_path / "house_adapter.py").write_text(source)
        return Adapter("House", "house", "house", "house_adapter", tested)

    yield make
    sys.modules.pop("bandpo.integrations.house_adapter", None)


@pytest.mark.parametrize(
    ("source", "tested", "said"),
    [
        ("import warnings; warnings.warn('noise')", "1.0", ("ok", "")),
        ("", "2.0", ("ok", "tested with 2.0")),
        ("raise AttributeError('no loss')", "1.0", ("fails", "AttributeError: no loss")),
    ],
)
def test_what_is_said_of_an_adapter(source, tested, said, framework):
    assert env.adapter_state(framework(source, tested), imports=True) == ("1.0", *said)


@pytest.mark.parametrize(("tested", "note"), [("1.0", ""), ("2.0", "tested with 2.0")])
def test_an_adapter_that_is_not_imported(tested, note, framework):
    assert env.adapter_state(framework("raise AssertionError", tested), imports=False) == (
        "1.0",
        "not tried",
        note,
    )


@pytest.mark.parametrize("imports", [False, True])
def test_a_framework_that_is_absent(imports):
    nobodys = Adapter("Nobody's", "nobodys-rl", "nobodys_rl", "trl", "1")
    assert env.adapter_state(nobodys, imports=imports) == ("", "absent", "")


def test_verl_that_does_not_see_the_plugin_fails_without_an_import(monkeypatch):
    monkeypatch.setattr(env.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other")
    verl = next(adapter for adapter in ADAPTERS if adapter.module == "verl")
    _, state, note = env.adapter_state(verl, imports=False)
    assert state == "fails"
    assert "keeps the plugin out" in note


def test_verl_without_its_entry_point_or_with_a_filter(monkeypatch):
    monkeypatch.setattr(env, "entry_points", lambda group: ())
    assert "pip install ." in env._verl_plugin_problem()

    class Point:
        value = "bandpo.integrations.verl"

    monkeypatch.setattr(env, "entry_points", lambda group: (Point(),))
    assert env._verl_plugin_problem() == ""
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other")
    assert "VERL_USE_EXTERNAL_PLUGINS=other keeps the plugin out" in env._verl_plugin_problem()


@pytest.mark.parametrize("options", [[], ["--import"]])
@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("not tried", 0), ("absent", 0), ("fails", 1)])
def test_the_command_has_a_row_for_each_and_fails_if_one_does(monkeypatch, state, code, options):
    states = dict.fromkeys(ADAPTERS, ("", "ok", "")) | {ADAPTERS[2]: ("1.0", state, "why")}
    monkeypatch.setattr(env, "adapter_state", lambda adapter, imports: states[adapter])
    result = CliRunner().invoke(app, ["env", *options])
    assert result.exit_code == code
    assert result.output.count("\n") > len(ADAPTERS)
    assert state in result.output


def test_each_row_is_printed_before_the_next_adapter_is_imported(monkeypatch, capsys):
    printed = []

    def state_of(adapter, imports):
        assert imports
        printed.append(capsys.readouterr().out)
        return "1.0", "fails", "why: [Errno 2] no such file"

    monkeypatch.setattr(env, "adapter_state", state_of)
    with pytest.raises(SystemExit):
        env.env_command(imports=True)
    assert printed[0].startswith(f"bandpo {bandpo.__version__}, Python ")
    for adapter, row in zip(ADAPTERS, [*printed[1:], capsys.readouterr().out], strict=True):
        assert row.split() == f"{adapter.framework} 1.0 fails why: [Errno 2] no such file".split()


@pytest.mark.parametrize(
    ("imports", "shown"), [(True, "imports torch ...\nimports verl and its adapter ...\n"), (False, "")]
)
def test_a_terminal_shows_which_framework_is_being_imported(monkeypatch, capsys, imports, shown):
    monkeypatch.setattr(env, "adapter_state", lambda adapter, imports: ("1.0", "ok", ""))
    monkeypatch.setattr(env.importlib.util, "find_spec", lambda name: name == "verl" or None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    env.env_command(imports=imports)
    printed = capsys.readouterr()
    assert printed.err == shown
    assert ("With --import each adapter is tried" in printed.out) == (not imports)


def test_without_imports_neither_torch_nor_a_framework_is_loaded():
    names = ["torch", "numpy", *(adapter.package for adapter in ADAPTERS)]
    code = f"""
import sys
import bandpo.cli
try:
    bandpo.cli.main()
except SystemExit:
    print(sorted({{*{names}}} & sys.modules.keys()))
"""
    run = subprocess.run([sys.executable, "-c", code, "env"], capture_output=True, text=True, check=True)
    first, *rows, last, loaded = run.stdout.splitlines()
    assert (
        first == f"bandpo {bandpo.__version__}, Python {platform.python_version()}, torch {version('torch')}"
    )
    assert [row.split()[0] for row in rows] == ["framework", *(adapter.framework for adapter in ADAPTERS)]
    assert "--import" in last
    assert loaded == "[]"
