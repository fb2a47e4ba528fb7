"""The labels of the pairs of `rlvet diff` are those of the two frameworks' own code."""

import json
import warnings

import one_batch
import pytest

from helpers.frameworks import needs

needs("trl")
needs("verl")

import trl
import verl

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        (trl.__version__, verl.__version__) != ("1.16.0", "0.9.1"),
        reason="the labels are those of these versions",
    ),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("folder", sorted(one_batch.PAIRS.iterdir()), ids=lambda folder: folder.name)
def test_a_label_is_that_of_the_parameters_after_one_batch(folder):
    pair = json.loads((folder / "pair.json").read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure = one_batch.difference(folder)
    assert one_batch.label(figure) == pair["label"]
    assert pair["label"] == ("different" if pair["planted"] else "same")
