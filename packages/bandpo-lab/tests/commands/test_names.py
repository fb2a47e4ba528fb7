"""Completion of names in a shell, and what is said of a name that is none."""

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from bandpo_lab.cli.app import app
from bandpo_lab.cli.names import complete_method, complete_model, recipe_names
from bandpo_lab.cli.recipes import SHIPPED


def completed(option, typed):
    """Return what a shell offers for an option of `bandpo-lab run verl`."""
    words = f"bandpo-lab run verl {option} {typed}"
    variables = {"_BANDPO_LAB_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "4"}
    result = CliRunner().invoke(app, [], env=variables, prog_name="bandpo-lab")
    return result.output.split()


@pytest.mark.parametrize(
    ("option", "typed", "offered"),
    [
        ("--model", "qwen", ["qwen2.5-3b-instruct", "qwen2.5-7b"]),
        ("--model", "smol", ["smollm2"]),
        ("--method", "GSPO", ["GSPO()"]),
        (
            "--method",
            "band-kl",
            [name for name in recipe_names(SHIPPED, "rule") if name.startswith("band-kl")],
        ),
    ],
)
def test_a_shell_completes_models_and_methods(option, typed, offered):
    assert offered
    assert set(offered) <= set(completed(option, typed))


def test_completion_imports_no_torch():
    code = """
import sys
from types import SimpleNamespace
from bandpo_lab.cli import app, names
assert "GSPO()" in names.complete_method(SimpleNamespace(params={}), "GS")
print("torch" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_an_unknown_model_hints_at_those_that_contain_it():
    result = CliRunner().invoke(app, ["run", "verl", "--model", "qwen", "--method", "band-kl", "--dry-run"])
    names = [name for name in recipe_names(SHIPPED, "model") if "qwen" in name]
    assert len(names) == 4
    assert all(name in str(result.exception) for name in names)


@pytest.mark.parametrize("complete", [complete_model, complete_method])
def test_nothing_is_offered_for_what_is_no_beginning(complete):
    assert complete(typer.Context(typer.main.get_command(app)), "zzz") == []


@pytest.mark.parametrize("words", ["compare", "data prepare", "eval", "rehearse", "study run"])
def test_the_folder_has_the_name_of_trl_too_and_no_help_is_cut(words):
    output = (
        CliRunner()
        .invoke(app, [*words.split(), "--output_dir", "x", "--unknown"], env={"COLUMNS": "80"})
        .output
    )
    assert "No such option: --unknown" in output
    assert "…" not in CliRunner().invoke(app, [*words.split(), "--help"], env={"COLUMNS": "80"}).output
