"""The probe of verl's loss: an error before training only where its gradient is not that of the run's settings."""

import inspect
import re
import sys
import textwrap
import time

import pytest
import torch

from helpers.frameworks import needs

needs("verl")

import verl as package
from integrations.test_verl import (
    AGGREGATIONS,
    SAME,
    actor_config,
    batch,
    begin,
    evaluate,
    whole_config,
)
from integrations.test_verl_audit import MORE
from integrations.test_verl_megatron import megatron_gradient
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.utils import losses

from bandpo.core.errors import BandWarning, RunProblem
from bandpo.core.methods import METHODS
from bandpo.integrations.verl import AuditedPolicyLossConfig, BandPolicyLossConfig, loss_method
from bandpo.integrations.verl.probe import probe_loss

LENGTH = {"loss_scale_factor": 9}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
ENTROPY = {"entropy_coeff": 0.02}
OWN = sorted(POLICY_LOSS_REGISTRY.keys() - {"band", "audited"})


def banded(method="BandPO()", **settings):
    policy_loss = {name: settings.pop(name) for name in ("average", "certify") if name in settings}
    return actor_config(BandPolicyLossConfig(method=method, **policy_loss), **LENGTH | settings)


def audited(name, **settings):
    return actor_config(AuditedPolicyLossConfig(loss_mode=name, **MORE.get(name, {})), **LENGTH | settings)


def probed(config):
    return probe_loss(config, loss_method(config))


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
        rf"the loss of verl {re.escape(package.__version__)} has the gradient of BandPO\(.*\), [0-9]e[-+]\d\d: compared "
        r"on 8 sequences of 0 to 9 tokens, ratios 0\.\d+ to \d(\.\d)? \(\d+ tokens beyond a bound\), the average "
        "seq-mean-token-mean, importance weights, the KL term low_var_kl, the entropy bonus"
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
    assert min(times) < 0.05


def patched(function, *changes):
    """Return a function of verl whose text is changed."""
    source = textwrap.dedent(inspect.getsource(function))
    source = source[source.index("def ") :]  # without verl's decorator, which registers the function
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    found = {}
    exec(source, vars(inspect.getmodule(function)), found)
    return found[function.__name__]


def of_loss(*changes):
    return [(losses, "ppo_loss", changes)]


def of_average(*changes):
    return [(core_algos, "agg_loss", changes)]


def of_kl(*changes):
    return [(core_algos, "kl_penalty_forward", changes)]


TOKEN_MEAN = {"average": "token-mean"}
DATA = "data = data.select(*fields).to_padded_tensor()\n"
OLD = 'old_log_prob = data["old_log_probs"]'
ADVANTAGES = 'advantages = data["advantages"]'
MASK = 'response_mask = data["response_mask"].to(bool)'
PADDED = 'log_prob = no_padding_2_padding(model_output["log_probs"], data)'
# Per mutation of verl: the changes of its text, the settings of the run, and what the error says; None if it trains.
MUTATIONS = {
    "entropy sign": (of_loss(("policy_loss -= entropy_coeff", "policy_loss += entropy_coeff")), ENTROPY, "entropy bonus"),
    "entropy coefficient": (of_loss(("entropy_coeff * entropy_loss", "0.5 * entropy_coeff * entropy_loss")), ENTROPY, "entropy bonus"),
    "entropy without mask": (of_loss(("loss_mat=entropy, loss_mask=response_mask", "loss_mat=entropy, loss_mask=torch.ones_like(response_mask)")), ENTROPY, "entropy bonus"),
    "KL sign": (of_loss(("policy_loss += kl_loss", "policy_loss -= kl_loss")), KL, "KL term"),
    "KL coefficient": (of_loss(("kl_loss * config.kl_loss_coef", "kl_loss")), KL, "KL term"),
    "KL k2 for k3": (of_kl(("kld = (ratio - kl - 1).contiguous()", "kld = kl**2 / 2")), KL, "KL term"),
    "KL the wrong way": (of_kl(("kl = ref_logprob - logprob", "kl = logprob - ref_logprob")), KL, "KL term"),
    "KL clamped": (of_kl(("min=-20, max=20", "min=-0.5, max=0.5")), KL, "KL term"),
    "average over padding": (of_average(("masked_sum(loss_mat, loss_mask) / batch_num_tokens", "masked_sum(loss_mat, loss_mask) / loss_mask.numel()")), TOKEN_MEAN, "another average"),
    "average of a micro-batch": (of_average(("if batch_num_tokens is None:", "batch_num_tokens = None\n        dp_size = 1\n        if batch_num_tokens is None:")), TOKEN_MEAN, "another average"),
    "average without the processes": (of_average(("/ batch_num_tokens * dp_size", "/ batch_num_tokens")), TOKEN_MEAN, "0.5 times as expected"),
    "average of sequences by tokens": (of_average(("/ (seq_mask + 1e-8)", "/ loss_mask.shape[-1]")), {}, "each sequence has a factor of its own"),
    "loss doubled": (of_loss(("policy_loss = pg_loss\n", "policy_loss = 2 * pg_loss\n")), {}, "is 2 times as expected"),
    "loss negated": (of_loss(("policy_loss = pg_loss\n", "policy_loss = -pg_loss\n")), {}, "is -1 times as expected"),
    "log-ratio clamped": (of_loss((OLD, OLD + ".maximum(log_prob - 0.3).minimum(log_prob + 0.3)")), {}, "its gradient differs"),
    "log-ratio clamped with its gradient": (of_loss((OLD, OLD + "\n    log_prob = (log_prob - old_log_prob).clamp(-0.5, 0.5) + old_log_prob")), {}, "its gradient differs"),
    "mask left out": (of_loss((MASK, "response_mask = torch.ones_like(data['response_mask'], dtype=torch.bool)")), {}, "tokens that do not count have a gradient|another average"),
    "mask of the wrong token": (of_loss((MASK, MASK + ".roll(1, -1)")), {}, "tokens that do not count have a gradient"),
    "certain tokens detached": (of_loss((MASK, MASK + "\n    log_prob = torch.where(log_prob > -0.02, log_prob.detach(), log_prob)")), {}, "its gradient differs"),
    "every second token detached": (of_loss((MASK, MASK + "\n    log_prob = torch.cat([log_prob[:, :1].detach(), log_prob[:, 1:]], 1)")), {}, "its gradient differs"),
    "advantages clamped": (of_loss((ADVANTAGES, ADVANTAGES + ".clamp(-1, 1)")), {}, "its gradient differs"),
    "advantages normalised": (of_loss((ADVANTAGES, ADVANTAGES + " / 2")), {}, "is 0.5 times as expected"),
    "weights left out": (of_loss(("rollout_is_weights=rollout_is_weights", "rollout_is_weights=None")), {}, "its gradient differs"),
    "tokens shifted": (of_loss((PADDED, PADDED + ".roll(1, 1)")), {}, "its gradient differs"),
    "argument renamed": (of_loss(("old_log_prob=old_log_prob,", "old_log_probs=old_log_prob,")), {}, r"ends with TypeError.*old_log_probs"),
    "argument added": (of_loss(("config=config,\n", "config=config,\n        dp_group=dp_group,\n")), {}, r"ends with TypeError.*dp_group"),
    "field renamed": (of_loss(('data["advantages"]', 'data["token_advantages"]'), ('"advantages"]', '"token_advantages"]')), {}, "ends with KeyError.*token_advantages"),
    "output renamed": (of_loss(('model_output["log_probs"]', 'model_output["logprobs"]')), {}, "ends with KeyError.*logprobs"),
    "sizes under another name": (of_loss(('config.global_batch_info["batch_num_tokens"]', 'config.global_batch_info["num_tokens"]')), TOKEN_MEAN, "ends with TypeError.*num_tokens"),
    "another loss": (of_loss(('config.policy_loss.get("loss_mode", "vanilla")', '"vanilla"')), {}, "its gradient differs"),
    "a term of its own": (of_loss(("policy_loss = pg_loss\n", "policy_loss = pg_loss + 0.1 * log_prob[response_mask].mean()\n")), {}, "with advantages of 0 it has a gradient"),
    "a square of the log-probabilities": (of_loss(("policy_loss = pg_loss\n", "policy_loss = pg_loss + 0.1 * log_prob[response_mask].square().mean()\n")), {}, "with advantages of 0 it has a gradient"),
    "a metric more": (of_loss(("metrics = {}\n", "metrics = {'actor/new': 1.0}\n")), {}, None),
    "another order of terms": (of_loss(("policy_loss += kl_loss * config.kl_loss_coef", "policy_loss = config.kl_loss_coef * kl_loss + policy_loss")), KL, None),
    "the same sum in another way": (of_average(("verl_F.masked_sum(loss_mat, loss_mask) / batch_num", "torch.where(loss_mask.bool(), loss_mat, 0.0).sum() / batch_num")), TOKEN_MEAN, None),
    "positional arguments": (of_loss(("kl_penalty(logprob=log_prob, ref_logprob=ref_log_prob, kl_penalty=config.kl_loss_type)", "kl_penalty(log_prob, ref_log_prob, config.kl_loss_type)")), KL, None),
}  # fmt: skip
# ruff: noqa: E501  (a row is a line)


def mutate(monkeypatch, name):
    for module, function, changes in MUTATIONS[name][0]:
        original = getattr(module, function)
        changed = patched(original, *changes)
        # In the modules that have imported it, those of the workers among them.
        for holder in [*sys.modules.values()]:
            if getattr(holder, "__dict__", {}).get(function) is original:
                monkeypatch.setattr(holder, function, changed)


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize("method", ["BandPO()", "FixedClip(0.2, 0.28)"])
def test_another_loss_of_verl_is_trained_rightly_or_stopped_by_one_sentence(name, method, monkeypatch):
    _, settings, message = MUTATIONS[name]
    if "FixedClip" in method and settings != TOKEN_MEAN:
        settings = settings | {"loss_agg_mode": "seq-mean-token-mean"}
    config = banded(method, **settings)
    mutate(monkeypatch, name)
    if message is None:
        assert "has the gradient of " in probed(config).line
        return
    if name == "another loss" and "FixedClip" in method:  # which is verl's vanilla
        return
    with pytest.raises(RunProblem) as caught:
        probed(config)
    text = str(caught.value)
    assert f"verl {package.__version__}" in text
    assert re.search(message, text), text
    assert "certify=warn" in text


OF_VANILLA = {
    "another clip": (("1 - cliprange_low, 1 + cliprange_high", "1 - cliprange_low, 1.5 + cliprange_high"), "another clip"),
    "no dual clip": (("pg_losses3 = -advantages * clip_ratio_c", "pg_losses3 = -advantages * 100"), "its gradient differs"),
    "a clamp of the log-ratio": (("min=-20.0, max=20.0", "min=-0.3, max=0.3"), "its gradient differs"),
    "no weights": (("pg_losses = pg_losses * rollout_is_weights", "pass"), "its gradient differs"),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_VANILLA)
def test_a_change_of_verls_own_loss_is_reported_under_the_audit(name, monkeypatch):
    change, message = OF_VANILLA[name]
    config = audited("vanilla")
    assert "has the gradient of " in probed(config).line
    changed = patched(core_algos.compute_policy_loss_vanilla, change)
    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "vanilla", changed)
    with pytest.raises(RunProblem, match=message):
        probed(config)


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
