"""The `bandpo` command itself: its help, and every command and option that the documentation prints."""

import importlib.util
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("typer")
import typer
from typer.testing import CliRunner

import bandpo
from bandpo.cli import main
from bandpo.cli.app import app
from bandpo.errors import FileProblem, InvalidType, InvalidValue, MissingPackage, RunProblem
from bandpo_lab.rehearsal.shrink import compose
from pages import PAGES, ROOT, commands

GROUP = typer.main.get_command(app)
GROUPS = {"data", "study"}
NAMES = [*GROUP.commands.keys() - {"train", *GROUPS}]
NAMES += [f"{group} {name}" for group in GROUPS for name in GROUP.commands[group].commands]


def find(words):
    """The command that words name, and its arguments."""
    if words[0] == "study" and not {*words[1:2]} <= GROUP.commands["study"].commands.keys():
        words = ["study", "run", *words[1:]]  # which may be left out
    depth = 2 if words[0] in GROUPS else 1
    command = GROUP
    for name in words[:depth]:
        assert name in command.commands, f"no command `bandpo {' '.join(words[:depth])}`"
        command = command.commands[name]
    return command, words[depth:]


def options_of_train():
    pytest.importorskip("trl")
    from bandpo_lab.training.arguments import parser

    return {option for action in parser()._actions for option in action.option_strings} | {"--config"}


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("name", ["", *sorted(GROUPS), *sorted(NAMES)])
def test_help(name, flag):
    result = CliRunner().invoke(app, [*name.split(), flag])
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_option_is_explained(name):
    command, _ = find(name.split())
    assert command.help
    assert [p.name for p in command.params if not p.help] == []


def test_train_shows_trls_options_and_ours(capsys):
    assert {"--clip", "--learning_rate", "--resume"} <= options_of_train()
    from bandpo_lab.training.arguments import parse

    with pytest.raises(SystemExit) as stop:
        parse(["--help"])
    assert stop.value.code == 0
    assert "--audit_steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    "page",
    # Commands of these two need their files: test_docs runs them.
    [page for page in PAGES if page.name not in ("write-your-own.md", "add-a-framework.md")],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_printed_commands_parse(page):
    for words in commands(page):
        command, arguments = find(words)
        if not arguments:
            continue  # named only
        if words[0] == "train":
            pytest.importorskip("trl")
            from bandpo_lab.training.arguments import parse

            parse([*arguments, "--use_cpu", "--bf16=False"])
        else:
            command.make_context(command.name, arguments)


OTHERS = {  # options that the pages name of other programs
    "--num-steps-per-rollout": "slime",
    "--use-rollout-logprobs": "slime",
    "--dry-run": "recipes/launch.sh",
    "--no-deps": "pip",
    **dict.fromkeys(("--cpus-per-task", "--mem", "--requeue", "--signal"), "Slurm"),
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_options_in_prose_exist(page):
    named = set(re.findall(r"`(--[\w-]+)[^`]*`", page.read_text())) - OTHERS.keys()
    ours = {option for name in NAMES for p in find(name.split())[0].params for option in p.opts}
    unknown = named - ours
    assert not unknown or not unknown - options_of_train()


def test_bounds_are_those_of_the_rule(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    plain = CliRunner().invoke(app, ["bounds", "0.001", "0.01"])
    assert plain.exit_code == 0, plain.output
    rare, common = [line for line in plain.output.splitlines() if "│ 0.0" in line]
    assert "… 10 " in rare  # the rule's cap; the trust region alone would give 53.55
    assert "│ 0.01 " in rare.rpartition("0.8 … 1.28")[2]  # p after at most
    assert "… 7.81 " in common
    assert "10 is Band's cap, max_ratio" in plain.output
    free = CliRunner().invoke(app, ["bounds", "0.001", "--max-ratio", "inf"])
    assert "53.55" in free.output
    assert "cap" not in free.output
    refused = CliRunner().invoke(app, ["bounds", "--max-ratio", "1"])
    assert "max_ratio must be above 1 (inf for no cap), got 1.0" in str(refused.exception)


def test_the_bounds_on_the_page_about_choosing_are_those_of_the_rules():
    import torch

    rows = re.findall(
        r"^\| `(\w+)\(\)` \| ([\d.]+) \| (.+) \|$", (ROOT / "docs/choosing.md").read_text(), re.M
    )
    assert len(rows) == 3
    for name, radius, printed in rows:
        divergence = bandpo.parse_divergence(name)
        assert divergence.default_radius == float(radius)
        bounds = bandpo.Band(divergence).bounds(
            torch.tensor([0.01, 0.08, 0.5, 0.9], dtype=torch.float64).log()
        )
        for cell, lower, upper in zip(printed.split(" | "), bounds.lower, bounds.upper, strict=True):
            shown = [float(number) for number in cell.split(" … ")]
            assert shown == pytest.approx([lower.item(), upper.item()], rel=5e-3, abs=5e-5)


def test_a_run_ends_with_its_scores_and_its_rule_on_one_line(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    from bandpo_lab.training import train as training
    from bandpo_lab.training.run_folder import RunFolder

    folder = RunFolder(tmp_path)
    folder.record_evaluation("before", {"mean@4": 0.25})
    monkeypatch.setattr(training, "run_training", lambda arguments: folder)
    monkeypatch.setenv("COLUMNS", "40")
    lines = CliRunner().invoke(app, ["train", "--use_cpu", "--bf16=False"]).output.splitlines()
    assert "clip     Band(divergence=KL(), radius=0.05, max_ratio=10.0)" in lines
    assert "│ mean@4 │ 0.250  │" in lines
    assert "┏" in lines[0]  # no title above


def test_version():
    run = CliRunner().invoke(app, ["--version"])
    assert run.output.strip() == bandpo.__version__


def raised(error):
    raise error


@pytest.mark.parametrize("kind", [FileProblem, InvalidType, InvalidValue, MissingPackage, RunProblem])
def test_what_bandpo_refuses_is_one_line(kind, monkeypatch):
    monkeypatch.setattr("bandpo.cli.app.app", lambda: raised(kind("radius must be positive")))
    with pytest.raises(SystemExit, match=r"^error: radius must be positive$") as ended:
        main()
    assert ended.value.code == 2


def test_a_package_that_a_command_lacks_is_named_with_what_brings_it(monkeypatch):
    lacking = ModuleNotFoundError("No module named 'matplotlib.figure'", name="matplotlib.figure")
    monkeypatch.setattr("bandpo.cli.app.app", lambda: raised(lacking))
    with pytest.raises(SystemExit, match=r"needs the package matplotlib; .* pip install '.\[figures\]'"):
        main()


def test_a_rehearsal_without_verl_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"needs verl: .* Python 3.11 or 3.12, pip install '\.\[verl\]' '\./lab\[verl\]'"
    ):
        compose([], None, "ppo_trainer")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a slip of ours"),
        FileNotFoundError("no such file"),
        ModuleNotFoundError("No module named 'no_such_package'", name="no_such_package"),
    ],
)
def test_any_other_error_keeps_its_traceback(error, monkeypatch):
    monkeypatch.setattr("bandpo.cli.app.app", lambda: raised(error))
    with pytest.raises(type(error), match=str(error)) as caught:
        main()
    assert caught.value is error


def test_an_error_within_trl_keeps_its_traceback(monkeypatch):
    """As a ValueError of a library ten hours into a run would."""

    def trl():
        raise ValueError("shapes do not match")

    monkeypatch.setattr("bandpo.cli.app.app", trl)
    with pytest.raises(ValueError, match="shapes do not match"):
        main()


@contextmanager
def full_disk():
    """Files cannot grow beyond 1 kB: only while it lasts, since the limit holds for pytest's own output too."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_spoils_no_picture_and_leaves_no_half_copies(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("old.png").write_bytes(b"a picture")
    from bandpo.audit import figures  # noqa: F401  (whose fonts are looked up before the disk is full)

    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # half a .pyc would break every later run
    with full_disk():
        drawn = CliRunner().invoke(app, ["plot", "old.png"])
        copied = CliRunner().invoke(app, ["recipes", "copy"])
    assert isinstance(drawn.exception, OSError)
    assert isinstance(copied.exception, OSError)
    assert [path.name for path in tmp_path.iterdir()] == ["old.png"]
    assert Path("old.png").read_bytes() == b"a picture"


def test_a_figure_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"figure.xyz: a figure is written as .png, .svg or .pdf"):
        CliRunner().invoke(app, ["plot", str(tmp_path / "figure.xyz")], catch_exceptions=False)


def test_a_module_in_the_current_folder_is_found_and_shadows_nothing(tmp_path):
    (tmp_path / "mine.py").write_text("from bandpo import KL\n\n\nclass Mine(KL):\n    pass\n")
    (tmp_path / "torch.py").write_text("raise RuntimeError('not this one')\n")
    command = Path(sys.executable).with_name("bandpo")
    if not command.exists():
        pytest.skip("bandpo is on the path but not installed")
    run = subprocess.run(
        [command, "bounds", "0.1", "--divergence", "mine.Mine"], cwd=tmp_path, capture_output=True, text=True
    )
    assert "0.05" in run.stdout, run.stderr


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["bandpo", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--clip", "Bnad(KL(), 0.05)"],
        ["train", "--clip=Bnad(KL(), 0.05)"],
        ["bounds", "--divergence", "TotalVariatoin"],
    ],
)
def test_a_misspelt_rule_is_one_line_and_loads_no_framework(arguments):
    code = "import sys; from bandpo.cli import main; sys.argv = ['bandpo', *sys.argv[1:]]\n"
    code += "try: main()\nfinally: print(*[m for m in ('trl', 'transformers', 'verl') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert (run.returncode, run.stdout.split()) == (2, [])
    assert run.stderr.count("\n") == 1
    assert "did you mean" in run.stderr


def test_a_value_of_another_kind_is_one_line(monkeypatch, capsys):
    end = run_main(monkeypatch, "train", "--learning_rate", "abc", "--use_cpu")
    assert end.code == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "invalid float value: 'abc'" in said.err


def test_an_interrupted_run_says_how_to_go_on(monkeypatch):
    from bandpo_lab.training import train as training

    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "run_training", interrupt)
    end = run_main(monkeypatch, "train", "--use_cpu", "--bf16=False", "--output_dir", "runs/x")
    assert end.code == 130
    assert "add --resume to go on from the last checkpoint in runs/x" in str(end)


def test_a_terminal_without_greek_letters_or_of_forty_columns(monkeypatch):
    for variables in ({"PYTHONIOENCODING": "ascii"}, {"COLUMNS": "40"}):
        run = subprocess.run(
            [sys.executable, "-m", "bandpo", "bounds", "0.08"],
            capture_output=True, text=True, env=os.environ | variables,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        assert "0.261" in run.stdout
        assert "2.411" in run.stdout


def test_a_picture_makes_its_folder(tmp_path):
    result = CliRunner().invoke(app, ["plot", str(tmp_path / "new" / "rules.png")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "new" / "rules.png").exists()
