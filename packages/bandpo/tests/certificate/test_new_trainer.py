"""A trainer that is added as CONTRIBUTING.md says is certified, and its sabotages are stopped."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from pages import ROOT, blocks

PAGE = ROOT / "CONTRIBUTING.md"
HEADING = "A trainer whose loss is certified"
COPIED = ("packages/bandpo/src", "packages/bandpo/tests/integrations", "tests")


@pytest.mark.slow
def test_a_trainer_is_added_by_the_recipe(tmp_path):
    """In a copy: its subject, its sabotages, and the command."""
    for folder in COPIED:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml", "packages/bandpo/pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    texts = {block.title: block.text for block in blocks(PAGE) if block.heading == HEADING}
    (tmp_path / "packages/bandpo/src/bandpo/integrations/toy_trainer.py").write_text(texts["toy_trainer.py"])
    rows = tmp_path / "packages/bandpo/tests/integrations/sabotages/toy_trainer.py"
    rows.write_text(texts["sabotages.py"])

    places = [tmp_path / "packages/bandpo/src", tmp_path / "tests", tmp_path / "packages/bandpo/tests"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))}
    command = shlex.split(texts[""].replace('"certify"', '"toy_trainer"', 1), comments=True)
    options = ["-q", "-n", "0", "-p", "no:randomly", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, *command[1:], *options],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) == 3
