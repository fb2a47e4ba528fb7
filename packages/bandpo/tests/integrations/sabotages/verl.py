"""Sabotages of verl's loss, by changes of its text."""

import inspect
import re
import sys
import textwrap
from functools import partial

from integrations.sabotages.table import Row

from helpers.frameworks import needs

needs("verl")

import verl as package
from integrations.test_verl import actor_config
from integrations.test_verl_audit import MORE
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.utils import losses

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


OF_VANILLA = {
    "another clip": (("1 - cliprange_low, 1 + cliprange_high", "1 - cliprange_low, 1.5 + cliprange_high"), "another clip"),
    "no dual clip": (("pg_losses3 = -advantages * clip_ratio_c", "pg_losses3 = -advantages * 100"), "its gradient differs"),
    "a clamp of the log-ratio": (("min=-20.0, max=20.0", "min=-0.3, max=0.3"), "its gradient differs"),
    "no weights": (("pg_losses = pg_losses * rollout_is_weights", "pass"), "its gradient differs"),
}  # fmt: skip


def certify(name, method, folder, monkeypatch):
    """Certify the loss ``band`` of a changed verl."""
    settings = MUTATIONS[name][1]
    if "FixedClip" in method and settings != TOKEN_MEAN:
        settings = settings | {"loss_agg_mode": "seq-mean-token-mean"}
    config = banded(method, **settings)
    mutate(monkeypatch, name)
    assert "has the gradient of " in probed(config).line


def certify_vanilla(name, folder, monkeypatch):
    """Certify verl's own loss after a change."""
    changed = patched(core_algos.compute_policy_loss_vanilla, OF_VANILLA[name][0])
    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "vanilla", changed)
    probed(audited("vanilla"))


ROWS = {}
for name, (_, _, message) in MUTATIONS.items():
    for method in ("BandPO()", "FixedClip(0.2, 0.28)"):
        if name == "another loss" and "FixedClip" in method:
            continue  # which is verl's vanilla
        version = re.escape(package.__version__)
        sentence = None if message is None else rf"^(?=.*verl {version})(?=.*certify=warn).*({message})"
        ROWS[f"{name}, {method}"] = Row(partial(certify, name, method), sentence)
for name, (_, message) in OF_VANILLA.items():
    ROWS[f"vanilla: {name}"] = Row(partial(certify_vanilla, name), message)
