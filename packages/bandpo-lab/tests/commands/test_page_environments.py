"""The commands in shell blocks of the pages, in the environment that their page installs.

A process imports only what the requirements of a page bring with them, by the metadata of the installed packages.
"""

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from importlib import metadata
from typing import NamedTuple

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")
pytest.importorskip("packaging")
from packaging.requirements import Requirement

from helpers.sources import SOURCES
from pages import PAGES, ROOT, blocks, name_of

HIDE = """
import importlib.machinery, json, os

hidden = set(json.loads(os.environ["HIDDEN_MODULES"]))
find = importlib.machinery.PathFinder.find_spec


def find_unless_hidden(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in hidden else find(name, path, target)


importlib.machinery.PathFinder.find_spec = classmethod(find_unless_hidden)
"""

EVALUATION = ("rlvet", "bandpo", "bandpo-lab[eval]")
RLVET = ("rlvet",)
INSTALL = "pip install ./packages/rlvet ./packages/bandpo"
CORE = ("bandpo",)
TRL = ("rlvet", "bandpo[trl]")
STUDY = ("rlvet", "bandpo", "bandpo-lab[study]")


class Run(NamedTuple):
    """A command that is run."""

    requirements: tuple[str, ...]
    """What the page installs."""


HUB = "downloads from a hub; the test of the page on evaluation runs it on a file"
BELOW = "is run by the test of the page on evaluation"
VERL = "needs verl's environment; tests/recipes and tests/rehearsal of packages/bandpo-lab run it with verl"
GPU = "needs a GPU"
RECORD = "needs a record of tokens; packages/bandpo/tests/audit and tests/test_cli.py run it on one"
STEPS = "is run by packages/bandpo-lab/tests/commands/test_commands.py, with the files of its page"
MINUTES = "takes minutes; the last test here runs it with fewer batches"
CONFIGURATIONS = (
    "needs two runs of a user; packages/rlvet/tests/compare/test_diff.py runs it on the two of the page"
)
CONFIGURATION = "needs the configuration of a user; packages/rlvet/tests/lint/test_command.py runs it on one"

COMMANDS: dict[tuple[str, str], Run | str] = {
    ("README.md", "rlvet diagnose runs/demo/FixedClip-0.2-seed-0"): Run(RLVET),
    ("README.md", "bandpo audit runs/demo/FixedClip-0.2-seed-0"): RECORD,
    ("README.md", "rlvet report runs/demo/FixedClip-0.2-seed-0"): Run(TRL),
    ("rlvet/agents.md", "rlvet skill"): Run(RLVET),
    ("rlvet/diff.md", "rlvet diff works.py stalls.sh"): CONFIGURATIONS,
    ("rlvet/diff.md", "rlvet diff run-1 run-2"): CONFIGURATIONS,
    ("rlvet/index.md", "rlvet diagnose runs/mine"): Run(RLVET),
    ("rlvet/index.md", "rlvet diagnose run/tokens"): RECORD,
    ("rlvet/index.md", "rlvet diagnose dumps"): RECORD,
    ("rlvet/index.md", "rlvet diagnose runs/mine -v"): Run(RLVET),
    ("rlvet/index.md", "rlvet diagnose run/tokens --json"): RECORD,
    ("rlvet/index.md", "rlvet diagnose runs/mine --format markdown --fail-on stop"): Run(RLVET),
    ("evaluation.md", "bandpo-lab data prepare aime24 amc23"): HUB,
    ("evaluation.md", "bandpo-lab eval --data data/trl/aime24.parquet"): BELOW,
    ("evaluation.md", "bandpo-lab compare-evals runs/eval-a runs/eval-b"): BELOW,
    ("install.md", "bandpo env"): "imports every framework; tests/test_env.py runs it",
    ("install.md", "bandpo-lab run verl --model qwen2.5-3b-instruct --method band-kl --dry-run"): VERL,
    ("install.md", "bandpo-lab run verl --model qwen2.5-3b-instruct --method band-kl --rehearse"): VERL,
    ("install.md", "bandpo-lab setup --model qwen2.5-3b-instruct --dry-run"): VERL,
    ("install.md", "bandpo-lab preflight --model qwen2.5-3b-instruct"): VERL,
    ("install.md", "bandpo-lab recipes"): VERL,
    ("rlvet/lint.md", "rlvet lint train.py"): Run(RLVET),
    ("rlvet/lint.md", "rlvet lint run_qwen.sh"): CONFIGURATION,
    ("rlvet/lint.md", "rlvet lint config.yaml rl.toml"): CONFIGURATION,
    ("rlvet/lint.md", "rlvet lint run_qwen.sh --fail-on look"): CONFIGURATION,
    ("audit.md", "bandpo audit run/tokens"): RECORD,
    (
        "audit.md",
        'bandpo audit run/tokens --method "FixedClip(0.2, 0.28)" --method "GSPO()" --method "Band(KL(), 0.05)"',
    ): RECORD,
    ("audit.md", "bandpo audit runs/clip runs/band"): RECORD,
    (
        "recipes.md",
        "bandpo-lab rehearse --stand-in -- +paper/model=qwen2.5-3b-instruct +paper/rule=band-kl +paper=recommended "
        "trainer.nnodes=2",
    ): VERL,
    ("recipes.md", "bandpo-lab recipes"): VERL,
    ("recipes.md", "bandpo-lab data prepare apps-train apps-val --authors --output-dir data/authors"): HUB,
    (
        "recipes.md",
        "bandpo-lab data prepare commonsenseqa-train arc-challenge --authors --output-dir data/authors",
    ): HUB,
    (
        "recipes.md",
        "bandpo-lab data prepare dapo-math-17k math-12k-3-5 amc23 aime24 aime25 --authors --output-dir data/authors",
    ): HUB,
    ("recipes.md", "bandpo-lab data prepare sums-train sums --size 800"): Run(EVALUATION),
    (
        "recipes.md",
        "bandpo-lab eval models/band-kl-240 --data data/trl/aime24.parquet --data data/trl/aime25.parquet -n 32",
    ): HUB,
    ("recipes.md", "rlvet diagnose runs/qwen2.5-3b-instruct-band-kl"): "needs the run of the page",
    ("recipes.md", "rlvet report runs/qwen2.5-3b-instruct-band-kl"): "needs the run of the page",
    (
        "recipes.md",
        "bandpo-lab train --config recipes/small/one-card-trl.yaml --method 'FixedClip(0.2, 0.2)' "
        "--output_dir runs/trl-grpo",
    ): GPU,
    (
        "recipes.md",
        "bandpo-lab train --config recipes/small/one-card-trl.yaml --method 'Band(KL(), 0.05, max_ratio=10)' "
        "--output_dir runs/trl-band",
    ): GPU,
    (
        "study.md",
        "bandpo-lab study quick",
    ): "takes seven minutes; packages/bandpo-lab/tests/studies runs smaller ones",
    ("study.md", "bandpo-lab study page runs/study-quick"): "needs the study of the command before it",
    ("which-method.md", "bandpo bounds 0.01 0.08 --divergence TotalVariation --radius 0.2"): Run(CORE),
    (
        "write-your-own.md",
        'bandpo-lab train --method "Method(Band(), my_objectives.GaussianGate(0.3))" --max_steps 8 '
        "--output_dir runs/mine",
    ): STEPS,
    (
        "write-your-own.md",
        'bandpo-lab compare "BandPO()" "FixedClip(0.2)" --baseline "FixedClip(0.2)" --seeds 8',
    ): MINUTES,
    (
        "write-your-own.md",
        'bandpo-lab compare "BandPO()" "FixedClip(0.2)" --lag 0 --output-dir runs/fresh',
    ): MINUTES,
    ("write-your-own.md", "bandpo bounds 0.01 0.08 0.5 0.9 --divergence my_divergences.LeCam"): STEPS,
    (
        "write-your-own.md",
        'bandpo-lab train --method "Band(my_divergences.LeCam(), 0.05)" --max_steps 8 --output_dir runs/le-cam',
    ): STEPS,
}
"""Every command of `bandpo` and `bandpo-lab` in a shell block: how it is run here, or why it is not.

The runs of verl on the page of recipes are left out: tests/recipes/test_flow.py has verl accept the settings of each.
"""


def commands_in_blocks():
    """Return the commands of both programs in the shell blocks, with their page, in order."""
    found = []
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.text.replace("\\\n", " ").splitlines():
                command = " ".join(line.partition("  #")[0].split())
                if name_of(page) == "recipes.md" and command.startswith("bandpo-lab run verl "):
                    continue
                if command.startswith(("bandpo ", "rlvet ", "bandpo-lab ")):
                    found.append((name_of(page), command))
    return found


@cache
def hidden_modules(requirements):
    """Return the modules of installed packages that some requirements do not install."""
    pending = [Requirement(text) for text in requirements]
    installed = set()
    seen = set()
    while pending:
        requirement = pending.pop()
        name = normalized(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another system or Python
            continue
        installed.add(name)
        for text in needed:
            dependency = Requirement(text)
            extras = {"", *requirement.extras}
            if dependency.marker is None or any(dependency.marker.evaluate({"extra": e}) for e in extras):
                pending.append(dependency)
    return sorted(
        module
        for module, packages in metadata.packages_distributions().items()
        if not installed & {normalized(package) for package in packages}
    )


def normalized(name):
    return name.lower().replace("_", "-")


def run_in(requirements, command, folder):
    """Run a command where only the modules of some requirements can be imported."""
    (folder / "hide").mkdir(exist_ok=True)
    (folder / "hide/sitecustomize.py").write_text(HIDE)
    program, _, rest = command.partition(" ")
    module = program.replace("-", "_")
    paths = [str(folder / "hide"), *map(str, SOURCES)]
    variables = {
        "PYTHONPATH": os.pathsep.join(paths),
        "HIDDEN_MODULES": json.dumps(hidden_modules(requirements)),
        "HF_HUB_OFFLINE": "1",
    }
    words = ["bash", "-c", f'exec "{sys.executable}" -m {module} {rest}']
    return subprocess.run(words, cwd=folder, env=os.environ | variables, capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the runs, the data and the files that the pages name."""
    folder = tmp_path_factory.mktemp("reader")
    rows = [{"step": step, "reward": step / 40, "grad_norm": 0.5} for step in range(1, 41)]
    for run in ("demo/FixedClip-0.2-seed-0", "mine"):
        (folder / "runs" / run).mkdir(parents=True)
        (folder / "runs" / run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "train.py").write_text('from trl import GRPOConfig\n\nargs = GRPOConfig("out", beta=0.0)\n')
    problems = [{"problem": f"What is {i}+4?", "answer": str(i + 4)} for i in range(2)]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, problems)))
    run = run_in(EVALUATION, "bandpo-lab data prepare aime24=sums.jsonl", folder)
    assert run.returncode == 0, run.stderr
    return folder


def test_every_command_in_a_shell_block_is_run_or_has_a_reason():
    found = commands_in_blocks()
    assert len(found) > 30
    assert set(found) == COMMANDS.keys()


def test_modules_that_a_page_does_not_install_are_hidden():
    assert {"math_verify", "torch", "datasets"} <= {*hidden_modules(RLVET)}
    assert "math_verify" not in hidden_modules(EVALUATION)
    assert {"trl", "verl", "matplotlib"} & {*hidden_modules(EVALUATION)}


QUICK = [key for key, value in COMMANDS.items() if isinstance(value, Run)]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), QUICK)
def test_a_command_runs_in_the_environment_of_its_page(page, command, folder):
    run = COMMANDS[page, command]
    assert isinstance(run, Run)
    process = run_in(run.requirements, command, folder)
    assert process.returncode == 0, process.stderr


@pytest.mark.slow
def test_the_page_on_evaluation_in_its_environment(folder):
    page = (ROOT / "docs/evaluation.md").read_text()
    assert f"`{INSTALL} './packages/bandpo-lab[eval]'`" in page
    evaluate = "bandpo-lab eval --data data/trl/aime24.parquet"
    process = run_in(EVALUATION, f"{evaluate} --n 1 --limit 1 --output-dir runs/eval-a", folder)
    assert process.returncode == 0, process.stderr
    shutil.copytree(folder / "runs/eval-a", folder / "runs/eval-b")
    process = run_in(EVALUATION, "bandpo-lab compare-evals runs/eval-a runs/eval-b", folder)
    assert process.returncode == 0, process.stderr
    # Without the extra, one line says what to install.
    process = run_in(("rlvet", "bandpo", "bandpo-lab"), f"{evaluate} --output-dir runs/c", folder)
    assert process.returncode != 0
    assert f"{INSTALL} './packages/bandpo-lab[eval]'" in process.stderr.splitlines()[-1]
    assert "Traceback" not in process.stderr


@pytest.mark.exhaustive
def test_the_page_on_your_own_rules_says_what_compare_needs(folder):
    """The page's own commands, with 5 batches in place of 80."""
    page = (ROOT / "docs/write-your-own.md").read_text()
    install = "pip install './packages/bandpo-lab[study]'"
    assert f"The picture needs `{install}`" in " ".join(page.split())
    commands = [command for (_, command), reason in COMMANDS.items() if reason == MINUTES]
    assert len(commands) == 2
    for command in commands:
        process = run_in(STUDY, f"{command} --batches 5", folder)
        assert process.returncode == 0, process.stderr
    assert (folder / "runs/compare/curves.png").exists()
    assert (folder / "runs/fresh/curves.png").exists()
    process = run_in(
        ("rlvet", "bandpo", "bandpo-lab"), f"{commands[1]} --batches 5 --output-dir runs/bare", folder
    )
    assert process.returncode == 0, process.stderr
    assert f"no picture: matplotlib is missing; in a clone, {install}" in process.stdout
