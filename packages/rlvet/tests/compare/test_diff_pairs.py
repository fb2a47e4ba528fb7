"""Pairs of configurations, labelled by the parameters after one batch of the frameworks' own code.

`packages/bandpo/tests/integrations/one_batch.py` has made the labels, and `test_diff_labels.py` tests them.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from rlvet.cli.app import app

PAIRS = Path(__file__).parent / "pairs"
FOLDERS = sorted(PAIRS.iterdir())


def read_pair(folder):
    return json.loads((folder / "pair.json").read_text())


def differences(*files):
    """Return the names of the differences that the command reports, and its exit code."""
    result = CliRunner().invoke(app, ["diff", *map(str, files), "--json"])
    output = json.loads(result.stdout)
    assert output["configurations"]["unjudged"] == []
    return [one["name"] for one in output["configurations"]["differences"]], result.exit_code


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_pair_differs_in_what_was_planted_and_in_nothing_else(folder):
    pair = read_pair(folder)
    files = [next(folder.glob(f"{name}.*")) for name in "ab"]
    expected = (pair["planted"], int(pair["label"] == "different"))
    assert differences(*files) == expected
    assert differences(*reversed(files)) == expected


def test_there_are_twenty_pairs_and_ten_unseen_ones_of_both_labels():
    counts = Counter((read_pair(folder)["set"], read_pair(folder)["label"]) for folder in FOLDERS)
    assert counts == {
        ("first", "same"): 10,
        ("first", "different"): 10,
        ("unseen", "same"): 5,
        ("unseen", "different"): 5,
    }
    both = [folder for folder in FOLDERS if _frameworks(folder) == {"trl", "verl"}]
    assert len(both) >= 10


def _frameworks(folder):
    texts = [file.read_text() for file in folder.glob("[ab].*")]
    return {"verl" if "actor_rollout_ref" in text else "trl" for text in texts}
