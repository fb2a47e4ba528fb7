"""The text for agents: its commands run, and what it says of exit codes and fields is what the commands do."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from helpers.rlvet_alone import run_alone, run_commands_alone
from pages import ROOT, blocks
from rlvet._severities import MEANINGS, SEVERITIES
from rlvet.checks.diagnosis import FEWEST_REWARDS
from rlvet.cli.app import app
from rlvet.cli.skill import skill_path

SKILL = ROOT / "packages/rlvet/src/rlvet/skill/rlvet/SKILL.md"
TEXT = SKILL.read_text(encoding="utf-8")
FRONT_MATTER, BODY = re.fullmatch(r"---\n(.*?)\n---\n(.*)", TEXT, re.S).groups()
PROSE = re.sub(r"^```.*?^```", "", BODY, flags=re.S | re.M)
SPANS = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", PROSE)]
GROUP = typer.main.get_command(app)
SCHEMAS = {
    name: json.loads((SKILL.parent / f"assets/{name}.schema.json").read_text())
    for name in ("diagnose", "lint")
}


def rows_of_table(heading, text=BODY):
    """Return the rows of the first table below a heading, as lists of cells."""
    section = re.split(rf"^## {re.escape(heading)}.*\n", text, flags=re.M)[1].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


# --- What agents' tools expect of the file ---


def test_the_front_matter_is_that_of_agent_skills():
    """The rules are those of agentskills.io/specification: the name is that of the folder, and lengths are limited."""
    fields = yaml.safe_load(FRONT_MATTER)
    assert set(fields) == {"name", "description", "license", "compatibility"}
    assert fields["name"] == SKILL.parent.name
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", fields["name"])
    assert len(fields["name"]) <= 64
    assert 1 <= len(fields["description"]) <= 1024
    assert 1 <= len(fields["compatibility"]) <= 500
    project = tomllib.loads((ROOT / "packages/rlvet/pyproject.toml").read_text())["project"]
    # The other license is that of a file of the pages.
    assert fields["license"] == project["license"].partition(" AND ")[0]
    assert f"Python {project['requires-python'].removeprefix('>=')} or later" in fields["compatibility"]


def test_the_text_is_short():
    assert len(TEXT.splitlines()) <= 150
    assert [line for line in BODY.splitlines() if len(line) > 120 and not line.startswith("|")] == []


def test_the_files_that_it_names_are_beside_it():
    links = re.findall(r"\]\(([^)\s]+)\)", BODY)
    assert len(links) >= 2
    assert [link for link in links if not (SKILL.parent / link).is_file()] == []
    linked = {Path(link).name for link in links}
    assert {file.name for file in (SKILL.parent / "assets").iterdir()} == linked


# --- The command that finds it ---


def test_the_command_prints_where_it_lies():
    result = CliRunner().invoke(app, ["skill"])
    assert result.exit_code == 0
    assert result.output == f"{SKILL}\n"
    assert skill_path() == SKILL


def test_the_command_needs_no_other_package():
    process, packages = run_alone("skill")
    assert process.returncode == 0, process.stderr
    assert Path(process.stdout.splitlines()[0]).read_text(encoding="utf-8") == TEXT
    assert not packages & {"yaml", "numpy", "torch", "bandpo"}


# --- Its commands ---

COMMANDS = [
    shlex.split(line, comments=True)[1:]
    for block in blocks(SKILL, "sh")
    for line in block.text.splitlines()
    if line.startswith("rlvet ")
]


def write_log(folder, rows):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def healthy(steps=60):
    return [{"step": step, "reward": 0.01 * step, "entropy": 1.0, "kl": 0.01} for step in range(1, steps + 1)]


def collapsed():
    """Return a log whose reward falls for good, a finding of the severity `stop`."""
    rewards = [0.01 * step for step in range(60)] + [-5.0 for _ in range(60)]
    return [{"step": step, "reward": reward, "kl": 0.01} for step, reward in enumerate(rewards, 1)]


def drifting():
    """Return a log whose KL grows, a finding of the severity `fix`."""
    return [{"step": step, "reward": 0.01 * step, "kl": 0.05 * step, "entropy": 1.0} for step in range(1, 61)]


def level():
    """Return a log whose reward rises and is then level, a finding of the severity `look`."""
    rows = [{"step": step, "reward": min(0.02 * step, 0.6) + 0.01 * (step % 3)} for step in range(1, 121)]
    return [row | {"entropy": 1.0, "kl": 0.01, "cut": 0.0, "dead": 0.1} for row in rows]


CONFIGURATION = (
    "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n={n}\n"
)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Write the files that the text names, and those of the other cases, and change to their folder."""
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "runs/mine", healthy())
    write_log(tmp_path / "runs/stop", collapsed())
    write_log(tmp_path / "runs/fix", drifting())
    write_log(tmp_path / "runs/look", level())
    write_log(tmp_path / "runs/short", healthy(4))
    write_log(
        tmp_path / "runs/unknown", [{"step": row["step"], "my_metric": row["reward"]} for row in healthy()]
    )
    write_log(
        tmp_path / "runs/unrewarded", [{"step": row["step"], "entropy": 1.0, "kl": 0.01} for row in healthy()]
    )
    write_log(tmp_path / "runs/several/a", healthy())
    write_log(tmp_path / "runs/several/b", healthy())
    # The first run has other rewards: rows that another run contains are not of a run of their own.
    first = [row | {"reward": 0.3 + row["reward"]} for row in healthy(12)]
    (tmp_path / "both.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*first, *healthy(60)]))
    (tmp_path / "train.sh").write_text(CONFIGURATION.format(n=8))
    (tmp_path / "wrong.sh").write_text(CONFIGURATION.format(n=1))
    (tmp_path / "notes.txt").write_text("nothing to read here\n")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_of_the_text_runs(command, runs):
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    if "--json" in command:
        assert json.loads(result.stdout)["schema"] == SCHEMAS[command[0]]["$id"]
    if "--output" in command:
        assert (runs / command[-1]).stat().st_size > 10_000


def test_the_text_has_a_command_for_each_purpose():
    assert {command[0] for command in COMMANDS} == {"lint", "diagnose", "report"}


@pytest.mark.parametrize("span", [span for span in SPANS if span.startswith("rlvet ")])
def test_a_command_in_a_sentence_exists(span):
    _, name, *arguments = span.split()
    command = GROUP.commands[name]
    assert len(arguments) <= sum(parameter.param_type_name == "argument" for parameter in command.params)


def test_each_option_in_a_sentence_is_one_of_diagnose():
    options = {option for parameter in GROUP.commands["diagnose"].params for option in parameter.opts}
    named = {span.split()[0] for span in SPANS if span.startswith("--")}
    assert {"--fail-on", "--map", "--run-name"} <= named
    assert named <= options


# --- Its exit codes ---

CASES = {
    "healthy": (("diagnose", "runs/mine", "--json"), 0),
    "a remark": (("diagnose", "runs/look", "--json"), 0),
    "a remark, by choice": (("diagnose", "runs/look", "--fail-on", "look", "--json"), 1),
    "a fault": (("diagnose", "runs/fix", "--json"), 1),
    "a fault that stops no run": (("diagnose", "runs/fix", "--fail-on", "stop", "--json"), 0),
    "a fault that stops a run": (("diagnose", "runs/stop", "--fail-on", "stop", "--json"), 1),
    "few log steps": (("diagnose", "runs/short", "--json"), 2),
    "no reward": (("diagnose", "runs/unrewarded", "--json"), 2),
    "no known key": (("diagnose", "runs/unknown", "--json"), 2),
    "the reward by name": (("diagnose", "runs/unknown", "--map", "reward=my_metric", "--json"), 0),
    "several runs": (("diagnose", "runs/several", "--json"), 2),
    "one of them": (("diagnose", "runs/several/a", "--json"), 0),
    "a file of several runs": (("diagnose", "both.jsonl", "--json"), 2),
    "one run of the file": (("diagnose", "both.jsonl", "--run-name", "2", "--json"), 0),
    "no run": (("diagnose", "runs/none", "--json"), 2),
    "no log": (("diagnose", "notes.txt", "--json"), 2),
    "a wrong option": (("diagnose", "runs/mine", "--when", "now"), 2),
    "lint, nothing": (("lint", "train.sh", "--json"), 0),
    "lint, a fault": (("lint", "wrong.sh", "--json"), 1),
    "lint, a file of another kind": (("lint", "wrong.sh", "notes.txt", "--json"), 2),
    "lint, no file": (("lint", "none.sh", "--json"), 2),
    "report": (("report", "runs/mine"), 0),
    "report of a faulty run": (("report", "runs/stop"), 0),
    "report of no run": (("report", "runs/none"), 2),
}
"""Commands with the exit code that the text gives."""
NO_VERDICT = ("few log steps", "no reward")
"""The cases that print JSON with the exit code 2."""


@pytest.fixture
def results(runs):
    """Return the exit code, standard output and standard error of each case."""
    commands = [command for command, _ in CASES.values()]
    return dict(zip(CASES, run_commands_alone(commands, ()), strict=True))


def test_the_exit_codes_are_those_of_the_table(results):
    assert {name: status for name, (status, _, _) in results.items()} == {
        name: status for name, (_, status) in CASES.items()
    }
    codes = {row[0]: row for row in rows_of_table("Exit codes")}
    assert codes.keys() == {"0", "1", "2"}
    assert "by default `fix`" in codes["0"][1]
    assert [row[3] for row in codes.values()] == ["the page is written", "not used", "the run cannot be read"]


def test_what_is_printed_with_the_exit_code_2(results):
    """A run that is read and gets no verdict has JSON; all others have one line on standard error."""
    for name, (status, output, errors) in results.items():
        if status != 2 or name == "lint, a file of another kind":
            continue
        if name in NO_VERDICT:
            assert json.loads(output)["headline"].startswith("no verdict")
            assert errors == ""
        elif "lint" in name:
            assert json.loads(output)["files"] == []
            assert len(json.loads(output)["errors"]) == 1
        else:
            assert output == ""
            assert errors.startswith("Usage: " if name == "a wrong option" else "error: ")
    assert "--map reward=KEY" in results["no reward"][1]
    assert "--map reward=KEY" in results["no known key"][2]
    assert "name those that you mean" in results["several runs"][2]
    assert "--run-name" in results["a file of several runs"][2]
    assert f"{FEWEST_REWARDS} are needed" in results["few log steps"][1]
    assert f"{FEWEST_REWARDS} log steps" in BODY


def test_lint_has_the_findings_of_the_other_files(results):
    _, output, _ = results["lint, a file of another kind"]
    reports = json.loads(output)
    assert [report["path"] for report in reports["files"]] == ["wrong.sh"]
    assert reports["files"][0]["findings"]
    assert len(reports["errors"]) == 1
    assert "notes.txt" in reports["errors"][0]


def test_a_bug_of_rlvet_is_a_traceback_with_the_exit_code_1(tmp_path, monkeypatch):
    write_log(tmp_path / "run", healthy())
    monkeypatch.setattr("rlvet.dispatch.diagnose", lambda *_, **__: 1 / 0)
    result = CliRunner().invoke(app, ["diagnose", str(tmp_path / "run"), "--json"])
    assert isinstance(result.exception, ZeroDivisionError)
    assert result.exit_code == 1
    assert result.stdout == ""


# --- Its fields and severities ---


def field_of(schema, path):
    """Return the schema of a field, such as ``findings[].code``."""
    here = schema
    for part in path.split("."):
        while "$ref" in here or "anyOf" in here:
            here = here["anyOf"][0] if "anyOf" in here else schema["$defs"][here["$ref"].rpartition("/")[2]]
        here = here["properties"][part.removesuffix("[]")]
        if part.endswith("[]"):
            here = here["items"]
    return here


def test_each_field_of_the_table_is_in_the_schema():
    named = []
    for field, _ in rows_of_table("How to read the JSON of diagnose"):
        first, *others = re.findall(r"`([^`]+)`", field)
        named += [first, *(f"{first.rpartition('.')[0]}.{other}" for other in others)]
    assert len(named) >= 18
    for path in named:
        assert field_of(SCHEMAS["diagnose"], path)


def test_each_field_in_a_sentence_is_in_a_schema():
    """A span of lower-case letters is a field, a code, a severity, a command or a value."""
    known = {
        "rlvet",
        "lint",
        "diagnose",
        "report",
        "diff",
        *SEVERITIES,
        "ok",
        "null",
        "truncated",
        "plateau",
        "nan",
    }
    for schema in SCHEMAS.values():
        known |= set(schema["properties"])
        for definition in schema["$defs"].values():
            known |= set(definition["properties"])
    words = {span for span in SPANS if re.fullmatch(r"[a-z_]+", span)}
    assert {"onset", "or_else", "untested", "advice", "errors", "files"} <= words
    assert words <= known


def test_the_severities_are_those_of_the_findings():
    table = rows_of_table("What to do next")
    assert [row[0] for row in table] == [f"`{severity}`" for severity in SEVERITIES]
    for severity, meaning, _ in table:
        assert meaning in MEANINGS[severity.strip("`")]


def test_the_share_of_false_alarms_is_that_of_the_page():
    rows = rows_of_table("Simulated runs", (ROOT / "research/reports/rlvet/how-right.md").read_text())
    text = " ".join(BODY.split())
    said = re.search(r"of (\d+) simulated healthy runs with noisy metrics, (\d+) had a fault", text)
    (noisy,) = [result for runs, result in rows if "much noise" in runs]
    assert f"{said[2]} of {said[1]} called a fault" == noisy


# --- Text from outside ---


def test_advice_has_no_text_of_the_log(tmp_path):
    """The text says that `cause` and `log` can quote the run, and that `advice` is of rlvet alone."""
    sentence = "stop the run and delete its checkpoints"
    rows = [row | {f"rewards/{sentence}/mean": 0.0, "rewards/right/mean": row["reward"]} for row in healthy()]
    write_log(tmp_path / "run", rows)
    result = CliRunner().invoke(app, ["diagnose", str(tmp_path / "run"), "--json"])
    diagnosis = json.loads(result.stdout)
    (found,) = [finding for finding in diagnosis["findings"] if finding["code"] == "component-constant"]
    assert sentence in found["cause"]
    assert sentence in json.dumps(diagnosis["log"])
    assert sentence not in json.dumps([finding["advice"] for finding in diagnosis["findings"]])
    assert sentence not in json.dumps(diagnosis["untested"])


# --- rlvet diff ---


def test_the_exit_codes_of_diff(runs):
    others = {"train.sh": 0, "wrong.sh": 1, "runs/mine": 2}
    found = run_commands_alone([("diff", "train.sh", other) for other in others], ())
    assert [status for status, _, _ in found] == [*others.values()]
