"""A framework that is added as CONTRIBUTING.md says is read, checked and on the page."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from pages import ROOT, blocks

PAGE = ROOT / "CONTRIBUTING.md"
HEADING = "A framework for `rlvet lint`"
COPIED = ("packages/rlvet/src", "packages/rlvet/tests/lint", "tests", "docs", "scripts")
KNOWN = "packages/rlvet/src/rlvet/lint/known"


def insert(file, after, text):
    """Insert a text behind another one, which occurs once."""
    content = file.read_text()
    assert content.count(after) == 1
    file.write_text(content.replace(after, after + text))


@pytest.mark.slow
def test_a_framework_is_added_by_the_recipe(tmp_path):
    """In a copy: its file, its name in the list, its cases, and the commands."""
    for folder in COPIED:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    texts = {block.title: block.text for block in blocks(PAGE) if block.heading == HEADING}

    (tmp_path / KNOWN / "toyrl.py").write_text(texts["toyrl.py"])
    listing = tmp_path / KNOWN / "__init__.py"
    insert(listing, "import SKYRL\n", "from rlvet.lint.known.toyrl import TOYRL\n")
    insert(listing, "PRIME_RL, OPENRLHF", ", TOYRL")
    tests = tmp_path / "packages/rlvet/tests/lint/test_lint_rules.py"
    values = dict(re.findall(r"^(\w+) = .(.*).$", texts["cases.py"], re.M))
    insert(tests, "\nFILES = {\n", f"    {values['FILES']},\n")
    insert(tests, "\nCASES = [\n", f"    {values['CASES']},\n")

    places = [tmp_path / folder for folder in ("packages/rlvet/src", "tests", "scripts")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))}
    for command in texts[""].replace("prime-rl", "toyrl").splitlines():
        words = [sys.executable, *shlex.split(command, comments=True)[1:]]
        words += ["-q", "-n", "0", "-p", "no:randomly", "-p", "no:cacheprovider"] if "pytest" in words else []
        run = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= 7
    table = (tmp_path / "docs/lint.md").read_text()
    assert "### ToyRL\n\nDefaults are those of 1.0." in table
    assert (
        "| `group-of-one`, fix | one answer to each prompt | `sampler.answers_per_prompt` | ToyRL 1.0"
        in table
    )
