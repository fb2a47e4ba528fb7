"""The probe of verl's loss: an error before training only where its gradient is not that of the run's settings."""

import re
import sys
import time

import pytest
import torch

from helpers.frameworks import needs

needs("verl")

import verl as package
from integrations.sabotages.verl import ENTROPY, KL, audited, banded, mutate, probed
from integrations.test_verl import AGGREGATIONS, SAME, batch, begin, evaluate, whole_config
from integrations.test_verl_megatron import megatron_gradient
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from bandpo.core.errors import BandWarning, RunProblem
from bandpo.core.methods import METHODS
from bandpo.integrations.verl import loss_method
from bandpo.integrations.verl.probe import UNSEEN

OWN = sorted(POLICY_LOSS_REGISTRY.keys() - {"band", "audited"})


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_passes(name, mode):
    for settings in ({}, {"average": "framework"}, KL | ENTROPY, KL | {"kl_loss_type": "k1"}):
        found = probed(banded(f"{name}()", loss_agg_mode=mode, **settings))
        assert "has the gradient of " in found.line, settings


@pytest.mark.parametrize(
    "kind", ["kl", "k1", "k1+", "abs", "mse", "k2", "k2+", "low_var_kl", "k3", "k3+", "low_var_kl+"]
)
def test_every_kl_term_passes(kind):
    found = probed(banded(kl_loss_type=kind, **KL))
    assert f"the KL term {kind}" in found.line


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", OWN)
def test_every_loss_of_verls_own_passes(name, mode):
    settings = SAME[name][0] if name in SAME else {}
    config = audited(name, loss_agg_mode=mode, **KL | ENTROPY | settings)
    line = probed(config).line
    known = loss_method(config) is not None
    assert ("has the gradient of " in line) == known
    assert "the KL term low_var_kl, the entropy bonus" in line


def test_its_line_says_what_was_compared():
    line = probed(banded(**KL | ENTROPY)).line
    expected = (
        rf"the loss of verl {re.escape(package.__version__)} has the gradient of BandPO\(.*\), [0-9]e[-+]\d\d: "
        r"compared on 32 sequences of 0 to \d+ tokens, ratios 0\.\d+ to \d+ \(\d+ tokens beyond a bound\), "
        "the average seq-mean-token-mean, importance weights, the KL term low_var_kl, the entropy bonus; not compared: "
        + UNSEEN
    )
    assert re.fullmatch(expected, line)


def test_it_changes_nothing(capsys):
    config = banded(**KL)
    config.global_batch_info["dp_size"] = 4
    before, random = dict(vars(config)), torch.get_rng_state()
    probed(config)
    assert dict(vars(config)) == before
    assert config.global_batch_info == {"dp_size": 4}
    assert torch.equal(torch.get_rng_state(), random)
    assert not capsys.readouterr().out


def test_it_takes_little_time():
    config = banded(**KL | ENTROPY)
    times = []
    for _ in range(5):
        start = time.process_time()
        probed(config)
        times.append(time.process_time() - start)
    # About 0.03 s of a quiet core, and twice that beside other jobs.
    assert min(times) < 0.15


def train(config, calls=1):
    """Call verl's loss as its workers do, so many times."""
    for _ in range(calls):
        megatron_gradient(batch(3, spread=1.2), config)


SAID = f"bandpo: the loss of verl {package.__version__} has the gradient of "


@pytest.mark.parametrize("config", [banded, lambda: audited("vanilla")], ids=["band", "audited"])
def test_a_worker_compares_once_and_says_so(config, capsys):
    train(config(), calls=3)
    assert capsys.readouterr().out.count(SAID) == 1


@pytest.mark.parametrize("config", [banded, lambda: audited("vanilla")], ids=["band", "audited"])
def test_a_worker_with_a_loss_of_its_own_is_named(config, capsys):
    config = config()
    for _ in range(2):
        evaluate(config, batch(3))
    said = capsys.readouterr().out.splitlines()
    caller = "integrations.test_verl.evaluate called the policy loss, and not verl's ppo_loss"
    assert said == [f"bandpo: the gradient of the loss was not compared: {caller}"]


def test_a_changed_loss_stops_a_worker_at_its_first_loss_unless_the_user_says_otherwise(monkeypatch, capsys):
    mutate(monkeypatch, "loss doubled")
    with pytest.raises(RunProblem, match=r"is 2 times as expected.*certify=warn to train on"):
        train(banded())
    with pytest.warns(BandWarning, match="is 2 times as expected"):
        train(banded(certify="warn"))
    train(banded(certify="off"))
    with pytest.warns(BandWarning, match=r"is not that of Method.*: its average is none of verl's"):
        train(audited("vanilla"))
    assert not capsys.readouterr().out


SIZES = [
    "data.train_batch_size=256",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
]


def test_the_driver_compares_before_ray_starts(monkeypatch, capsys):
    begin(whole_config(*SIZES))
    assert f"bandpo: gradient    {SAID.removeprefix('bandpo: ')}" in capsys.readouterr().out
    mutate(monkeypatch, "mask left out")
    with pytest.raises(RunProblem, match=f"^the loss of verl {package.__version__} is not that of "):
        begin(whole_config(*SIZES))
    with pytest.warns(BandWarning, match="is not that of "):
        begin(whole_config(*SIZES, target="AuditedPolicyLossConfig"))
    assert "bandpo: gradient" not in capsys.readouterr().out


def test_a_verl_without_its_function_is_said(monkeypatch):
    for module in ("verl.workers.engine_workers", "verl.workers.utils.losses"):
        if module in sys.modules:
            monkeypatch.delattr(sys.modules[module], "ppo_loss")
    with pytest.raises(RunProblem, match=f"verl {package.__version__} ends with ImportError.*ppo_loss"):
        probed(banded())
