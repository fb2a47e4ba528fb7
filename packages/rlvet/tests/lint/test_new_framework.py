"""A framework that is added as CONTRIBUTING.md says is read, checked and on the page."""

import re

import pytest

from helpers.recipes import copy, insert, run, texts_of

COPIED = ("packages/rlvet/src", "packages/rlvet/tests/lint", "tests", "docs", "scripts")
FILES = ("conftest.py", "pyproject.toml", "CONTRIBUTING.md")
SOURCES = ("packages/rlvet/src", "tests", "scripts")
KNOWN = "packages/rlvet/src/rlvet/lint/known"


@pytest.mark.slow
def test_a_framework_is_added_by_the_recipe(tmp_path):
    """In a copy: its file, its name in the list, its cases, and the commands."""
    copy(tmp_path, (*COPIED, *FILES))
    texts = texts_of("A framework for `rlvet lint`")

    (tmp_path / KNOWN / "toyrl.py").write_text(texts["toyrl.py"])
    listing = tmp_path / KNOWN / "__init__.py"
    insert(listing, "import SKYRL\n", "from rlvet.lint.known.toyrl import TOYRL\n")
    insert(listing, "PRIME_RL, OPENRLHF", ", TOYRL")
    tests = tmp_path / "packages/rlvet/tests/lint/test_lint_rules.py"
    values = dict(re.findall(r"^(\w+) = .(.*).$", texts["cases.py"], re.M))
    insert(tests, "\nFILES = {\n", f"    {values['FILES']},\n")
    insert(tests, "\nCASES = [\n", f"    {values['CASES']},\n")

    commands = texts[""].replace("prime-rl", "toyrl").splitlines()
    *_, passed = [run(command, tmp_path, SOURCES) for command in commands]
    assert passed >= 7
    table = (tmp_path / "docs/lint.md").read_text()
    assert "### ToyRL\n\nDefaults are those of 1.0." in table
    (row,) = re.findall(r"^\| `group-of-one`, fix \| (.*ToyRL 1.0.*) \|$", table, re.M)
    assert row.startswith(
        "**one answer to each prompt**<br>*Reads:* `sampler.answers_per_prompt`<br>*Source:* ToyRL 1.0"
    )
