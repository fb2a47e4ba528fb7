"""Configurations in the cells of a notebook are read, with the lines of its file."""

import json

import pytest
from typer.testing import CliRunner

from rlvet.cli.app import app
from rlvet.errors import InvalidValue, OtherFormat
from rlvet.lint.checks import lint_text
from rlvet.lint.readers import parse_configurations


def notebook(*cells, indent=1):
    """Return a notebook with cells of code."""
    content = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    return json.dumps({"cells": content, "nbformat": 4}, indent=indent)


def test_the_arguments_of_a_cell_have_the_lines_of_the_file():
    text = notebook(
        "!pip install trl \\\n  vllm\n%matplotlib inline\nRATE = 5e-3",
        "%%time\nfrom trl import GRPOConfig\nargs = GRPOConfig(\n    'out', learning_rate=RATE,\n    num_generation=1)",
        "this is no Python",
        "args.num_generations = 1",
    )
    report = lint_text(text.encode(), "train.ipynb")
    lines = text.splitlines()
    found = {finding.id: lines[finding.line - 1] for finding in report.findings}
    assert found["learning-rate"].strip().startswith("\"    'out', learning_rate=RATE")
    assert found["misspelt-setting"].strip().startswith('"    num_generation=1)')
    assert found["group-of-one"].strip() == '"args.num_generations = 1"'


@pytest.mark.parametrize(
    ("cell", "framework"),
    [
        ("!python3 -m verl.trainer.main_ppo \\\n    data.train_batch_size=64", "verl"),
        ("%%bash\npython -m openrlhf.cli.train_ppo_ray --n_samples_per_prompt 8", "openrlhf"),
        ("%%writefile run.sh\npython3 -m verl.trainer.main_ppo data.train_batch_size=64", "verl"),
        ("%%writefile configs/rl.toml\n[orchestrator]\nbatch_size = 64", "prime-rl"),
        ("%%writefile train.py\nfrom trl import GRPOConfig\nargs = GRPOConfig('out')", "trl"),
    ],
)
def test_commands_and_written_files_are_read(cell, framework):
    (configuration,) = parse_configurations(notebook("print(1)", cell).encode(), "train.ipynb")
    assert configuration.framework == framework
    assert {one.line for one in configuration.settings.values()} <= {*range(12, 16)}


def test_a_notebook_in_one_line_is_read_without_lines():
    text = notebook("from trl import GRPOConfig", "GRPOConfig('out', num_generations=1)", indent=None)
    (finding,) = lint_text(text.encode(), "train.ipynb").findings
    assert (finding.id, finding.line) == ("group-of-one", None)


def test_a_notebook_of_another_framework_is_named(tmp_path):
    with pytest.raises(OtherFormat, match="is for Tinker"):
        parse_configurations(notebook("import tinker\ngroup_size = 4").encode(), "train.ipynb")
    for text in ("{", "[]", '{"cells": 1}'):
        with pytest.raises(InvalidValue, match="no notebook"):
            parse_configurations(text.encode(), "train.ipynb")
    file = tmp_path / "plot.ipynb"
    file.write_text(notebook("print(1)"))
    result = CliRunner().invoke(app, ["lint", str(file)])
    assert result.exit_code == 2
    assert "holds no configuration" in result.stderr


def test_a_written_file_that_cannot_be_read_does_not_hide_the_others():
    text = notebook("%%writefile a.toml\n[orchestrator", "from trl import GRPOConfig\nGRPOConfig('out')")
    assert len(parse_configurations(text.encode(), "train.ipynb")) == 1
