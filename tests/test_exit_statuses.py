"""The exit statuses of all commands, whatever becomes of their output."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
import typer
from typer.testing import CliRunner

from bandpo.cli.app import app as bandpo_app
from bandpo.cli.command_line import EXIT_STATUSES
from bandpo_lab.cli.app import app as lab_app
from rlvet.cli.app import app as rlvet_app

APPS = {"bandpo": bandpo_app, "bandpo-lab": lab_app, "rlvet": rlvet_app}

OUTPUTS = {
    "written": "",
    "a closed output": ">&-",
    "a full disk": ">/dev/full",
    "a closed error": "2>&-",
    "a full disk for errors": "2>/dev/full",
    "a closed input": "<&-",
    "all closed": "<&- >&- 2>&-",
}
"""Redirections of a shell, by what they mean for a command."""

UNWRITTEN = ("a closed output", "a full disk", "all closed")
"""The redirections with which the output is lost."""


def status_of(command: str, redirection: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Return a command's end in a shell with a redirection."""
    return subprocess.run(
        ["sh", "-c", f"{sys.executable} -m {command} {redirection}"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


COMMANDS = {
    "nothing found": ("rlvet diff one.yaml one.yaml", 0),
    "a difference": ("rlvet diff one.yaml other.yaml", 1),
    "no such file": ("rlvet diff one.yaml missing.yaml", 2),
}


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(
    "name",
    [name if name == "a difference" else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS],
)
def test_output_that_is_lost_is_an_error_and_never_a_finding(name, output, tmp_path):
    settings = "loss_type: dapo\nepsilon: 0.2\nepsilon_high: {}\nnum_iterations: 2\nnum_generations: 8\n"
    (tmp_path / "one.yaml").write_text(settings.format(0.2))
    (tmp_path / "other.yaml").write_text(settings.format(0.3))
    command, status = COMMANDS[name]
    ended = status_of(command, OUTPUTS[output], tmp_path)
    if output in UNWRITTEN and status < 2:
        status = 2
        if output != "all closed":
            assert ended.stderr.startswith("error: the output cannot be written: ")
    assert ended.returncode == status, (ended.stdout, ended.stderr)
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["rlvet skill", "bandpo bounds 0.1", "bandpo-lab recipes -h"])
def test_a_reader_that_has_gone_is_no_finding(command, tmp_path):
    """The command goes on, and says nothing, if the reader of its output ends first."""
    program, _, arguments = command.partition(" ")
    module = program.replace("-", "_")
    script = f"({sys.executable} -m {module} {arguments}; echo $? >status) | true"
    ended = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert ended.stderr == ""
    assert (tmp_path / "status").read_text().strip() in ("0", "2")


@pytest.mark.slow
@pytest.mark.parametrize("output", ["a closed output", "a full disk", "a closed error"])
def test_an_error_of_the_program_is_no_finding(output, tmp_path):
    program = """
def load_app():
    def app():
        print("begun")
        raise ZeroDivisionError("a fault of the program")
    return app

from {package}.cli import run_app
run_app(load_app, {{}})
"""
    for package in ("rlvet", "bandpo"):
        file = tmp_path / "program.py"
        file.write_text(program.format(package=package))
        ended = subprocess.run(
            ["sh", "-c", f"{sys.executable} program.py {OUTPUTS[output]}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 2
        if output != "a closed error":
            assert "ZeroDivisionError: a fault of the program" in ended.stderr


def commands_of(command: Any, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the words of a command and of its subcommands."""
    subcommands = getattr(command, "commands", {})
    below = [commands_of(subcommands[name], (*words, name)) for name in sorted(subcommands)]
    return [words, *itertools.chain.from_iterable(below)]


@pytest.mark.parametrize("name", APPS)
def test_the_help_of_each_command_names_the_statuses(name):
    for words in commands_of(typer.main.get_command(APPS[name])):
        if words == ("train",):
            continue  # its help is that of TRL's parser
        printed = CliRunner().invoke(APPS[name], [*words, "--help"], env={"COLUMNS": "200"}).output
        assert EXIT_STATUSES in " ".join(printed.split()), words
