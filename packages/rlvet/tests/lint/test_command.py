"""`rlvet lint`: its formats, its exit codes, and the hook for pre-commit."""

import json
import re
import tomllib

import pytest
import yaml

pytest.importorskip("typer")
from typer.testing import CliRunner

from lint_page import PAGE, page_with_tables
from pages import ROOT
from rlvet.cli.app import app

FAULTY = """python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
    actor_rollout_ref.rollout.n=1 \\
    actor_rollout_ref.actor.optim.lr=1e-3 \\
    trainer.n_gpus_per_node=$GPUS
"""
RISKY = "python -m verl.trainer.main_ppo actor_rollout_ref.actor.optim.lr=1e-3\n"
SOUND = "python -m verl.trainer.main_ppo actor_rollout_ref.actor.optim.lr=1e-6\n"


def lint(*arguments, **options):
    return CliRunner().invoke(app, ["lint", *map(str, arguments)], **options)


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(FAULTY)
    return file


@pytest.mark.parametrize(
    ("text", "options", "status"),
    [
        (FAULTY, [], 1),
        (RISKY, [], 0),
        (RISKY, ["--fail-on", "look"], 1),
        (RISKY, ["--fail-on", "note"], 1),
        (SOUND, ["--fail-on", "note"], 0),
        (FAULTY, ["--fail-on", "stop"], 0),
    ],
)
def test_the_exit_code_follows_the_severity(text, options, status, tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(text)
    assert lint(file, *options).exit_code == status


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.sh", "echo hello\n", "holds no configuration of TRL, verl, SkyRL, prime-rl, OpenRLHF"),
        ("run.yaml", "num_generations: [\n", "line 2: not YAML"),
        ("run.toml", "group_size = \n", "not TOML"),
        ("run.py", "GRPOConfig(\n", "line 1: not Python"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(name, text, message, tmp_path):
    file = tmp_path / name
    file.write_text(text)
    result = lint(file)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {file}")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert len(json.loads(lint(file, "--json").stdout)["errors"]) == 1


def test_other_files_are_passed_over_where_that_is_asked_for(script, tmp_path):
    other = tmp_path / "other.py"
    other.write_text("print('hello')\n")
    assert lint(other).exit_code == 2
    assert lint("--ignore-other-files", other).exit_code == 0
    assert lint("--ignore-other-files", other, script).exit_code == 1


def test_a_file_that_cannot_be_read_does_not_hide_the_others(script, tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text("group_size = \n")
    result = lint(broken, script, tmp_path / "missing.sh")
    assert result.exit_code == 2
    assert "one answer to each prompt" in result.stdout
    assert [line.split()[0] for line in result.stderr.splitlines()] == ["error:", "error:"]


def test_a_command_is_read_from_standard_input():
    result = lint("-", input=FAULTY)
    assert result.exit_code == 1
    assert "-:2: fix: one answer to each prompt [group-of-one]" in result.output


def test_text_names_the_line_the_fix_and_the_source_and_what_was_not_checked(script):
    output = lint(script).output
    assert f"{script}:2: fix: one answer to each prompt [group-of-one]\n" in output
    assert "    fix: actor_rollout_ref.rollout.n=8\n" in output
    assert "    see: verl 0.9.1, verl/trainer/ppo/core_algos.py" in output
    assert (
        f"{script}: not checked, because trainer.n_gpus_per_node is the environment variable GPUS: "
        "batch-does-not-divide-among-gpus\n"
    ) in output
    assert re.search(r"verl: 1 fix, 1 look; \d+ checks passed, 1 not made\n", output)


ON_THE_PAGE = """set -x
export N=8
LR=${LR:-1e-6}
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_batch_size=128 \\
    data.max_response_length=1024 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct \\
    actor_rollout_ref.actor.optim.lr=$LR \\
    actor_rollout_ref.rollout.n=$N \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.rollout.temperature=1.0 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
    trainer.n_gpus_per_node=$GPUS trainer.nnodes=1
"""


def test_the_page_has_a_real_output(tmp_path, monkeypatch):
    """The page cuts long lines off at an ellipsis."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run_qwen.sh").write_text(ON_THE_PAGE)
    printed = lint("run_qwen.sh").output.splitlines()
    (shown,) = re.findall(r"^```\n\n((?:    .*\n)+)", PAGE.read_text(), re.M)[:1]
    lines = [line.removeprefix("    ") for line in shown.splitlines()]
    assert len(lines) == len(printed)
    for on_page, line in zip(lines, printed, strict=True):
        assert line.startswith(on_page[:-1]) if on_page.endswith("…") else line == on_page


def test_json_has_findings_and_what_was_not_checked(script):
    (file,) = json.loads(lint(script, "--json").output)["files"]
    assert file["frameworks"] == ["verl"]
    assert [(one["id"], one["severity"], one["line"]) for one in file["findings"]] == [
        ("group-of-one", "fix", 2),
        ("learning-rate", "look", 3),
    ]
    assert [one["id"] for one in file["unchecked"]] == ["batch-does-not-divide-among-gpus"]


def test_annotations_of_github_have_file_and_line(script):
    lines = lint(script, "--format", "github").output.splitlines()
    assert lines[0].startswith(
        f"::error file={script},line=2,title=one answer to each prompt (group-of-one)::"
    )
    assert lines[1].startswith(f"::warning file={script},line=3,title=")
    assert len(lines) == 2


def test_markdown_is_a_table(script):
    lines = lint(script, "--format", "markdown").output.splitlines()
    assert lines[2:4] == ["| line | | what | fix |", "|---|---|---|---|"]
    assert lines[4].startswith("| 2 | fix | **one answer to each prompt** (`group-of-one`). ")
    assert lines[4].endswith(r" | actor\_rollout\_ref.rollout.n=8 |")


def test_a_value_of_a_stranger_cannot_leave_its_cell_or_its_annotation(tmp_path):
    file = tmp_path / "run.yaml"
    hostile = "a\\n::error::x | <b> [y](z) \\u001b[31m"
    file.write_text(
        f'algorithm: {{rollout_correction: {{rollout_rs: "{hostile}", rollout_rs_threshold: null}}}}\n'
        "actor_rollout_ref: {x: 1}\n"
    )
    annotations = lint(file, "--format", "github").output
    assert annotations.count("::error") - annotations.count("a\\n::error") == 1
    assert len(annotations.splitlines()) == 1
    table = lint(file, "--format", "markdown").output
    assert "\x1b" not in table + annotations + lint(file).output
    assert "\\| &lt;b> \\[y\\](z)" in table


def test_the_hook_for_pre_commit_is_the_command():
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    program, name, *options = hook["entry"].split()
    assert (hook["id"], program, name) == ("rlvet-lint", "rlvet", "lint")
    assert lint(*options, "missing").exit_code != 0
    assert hook["language"] == "python"
    # The root of the repository installs nothing.
    (folder,) = hook["additional_dependencies"]
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
    assert folder.startswith("./")
    assert program in project["project"]["scripts"]
    assert set(hook["types_or"]) == {"python", "yaml", "toml", "shell"}


def test_the_table_of_rules_and_that_of_quantities_are_made_from_the_code():
    assert PAGE.read_text() == page_with_tables(), "run `python tests/lint_page.py` and commit docs/lint.md"
