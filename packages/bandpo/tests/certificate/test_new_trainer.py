"""A trainer that is added as CONTRIBUTING.md says is certified, and its sabotages are stopped."""

import pytest

from helpers.recipes import copy, run, texts_of

COPIED = ("packages/bandpo/src", "packages/bandpo/tests/integrations", "tests")
FILES = ("conftest.py", "pyproject.toml", "packages/bandpo/pyproject.toml")
SOURCES = ("packages/bandpo/src", "tests", "packages/bandpo/tests")


@pytest.mark.slow
def test_a_trainer_is_added_by_the_recipe(tmp_path):
    """In a copy: its subject, its sabotages, and the command."""
    copy(tmp_path, (*COPIED, *FILES))
    texts = texts_of("A trainer whose loss is certified")
    (tmp_path / "packages/bandpo/src/bandpo/integrations/toy_trainer.py").write_text(texts["toy_trainer.py"])
    rows = tmp_path / "packages/bandpo/tests/integrations/sabotages/toy_trainer.py"
    rows.write_text(texts["sabotages.py"])
    command = texts[""].replace('"certify"', '"toy_trainer"', 1)
    assert run(command, tmp_path, SOURCES) == 3
