"""A mutation of any loss of verl changes its row of the atlas, so that the row's test and the weekly job see it."""

import pytest

from helpers.atlas_rows import (
    RESULTS,
    SEEN,
    committed,
    few_batches,
    framework_loss,
    measured,
    mutations,
    rows,
    unseen,
)
from helpers.frameworks import needs

needs("verl")

from verl.trainer.ppo import core_algos

import conformance

LINES = rows("verl")


@pytest.fixture(params=LINES, ids=[line.name for line in LINES])
def line(request):
    return request.param


def test_the_row_is_that_of_the_installed_version(line):
    assert measured(line, framework_loss(line)) == pytest.approx(committed(line), abs=SEEN)


def test_a_mutation_changes_the_row(line):
    same = [
        name
        for name, loss in mutations(line)
        if measured(line, loss) == pytest.approx(committed(line), abs=SEEN)
    ]
    assert same == []


@pytest.mark.slow
def test_the_settings_without_effect_are_those_of_the_row(line):
    expected = RESULTS[line.framework]["losses"][line.name]["without_effect"]
    assert conformance.without_effect(few_batches(), line) == expected


# bypass_mode computes no loss itself: it calls another one, after verl's rejection of tokens.
OWN_LOSSES = [line for line in LINES if line.name != "bypass_mode"]


@pytest.mark.slow
@pytest.mark.parametrize("line", OWN_LOSSES, ids=[line.name for line in OWN_LOSSES])
def test_a_mutation_in_the_source_changes_the_row(line, monkeypatch):
    mode = conformance.read_settings(line.settings)["loss_mode"]
    function = core_algos.get_policy_loss_fn(mode)

    def install(mutant):
        monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, mode, mutant)

    other, same = unseen(line, function, install)
    assert other >= 1
    assert same == []
