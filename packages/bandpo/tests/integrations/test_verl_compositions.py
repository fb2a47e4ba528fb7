"""Settings of verl drawn by chance, in pairs and triples: none makes a run train something else in silence."""

import re

import pytest

from helpers.frameworks import needs

needs("verl")

import verl
from verl_settings import PAGE, Composition, draw, outcome, row

from bandpo.integrations.verl.driver import Driver

DRAWN = draw(100)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Driver, "prepare", lambda *_: None)  # whose hooks would outlast the test


def check(composition):
    """Assert that a composition's outcome is one of the three, and what the report says of it."""
    found = outcome(composition)
    assert found.kind in ("right", "announced", "refused"), found.detail
    if verl.__version__ == "0.9.1":  # the page is that of the newest verl
        assert row(composition, found) in PAGE.read_text()


def test_the_page_counts_its_rows():
    text = PAGE.read_text()
    rows = re.findall(r"^\| (?:main_ppo|one_step_off|fully_async) \| (\w+)", text, re.M)
    counts = ", ".join(f"{rows.count(kind)} {kind}" for kind in ("right", "announced", "refused", "silent"))
    assert f"{len(DRAWN)} compositions: {counts}." in text
    assert len(rows) == len(DRAWN)


@pytest.mark.slow
@pytest.mark.parametrize("composition", DRAWN[:15], ids=str)
def test_a_composition_is_right_refused_or_announced(composition):
    check(composition)


@pytest.mark.exhaustive
@pytest.mark.parametrize("composition", DRAWN[15:], ids=str)
def test_each_of_many_compositions_is_right_refused_or_announced(composition):
    check(composition)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["average", "correction", "weight"])
def test_a_fault_is_seen(fault, monkeypatch):
    """Verl's loss with another average, without its driver's weights, or with another clip, is none of the three."""
    from verl.trainer.ppo import core_algos, rollout_corr_helper

    from bandpo.integrations.verl import loss as verl

    band = "actor_rollout_ref.actor.policy_loss."
    loss = f"{band}_target_=bandpo.integrations.verl.BandPolicyLossConfig +{band}method='DAPO()' +{band}certify=off"
    weights = ("algorithm.rollout_correction.rollout_is=token",)
    composition = Composition("main_ppo", loss, weights)
    assert outcome(composition).kind == "announced"
    if fault == "average":
        monkeypatch.setattr(verl, "average_of", lambda *_: "seq-mean-token-mean")
    elif fault == "correction":
        whole = rollout_corr_helper.compute_rollout_correction_and_add_to_batch
        monkeypatch.setattr(
            rollout_corr_helper,
            "compute_rollout_correction_and_add_to_batch",
            lambda data, settings: (whole(data, settings)[0].pop(["rollout_is_weights"]) and data, {}),
        )
    else:
        monkeypatch.setitem(
            core_algos.POLICY_LOSS_REGISTRY, "band", core_algos.POLICY_LOSS_REGISTRY["vanilla"]
        )
    assert outcome(composition).kind == "silent"
