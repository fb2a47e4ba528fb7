"""rlvet without other packages of this repository: a log needs the standard library and PyYAML, a record numpy too."""

import json
from importlib.metadata import EntryPoint

import pytest

from helpers.rlvet_alone import run_alone, run_commands_alone
from helpers.run_files import batch, nemo_rl, slime
from helpers.simulated_runs import simulate
from rlvet import plugins
from rlvet.errors import MissingPackage
from rlvet.plugins import COLLECTORS
from selection import mostly_slow

OPTIONAL = {"bandpo", "torch", "numpy", "pyarrow", "scipy", "transformers", "tokenizers"}
RECORDS = ("torch", "transformers", "tokenizers", "scipy")
"""The packages that are hidden where those of the extra ``records`` are there."""


@pytest.fixture
def log(tmp_path):
    """Write a healthy log with its configuration, in YAML."""
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [{"step": step, "reward": 0.01 * step, "entropy": 1.0, "kl": 0.01} for step in range(1, 60)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(
        "loss_fn: {ratio_clip_min: 0.2, ratio_clip_max: 0.28, ratio_clip_c: null}\n"
    )
    return folder


@pytest.fixture
def config(tmp_path):
    """Write a command of verl with a fault."""
    file = tmp_path / "run.sh"
    file.write_text(
        "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=1\n"
    )
    return file


@pytest.fixture
def dump(tmp_path):
    """Write a batch that slime saved by torch."""
    folder = tmp_path / "dump"
    folder.mkdir()
    slime(folder, 1, batch(1))
    return folder


@pytest.fixture
def record(tmp_path):
    return simulate(tmp_path / "record")


def check_refused(result, *parts):
    """Check that a command ended with one line on standard error that contains these parts."""
    status, output, errors = result
    assert (status, output) == (2, "")
    (line,) = errors.splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert part in line


# --- What a log and a configuration need ---


@pytest.mark.parametrize(
    "options", mostly_slow([(), ("--json",), ("--run-method", "GSPO()"), ("--fail-on", "note")], 4)
)
def test_a_log_is_diagnosed(log, options):
    process, packages = run_alone("diagnose", log, *options)
    assert process.returncode == 0, process.stderr
    assert "ok: nothing is wrong" in process.stdout
    assert "yaml" in packages
    assert not packages & OPTIONAL


def test_a_configuration_is_checked(config):
    process, packages = run_alone("lint", config)
    assert process.returncode == 1, process.stderr
    assert "one answer to each prompt" in process.stdout
    assert not packages & OPTIONAL


@pytest.mark.parametrize("options", mostly_slow([(), ("--run-method", "GSPO()")], 2))
def test_a_report_of_a_log_is_written(log, options):
    process, packages = run_alone("report", log, *options)
    assert process.returncode == 0, process.stderr
    assert (log / "report.html").stat().st_size > 10_000
    assert not packages & OPTIONAL


def test_every_command_works_with_what_the_package_requires(log, config):
    """Each command has an example here that reads no record; a new command needs one."""
    typer = pytest.importorskip("typer")
    from rlvet.cli.app import app

    examples = {
        "demo": [("demo",), ("demo", "collapse")],
        "diagnose": [("diagnose", log), ("diagnose", log / "metrics.jsonl", "--format", "markdown")],
        "diff": [("diff", log, log), ("diff", config, config, "--json")],
        "lint": [("lint", config), ("lint", config, "--format", "markdown")],
        "report": [("report", log), ("report", log, log / "metrics.jsonl")],
        "skill": [("skill",)],
    }
    assert examples.keys() == typer.main.get_command(app).commands.keys()
    commands = [example for of_command in examples.values() for example in of_command]
    for command, (status, output, errors) in zip(
        commands, run_commands_alone(commands, tuple(OPTIONAL - {"bandpo"})), strict=True
    ):
        assert (status, errors) == (1 if command[0] == "lint" else 0, ""), command
        assert output


@pytest.mark.parametrize("command", mostly_slow(["diagnose", "lint", "report"], 3))
def test_nothing_optional_is_imported_where_it_is_installed(command, log, config):
    process, packages = run_alone(command, config if command == "lint" else log, hidden=())
    assert process.returncode == (1 if command == "lint" else 0), process.stderr
    assert not packages & OPTIONAL


# --- What a record needs ---


def test_a_record_is_diagnosed_but_for_the_clip(record):
    process, packages = run_alone("diagnose", record, hidden=RECORDS)
    assert process.returncode == 0, process.stderr
    assert "ok: nothing is wrong" in process.stdout
    assert "the effect of the clip was not checked, which needs bandpo: in a clone" in process.stdout
    assert packages & OPTIONAL == {"numpy", "pyarrow"}


def test_a_report_of_a_record_says_what_its_figures_need(record, tmp_path):
    process, _ = run_alone("report", record, "--output", tmp_path / "page.html", hidden=RECORDS)
    assert process.returncode == 0, process.stderr
    assert "whose figures need bandpo: in a clone" in (tmp_path / "page.html").read_text()


def test_batches_without_the_policy_in_training_need_no_bandpo(tmp_path):
    nemo_rl(tmp_path, 1, batch(1))
    process, _ = run_alone("diagnose", tmp_path, hidden=RECORDS)
    assert process.returncode in (0, 1), process.stderr
    assert "bandpo" not in process.stdout


# --- What is missing ---


@pytest.mark.parametrize("missing", mostly_slow(["numpy", "pyarrow"], 2))
def test_a_record_needs_the_extra(missing, record):
    commands = [("diagnose", record), ("report", record)]
    for result in run_commands_alone(commands, (*RECORDS, missing)):
        check_refused(result, missing, "pip install './packages/rlvet[records]'")


@pytest.mark.parametrize("hidden", mostly_slow([RECORDS, tuple(OPTIONAL)], 2))
def test_what_needs_bandpo_says_so(hidden, record, log, dump):
    needs = {
        ("diagnose", record, "--words"): ("--words needs bandpo",),
        ("diagnose", record, "--run-method", "GSPO()"): ("method", "needs bandpo"),
        ("report", record, "--run-method", "GSPO()"): ("method", "needs bandpo"),
        ("report", record, "--method", "GSPO()"): ("a method needs bandpo",),
        ("report", log, "--method", "GSPO()"): ("a method needs bandpo",),
    }
    if "numpy" not in hidden:
        torch_file = (".pt, a file of torch, needs bandpo",)
        needs |= {("diagnose", dump): torch_file, ("report", dump): torch_file}
    results = run_commands_alone(needs, hidden)
    assert len(results) == len(needs)
    for result, parts in zip(results, needs.values(), strict=True):
        check_refused(result, *parts, "pip install ./packages/bandpo")


def test_a_plugin_that_cannot_be_imported_is_one_sentence(monkeypatch):
    point = EntryPoint("replay", "no_such_package.replay:replay", COLLECTORS)
    monkeypatch.setattr(plugins, "installed_plugins", lambda group: (point,))
    with pytest.raises(
        MissingPackage, match=r"no_such_package\.replay:replay .* cannot be imported: No module named"
    ):
        plugins.load_plugin(COLLECTORS, "replay")
