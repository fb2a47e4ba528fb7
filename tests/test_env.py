import sys

import pytest
from typer.testing import CliRunner

import bandpo.cli.env
from bandpo.cli.app import app
from bandpo.integrations import ADAPTERS, Adapter

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
    assert env.adapter_state(framework(source, tested)) == ("1.0", *said)


def test_a_framework_that_is_not_there():
    nobodys = Adapter("Nobody's", "nobodys-rl", "nobodys_rl", "trl", "1")
    assert env.adapter_state(nobodys) == ("", "absent", "")


def test_verl_without_its_entry_point_or_with_a_filter(monkeypatch):
    monkeypatch.setattr(env, "entry_points", lambda group: ())
    assert "pip install ." in env._verl_plugin_problem()

    class Point:
        value = "bandpo.integrations.verl"

    monkeypatch.setattr(env, "entry_points", lambda group: (Point(),))
    assert env._verl_plugin_problem() == ""
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other")
    assert "VERL_USE_EXTERNAL_PLUGINS=other keeps the plugin out" in env._verl_plugin_problem()


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("absent", 0), ("fails", 1)])
def test_the_command_has_a_row_for_each_and_fails_if_one_does(monkeypatch, state, code):
    states = dict.fromkeys(ADAPTERS, ("", "ok", "")) | {ADAPTERS[2]: ("1.0", state, "why")}
    monkeypatch.setattr(env, "adapter_state", states.get)
    result = CliRunner().invoke(app, ["env"])
    assert result.exit_code == code
    assert result.output.count("\n") > len(ADAPTERS)
    assert state in result.output


def test_each_row_is_printed_before_the_next_adapter_is_imported(monkeypatch, capsys):
    printed = []

    def state_of(adapter):
        printed.append(capsys.readouterr().out)
        return "1.0", "fails", "why: [Errno 2] no such file"

    monkeypatch.setattr(env, "adapter_state", state_of)
    with pytest.raises(SystemExit):
        env.env_command()
    assert printed[0].startswith(f"bandpo {bandpo.__version__}, Python ")
    for adapter, row in zip(ADAPTERS, [*printed[1:], capsys.readouterr().out], strict=True):
        assert row.split() == f"{adapter.framework} 1.0 fails why: [Errno 2] no such file".split()


def test_a_terminal_shows_which_framework_is_being_imported(monkeypatch, capsys):
    monkeypatch.setattr(env, "adapter_state", lambda adapter: ("1.0", "ok", ""))
    monkeypatch.setattr(env.importlib.util, "find_spec", lambda name: name == "verl" or None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    env.env_command()
    assert capsys.readouterr().err == "imports torch ...\nimports verl and its adapter ...\n"
