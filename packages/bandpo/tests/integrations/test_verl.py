"""The loss that stock verl calls: against verl's own losses where they coincide, and against `bandpo.policy_loss`."""

import math

import pytest
import torch

import bandpo
from helpers.frameworks import needs

needs("verl")

from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import device
from verl.utils.config import validate_config
from verl.workers.config import ActorConfig, PolicyLossConfig

from bandpo import Band
from bandpo.core.layout import Rows
from bandpo.core.methods import METHODS
from bandpo.integrations.verl import BandPolicyLossConfig

AGGREGATIONS = ["token-mean", "token-sum"]
AGGREGATIONS += ["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LENGTH = {"loss_scale_factor": 9}
"""What the average by a length divides by."""


def actor_config(policy_loss: PolicyLossConfig, **settings) -> ActorConfig:
    settings |= {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    return ActorConfig(policy_loss=policy_loss, **settings)


def batch(seed: int, shape: tuple[int, int] = (6, 9), spread: float = 0.6) -> dict[str, torch.Tensor]:
    """Tokens common and rare, ratios near and far, both signs of advantage, ragged lengths."""
    generator = torch.Generator().manual_seed(seed)
    old = -8 * torch.rand(shape, generator=generator, dtype=torch.float64) ** 2 - 1e-3
    new = (old + spread * torch.randn(shape, generator=generator, dtype=torch.float64)).clamp(max=-1e-6)
    lengths = torch.randint(1, shape[1] + 1, (shape[0], 1), generator=generator)
    return {
        "old_log_prob": old,
        "log_prob": new,
        "advantages": torch.randn(shape, generator=generator, dtype=torch.float64),
        "response_mask": torch.arange(shape[1]) < lengths,
        "rollout_is_weights": 2 * torch.rand(shape, generator=generator, dtype=torch.float64),
    }


def batch_for(loss: str, seed: int) -> dict[str, torch.Tensor]:
    """Return a batch with large ratios, in the form that this loss of verl accepts."""
    tensors = batch(seed, spread=1.2)
    if loss == "geo_mean":  # looks at sequences whole; takes importance weights as their geometric mean
        tensors["advantages"] = tensors["advantages"][:, :1].expand_as(tensors["log_prob"])
        tensors["rollout_is_weights"] = None
    return tensors


def evaluate(config: ActorConfig, tensors: dict[str, torch.Tensor], mode: str = "token-mean"):
    log_prob = tensors["log_prob"].clone().requires_grad_()
    loss_fn = get_policy_loss_fn(config.policy_loss.loss_mode)
    loss, metrics = loss_fn(**{**tensors, "log_prob": log_prob}, loss_agg_mode=mode, config=config)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    return loss, gradient, metrics


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("info", [{}, {"dp_size": 2, "batch_num_tokens": 100, "global_batch_size": 16}])
def test_fixed_clip_is_verls_vanilla(mode, weighted, info):
    tensors = batch(0)
    if not weighted:
        tensors["rollout_is_weights"] = None
    settings = ranges(0.2, 0.28, 1.5) | {"global_batch_info": info | LENGTH}
    theirs = evaluate(actor_config(PolicyLossConfig(), **settings), tensors, mode)
    ours = evaluate(
        actor_config(BandPolicyLossConfig(method="FixedClip(0.2, 0.28)"), **settings), tensors, mode
    )
    torch.testing.assert_close(ours[0], theirs[0], check_dtype=False)
    torch.testing.assert_close(ours[1], theirs[1], check_dtype=False)
    assert theirs[2]["actor/pg_clipfrac"] > 0.1
    assert theirs[2]["actor/pg_clipfrac_lower"] > 0.02
    assert {k: ours[2][k] for k in theirs[2]} == pytest.approx(theirs[2], abs=1e-6)


def ranges(low: float, high: float, dual_clip: float = 3.0) -> dict[str, float]:
    return {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": dual_clip}


# Per name of a loss of verl: verl's settings and ours.
SAME = {
    "vanilla": (ranges(0.2, 0.28, 1.5), {"method": "FixedClip(0.2, 0.28)"}),
    "dppo_tv": (ranges(0.1, 0.1, 3.0), {"method": "DPPO(TotalVariation(), 0.1, max_weight=3)"}),
    "dppo_kl": (ranges(0.05, 0.05, 3.0), {"method": "DPPO(KL(), 0.05, max_weight=3)"}),
    "gspo": (ranges(0.01, 0.02), {"method": "Method(FixedClip(0.01, 0.02), level='sequence')"}),
    "sapo": ({"tau_pos": 1.5, "tau_neg": 3.0}, {"method": "SAPO(1.5, 3.0)"}),
    "gpg": ({}, {"method": "GPG()"}),
    "geo_mean": (ranges(0.4, 0.4), {"method": "GMPO(0.4)"}),
    "cispo": (ranges(0.2, 0.3), {"method": "CISPO(0.2, 0.3)"}),
}


@pytest.mark.parametrize("dual_clip", [3.0, 10.0])
def test_dppo_kl_has_bandpos_gradient_up_to_its_largest_weight(dual_clip):
    """The trust regions are the same: docs/paper.md says where the gradients differ."""
    settings = ranges(0.05, 0.05, dual_clip)
    tensors = {**batch(5, (40, 60), spread=1.5), "rollout_is_weights": None}
    theirs = evaluate(actor_config(PolicyLossConfig(loss_mode="dppo_kl"), **settings), tensors)[1]
    band = BandPolicyLossConfig(method="BandPO()", average="framework")
    ours = evaluate(actor_config(band, **settings), tensors)[1]
    ratio = (tensors["log_prob"] - tensors["old_log_prob"]).exp()
    same = (ours - theirs).abs() < 1e-9
    assert same[ratio <= dual_clip].all()
    far = tensors["response_mask"] & (ratio > dual_clip)
    assert far.any()
    assert not same[far].all()


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", SAME)
def test_the_gradient_is_that_of_verls_own_loss(name, mode):
    """Some of verl's losses make one average whatever they are told, in some versions."""
    settings, ours = SAME[name]
    settings = settings | {"global_batch_info": LENGTH}
    tensors, verls = batch_for(name, 5), actor_config(PolicyLossConfig(loss_mode=name), **settings)
    theirs, by_default, other = (
        evaluate(verls, tensors, given) for given in (mode, "seq-mean-token-mean", "token-sum")
    )
    mode = "seq-mean-token-mean" if torch.equal(by_default[1], other[1]) else mode
    policy_loss = BandPolicyLossConfig(**ours, average="framework")
    found = evaluate(actor_config(policy_loss, **settings), tensors, mode)
    torch.testing.assert_close(found[1], theirs[1], check_dtype=False)
    blocked = (theirs[1] == 0)[tensors["response_mask"]].double().mean()
    assert blocked == 0 if name in ("sapo", "gpg", "cispo") else 0.05 < blocked < 0.95


@pytest.mark.parametrize(
    ("name", "settings", "method"),
    [
        ("dro", {"dro_beta": 0.5}, "DRO(0.5)"),
        ("kl_cov", {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.3}, "KLCov(0.1, 0.3)"),
    ],
)
def test_the_gradient_is_that_of_verls_losses_with_a_penalty(name, settings, method):
    tensors = batch(5, spread=1.2)
    theirs = evaluate(actor_config(PolicyLossConfig(loss_mode=name, **settings)), tensors)
    ours = evaluate(actor_config(BandPolicyLossConfig(method=method)), tensors)
    torch.testing.assert_close(ours[1], theirs[1], check_dtype=False)


@pytest.mark.parametrize("average", [None, "method", "token-mean", "seq-mean-token-sum", "framework"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_the_cores_and_averages_as_it_does_unless_the_user_says_otherwise(method, average):
    tensors = batch(8)
    config = actor_config(BandPolicyLossConfig(method=method, average=average))
    _, gradient, metrics = evaluate(config, tensors, "seq-mean-token-sum")
    logp = tensors["log_prob"].clone().requires_grad_()
    rest = (tensors["old_log_prob"], tensors["advantages"], tensors["response_mask"])
    average = {"method": None, "framework": "seq-mean-token-sum"}.get(average, average)
    weights = tensors["rollout_is_weights"]
    loss, expected = bandpo.policy_loss(
        logp, *rest, weights=weights, method=method, aggregation=average, layout=Rows()
    )
    torch.testing.assert_close(gradient, torch.autograd.grad(loss, logp)[0], check_dtype=False)
    # As in the audit, those of the dual clip are among the blocked tokens with a negative advantage.
    expected["clip_low"] = expected["clip_low"] + expected["dual_clip"]
    for name, value in expected.items():
        assert metrics[f"actor/{name}"] == pytest.approx(value.item()), name


def test_the_dual_clip_of_verl_acts_beside_a_rule_alone():
    tensors = batch(6, spread=1.2)

    def gradient(dual_clip, **settings):
        config = actor_config(BandPolicyLossConfig(**settings), clip_ratio_c=dual_clip)
        return evaluate(config, tensors, "seq-mean-token-mean")[1]

    for rule in ({"method": "FixedClip(0.2)"}, {}):
        assert not torch.equal(gradient(1.5, **rule), gradient(math.inf, **rule))
    for method in ("CISPO(0.2, 0.3)", "BandPO(dual_clip=2)", "DPPO()", "Method(FixedClip(0.2), KeepBound())"):
        assert torch.equal(gradient(1.5, method=method), gradient(math.inf, method=method))
    rule, method = gradient(2.0, method="Band(KL(), 0.05)"), gradient(1.5, method="BandPO(dual_clip=2)")
    assert torch.equal(rule, method)


def test_the_reported_loss_of_a_token_that_a_band_clips_is_that_of_its_bound():
    tensors = batch(2) | {"rollout_is_weights": None}
    config = actor_config(BandPolicyLossConfig(), clip_ratio_c=math.inf)
    loss, _, metrics = evaluate(config, tensors)
    ratio = (tensors["log_prob"] - tensors["old_log_prob"]).exp()
    bounds = Band().bounds(tensors["old_log_prob"])
    clipped = ratio.clamp(bounds.lower, bounds.upper)
    advantages = tensors["advantages"]
    expected = -torch.minimum(ratio * advantages, clipped * advantages)[tensors["response_mask"]].mean()
    assert metrics["actor/pg_clipfrac"] > 0.05
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("junk", [0.0, -math.inf, math.nan])
def test_a_micro_batch_without_tokens_keeps_the_ranks_together(junk):
    tensors = batch(3)
    config = actor_config(BandPolicyLossConfig(), clip_ratio_c=10.0)
    full = evaluate(config, tensors)[2]
    tensors["response_mask"] = torch.zeros_like(tensors["response_mask"])
    tensors["log_prob"] = torch.full_like(tensors["log_prob"], junk)
    loss, gradient, metrics = evaluate(config, tensors)
    assert loss == 0
    assert gradient.abs().max() == 0
    assert metrics.keys() == full.keys()
    assert not any(metrics.values())


@pytest.mark.parametrize("junk", [-math.inf, math.nan])
def test_padding_may_hold_anything(junk):
    tensors = batch(7)
    config = actor_config(BandPolicyLossConfig(), clip_ratio_c=10.0)
    clean = evaluate(config, tensors)
    for name in ("log_prob", "old_log_prob", "advantages", "rollout_is_weights"):
        tensors[name] = tensors[name].masked_fill(~tensors["response_mask"], junk)
    torch.testing.assert_close(evaluate(config, tensors), clean)


def test_without_the_config_class_the_rule_is_the_default():
    tensors = batch(4)
    plain = evaluate(actor_config(PolicyLossConfig(loss_mode="band")), tensors)
    ours = evaluate(actor_config(BandPolicyLossConfig()), tensors)
    assert torch.equal(plain[1], ours[1])


def test_a_radius_that_verl_cannot_know_is_refused():
    for radius in ("Linear(0.05, 0.01)", "ClipRateController(0.01, 0.05)"):
        with pytest.raises(ValueError, match=r"policy_loss\.method: .* does not pass to its loss"):
            BandPolicyLossConfig(method=f"Band(KL(), {radius})")


def whole_config(*overrides: str, target: str = "BandPolicyLossConfig"):
    """All settings of a run: verl's own with overrides."""
    from bandpo_lab.rehearsal.shrink import compose

    target = target if "." in target else f"bandpo.integrations.verl.{target}"
    ours = f"actor_rollout_ref.actor.policy_loss._target_={target}"
    return compose([ours, *overrides], None, "ppo_trainer")


def begin(config):
    """Check the settings of a run as the main of verl does, before Ray starts."""
    device.auto_set_device(config)
    validate_config(config, False, False)
