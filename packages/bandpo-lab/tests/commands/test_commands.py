"""Every command: its help, what the documentation prints of it, and how `bandpo-lab train` ends."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys

import pytest

from helpers.frameworks import needs

pytest.importorskip("typer")
import typer
from typer.testing import CliRunner

import bandpo_lab
from bandpo.cli.app import app as library_app
from bandpo_lab.cli import main
from bandpo_lab.cli.app import app
from bandpo_lab.cli.recipes import SHIPPED
from bandpo_lab.rehearsal.shrink import compose
from command_names import UPDATE, listed_names, names_of
from helpers.sources import SOURCES
from pages import PAGES, ROOT, blocks, commands, follow
from rlvet.cli.app import app as rlvet_app
from test_cli import full_disk

GROUP = typer.main.get_command(app)
GROUPS = {"data", "recipes", "study"}
COMMANDS = ["train", "eval", "compare", "compare-evals", "setup", "preflight", "run", "rehearse"]
COMMANDS += ["data", "study", "recipes"]
"""The commands in the order of the help."""
NAMES = [name for name in COMMANDS if name not in {"train", *GROUPS}]
NAMES += [f"{group} {name}" for group in sorted(GROUPS) for name in GROUP.commands[group].commands]
"""The commands whose options typer knows."""


def resolve(words):
    """Return the command that words name, and its arguments."""
    group = words[0]
    # The first command of these groups may be left out.
    if group in ("recipes", "study") and not {*words[1:2]} <= GROUP.commands[group].commands.keys():
        first = next(iter(GROUP.commands[group].commands))
        words = [group, first, *words[1:]]
    depth = 2 if group in GROUPS and len(words) > 1 else 1
    command = GROUP
    for name in words[:depth]:
        assert name in command.commands, f"there is no command `bandpo-lab {' '.join(words[:depth])}`"
        command = command.commands[name]
    return command, words[depth:]


def test_help_lists_exactly_the_commands_of_the_lab():
    assert set(GROUP.commands) == set(COMMANDS)
    printed = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    assert re.findall(r"^│ (\w[\w-]*) ", printed, re.M) == COMMANDS


def test_names_of_commands_and_options_are_those_of_the_listing():
    assert names_of("bandpo-lab", app) == listed_names("bandpo-lab"), UPDATE


def test_help_and_import_load_no_framework():
    code = "import sys, bandpo_lab, bandpo_lab.cli.app; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert not {*run.stdout.split()} & {
        "torch",
        "trl",
        "transformers",
        "datasets",
        "verl",
        "matplotlib",
        "pydantic",
    }


def test_version():
    assert CliRunner().invoke(app, ["--version"]).output.strip() == bandpo_lab.__version__


def test_a_missing_package_is_one_line(monkeypatch):
    def fail():
        raise ModuleNotFoundError("No module named 'pydantic'", name="pydantic")

    monkeypatch.setattr("bandpo_lab.cli.app.app", fail)
    with pytest.raises(
        SystemExit,
        match=r"^error: .*needs the package pydantic; .* pip install .* './packages/bandpo-lab\[study\]'",
    ) as end:
        main()
    assert end.value.code == 2


@pytest.mark.parametrize("name", ["bandpo", "rlvet"])
def test_a_missing_sibling_is_one_line_with_the_command_that_installs_it(name, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(f"""
import importlib.machinery
find = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, module, path=None, target=None: None if module == {name!r} else find(module, path, target)
)
""")
    path = os.pathsep.join([str(tmp_path), *map(str, SOURCES)])
    for words in (["--version"], ["recipes"], ["compare", "GRPO()", "DAPO()"]):
        run = subprocess.run(
            [sys.executable, "-m", "bandpo_lab", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 2
        assert run.stderr == (
            f"error: bandpo-lab needs {name}: in a clone of bandpo, "
            "pip install ./packages/rlvet ./packages/bandpo ./packages/bandpo-lab\n"
        )


def test_python_m_runs_the_command_without_the_current_folder(tmp_path):
    (tmp_path / "typer.py").write_text("raise RuntimeError('a module of the current folder was imported')\n")
    run = subprocess.run(
        [sys.executable, "-m", "bandpo_lab", "--version"], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.stdout.strip() == bandpo_lab.__version__, run.stderr


def test_a_misspelt_method_is_one_line_and_loads_no_framework():
    code = """
import sys
from bandpo_lab.cli import main
for words in ("train --method Bnad()", "train --method=Bnad()", "compare GRPO() Bnad()"):
    sys.argv = ["bandpo-lab", *words.split()]
    try:
        main()
    except SystemExit as end:
        print(end.code, *[m for m in ("trl", "transformers", "verl", "matplotlib") if m in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "2\n2\n2\n", run.stderr
    lines = run.stderr.splitlines()
    assert len(lines) == 3
    assert all("did you mean" in line for line in lines)


def options_of_train():
    needs("trl")
    from bandpo_lab.training.arguments import Parser

    actions = [*Parser()._actions, *Parser(is_async=True)._actions]
    return {option for action in actions for option in action.option_strings} | {
        "--async",
        "--config",
        "--help-all",
    }


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_command_has_help_that_explains_every_option(name):
    command, _ = resolve(name.split())
    assert "Usage:" in CliRunner().invoke(app, [*name.split(), "-h"]).output
    assert command.help
    assert [p.name for p in command.params if not p.help] == []


def test_train_shows_our_options_first_and_the_others_when_asked(capsys):
    assert {"--method", "--learning_rate", "--resume"} <= options_of_train()
    from bandpo_lab.training.arguments import HELP, RunArguments, TrainingConfig, parse_arguments

    printed = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as stop:
            parse_arguments([flag])
        assert stop.value.code == 0
        printed.append(capsys.readouterr().out)
    ours, every = printed
    assert "--audit_steps" in ours
    assert "(default: 320)" in ours  # the embedded task's own
    assert len(ours.splitlines()) <= 120
    assert "--lr_scheduler_type" in every
    shown = {name for names in HELP.values() for name in names}
    names = {
        name for part in (RunArguments, TrainingConfig) for cls in part.__mro__ for name in own_fields(cls)
    }
    assert names - {"epsilon", "importance_sampling_level", "loss_type"} <= shown


def own_fields(cls):
    """What a class of ours declares itself."""
    return vars(cls).get("__annotations__", {}) if cls.__module__.startswith("bandpo") else {}


@pytest.mark.parametrize(
    "page",
    # Its commands need its files: test_docs runs them.
    # The flow of the paper has capitals to fill in: packages/bandpo-lab/tests/recipes/test_flow.py runs its commands.
    [page for page in PAGES if page.name not in ("write-your-own.md", "paper.md")],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_commands_of_the_lab_on_pages_parse(page, tmp_path, monkeypatch):
    # `bandpo-lab recipes summary LOG` opens its argument while it is parsed.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "LOG").touch()
    shutil.copytree(SHIPPED, tmp_path / "recipes")  # as `bandpo-lab recipes` does
    for words in commands(page, "bandpo-lab"):
        if words[0].startswith("-"):
            continue
        command, arguments = resolve(words)
        if not arguments or "help" in arguments[0]:
            # The page only names the command.
            continue
        if words[0] == "train":
            needs("trl")
            from bandpo_lab.training.arguments import parse_arguments

            parse_arguments([*arguments, "--use_cpu", "--bf16=False"])
        else:
            command.make_context(command.name, arguments).close()


OTHERS = {  # options that the pages name of other programs
    "--hf_upload_path": "verl.model_merger",
    "--num-steps-per-rollout": "slime",
    "--use-rollout-logprobs": "slime",
    "--save-debug-train-data": "slime, miles",
    "--dump-details": "miles",
    "--varied": "benchmarks/doctor/run.py",
    "--without": "scripts/first_hour.py",
    "--dry-run": "recipes/launch.sh",
    **dict.fromkeys(("--cfg", "--config-name"), "hydra"),
    **dict.fromkeys(("--no-deps", "--no-build-isolation"), "pip"),
    **dict.fromkeys(("--requeue", "--signal"), "Slurm"),
}


@pytest.mark.parametrize(
    "page",
    # This page names the options of frameworks.
    [page for page in PAGES if page.name != "frameworks.md"],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_options_in_prose_exist(page):
    named = set(re.findall(r"`(--[\w-]+)[^`]*`", page.read_text())) - OTHERS.keys()
    ours = {option for name in NAMES for p in resolve(name.split())[0].params for option in p.opts}
    ours |= {
        option
        for command_line in (library_app, rlvet_app)
        for command in typer.main.get_command(command_line).commands.values()
        for p in command.params
        for option in p.opts
    }
    unknown = named - ours
    assert not unknown or not unknown - options_of_train()


def test_a_run_ends_with_its_scores_and_its_rule_on_one_line(tmp_path, monkeypatch):
    needs("trl")
    from bandpo_lab.training import train as training
    from bandpo_lab.training.run_folder import RunFolder

    folder = RunFolder(tmp_path)
    folder.record_evaluation("before", {"mean@4": 0.25})
    monkeypatch.setattr(training, "run_training", lambda arguments: folder)
    monkeypatch.setenv("COLUMNS", "40")
    lines = CliRunner().invoke(app, ["train", "--use_cpu", "--bf16=False"]).output.splitlines()
    assert "method   Band(divergence=KL(), radius=0.05, max_ratio=10.0)" in lines
    assert "│ mean@4 │ 0.250  │" in lines
    assert "┏" in lines[0]  # no title above


def test_a_log_that_is_piped_has_lines_in_place_of_a_bar(capsys):
    needs("trl")
    from transformers import TrainerState

    from bandpo_lab.training.callbacks import ProgressBar

    bar, state = ProgressBar(), TrainerState(max_steps=40, is_world_process_zero=True)
    bar.on_train_begin(None, state, None)
    state.global_step = 8
    bar.on_step_end(None, state, None)
    bar.on_log(None, state, None, logs={"reward": 0.25, "entropy": 0.5, "learning_rate": 1.0})
    bar.on_train_end(None, state, None)
    assert capsys.readouterr().err == "step 8/40: reward 0.250, entropy 0.500\n"


def test_a_rehearsal_without_verl_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"verl: .*pip install "):
        compose([], None, "ppo_trainer")


def test_a_full_disk_leaves_no_half_copies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with full_disk(monkeypatch):
        copied = CliRunner().invoke(app, ["recipes", "copy"])
    assert isinstance(copied.exception, OSError)
    assert [*tmp_path.iterdir()] == []


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["bandpo-lab", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value


def test_a_value_of_another_kind_is_one_line(monkeypatch, capsys):
    end = run_main(monkeypatch, "train", "--learning_rate", "abc", "--use_cpu")
    assert end.code == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "invalid float value: 'abc'" in said.err


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ("checkpoint-2", "interrupted; add --resume to go on from the last checkpoint in {}"),
        (
            None,
            "interrupted before the first checkpoint in {}, so the steps are lost; add --resume to start again",
        ),
        (".saving-checkpoint-2", "interrupted before the first checkpoint in {}"),
    ],
)
def test_an_interrupted_run_says_how_to_go_on(monkeypatch, tmp_path, checkpoint, message):
    from bandpo_lab.training import train as training

    def interrupt(arguments):
        if checkpoint:
            (tmp_path / checkpoint).mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "run_training", interrupt)
    end = run_main(monkeypatch, "train", "--use_cpu", "--bf16=False", "--output_dir", str(tmp_path))
    assert end.code == 130
    assert message.format(tmp_path) in str(end)


@pytest.mark.exhaustive
def test_an_objective_is_added_as_the_page_says(tmp_path):
    page = [b for b in blocks(ROOT / "docs/write-your-own.md") if b.title or b.text.startswith("bandpo-lab ")]
    steps = [b for b in page if b.heading in ("A clip rule", "An objective", "A method")]
    assert len(steps) == 4
    follow(steps, tmp_path)
    logged = (tmp_path / "runs/mine/metrics.jsonl").read_text()
    assert '"audit/softened"' in logged


@pytest.mark.exhaustive
def test_a_divergence_is_added_as_the_page_says(tmp_path):
    page = blocks(ROOT / "docs/write-your-own.md")
    follow([b for b in page if b.heading.startswith("For commands and trainers")], tmp_path)
    rows = (tmp_path / "runs/le-cam/metrics.jsonl").read_text()
    assert "audit/clip_high" in rows
    assert "LeCam()" in (tmp_path / "runs/le-cam/config.yaml").read_text()
    assert "LeCam()" in (tmp_path / "runs/le-cam/report.html").read_text()
