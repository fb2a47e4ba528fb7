import sys

import pytest
from typer.testing import CliRunner

import bandpo.cli.doctor  # noqa: F401
from bandpo.cli.app import app
from bandpo.integrations import ADAPTERS, Adapter

# The package's attribute of this name may be the command.
doctor = sys.modules["bandpo.cli.doctor"]


@pytest.fixture
def framework(tmp_path, monkeypatch):
    """A package `house` of version 1.0 and an adapter for it, whose source the test chooses."""
    (tmp_path / "house.py").touch()
    metadata = tmp_path / "house-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: house\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import bandpo.integrations

    monkeypatch.setattr(bandpo.integrations, "__path__", [*bandpo.integrations.__path__, str(tmp_path)])

    def make(source, tested="1.0"):
        (tmp_path / "house_adapter.py").write_text(source)
        return Adapter("House", "house", "house", "house_adapter", tested)

    yield make
    sys.modules.pop("bandpo.integrations.house_adapter", None)


def test_an_adapter_that_loads(framework):
    assert doctor.adapter_state(framework("import warnings; warnings.warn('noise')")) == ("1.0", "ok", "")


def test_another_version_than_the_tested_one(framework):
    assert doctor.adapter_state(framework("", tested="2.0")) == ("1.0", "ok", "tested with 2.0")


def test_an_adapter_that_the_framework_breaks(framework):
    found = doctor.adapter_state(framework("raise AttributeError('module house has no attribute loss')"))
    assert found == ("1.0", "fails", "AttributeError: module house has no attribute loss")


def test_a_framework_that_is_not_there():
    assert doctor.adapter_state(Adapter("Nobody's", "nobodys-rl", "nobodys_rl", "trl", "1")) == (
        "",
        "absent",
        "",
    )


def test_verl_without_its_entry_point_or_with_a_filter(monkeypatch):
    monkeypatch.setattr(doctor, "entry_points", lambda group: ())
    assert "pip install ." in doctor._verl_does_not_load_it()

    class Point:
        value = "bandpo.integrations.verl"

    monkeypatch.setattr(doctor, "entry_points", lambda group: (Point(),))
    assert doctor._verl_does_not_load_it() == ""
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other")
    assert "VERL_USE_EXTERNAL_PLUGINS=other keeps the plugin out" in doctor._verl_does_not_load_it()


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("absent", 0), ("fails", 1)])
def test_the_command_has_a_row_for_each_and_fails_if_one_does(monkeypatch, state, code):
    monkeypatch.setattr(
        doctor,
        "adapter_state",
        lambda adapter: ("1.0", state, "why") if adapter is ADAPTERS[2] else ("", "ok", ""),
    )
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == code
    assert result.output.count("\n") > len(ADAPTERS)
    assert state in result.output


def test_every_adapter_has_its_file_and_its_tests():
    from pathlib import Path

    import bandpo.integrations

    folder = Path(bandpo.integrations.__file__).parent
    tests = Path(__file__).parent
    for adapter in ADAPTERS:
        assert (folder / f"{adapter.module}.py").exists()
        assert (tests / "integrations" / f"test_{adapter.module}.py").exists()
