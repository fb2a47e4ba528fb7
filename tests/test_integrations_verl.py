"""The loss that stock verl calls: against verl's own losses where they coincide, and against `bandpo.policy_loss`."""

import math
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

import bandpo

pytest.importorskip("verl", reason="needs the extra bandpo[verl]")

from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig, PolicyLossConfig

from bandpo.integrations.verl import BandPolicyLossConfig

AGGREGATIONS = [
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]


def actor_config(policy_loss: PolicyLossConfig, **settings) -> ActorConfig:
    return ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy_loss, **settings
    )


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
    ranges = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5, "global_batch_info": info}
    theirs = evaluate(actor_config(PolicyLossConfig(), **ranges), tensors, mode)
    ours = evaluate(actor_config(BandPolicyLossConfig(clip="FixedClip(0.2, 0.28)"), **ranges), tensors, mode)
    torch.testing.assert_close(ours[0], theirs[0], check_dtype=False)
    torch.testing.assert_close(ours[1], theirs[1], check_dtype=False)
    assert theirs[2]["actor/pg_clipfrac"] > 0.1
    assert theirs[2]["actor/pg_clipfrac_lower"] > 0.02
    assert {k: ours[2][k] for k in theirs[2]} == pytest.approx(theirs[2], abs=1e-6)


@pytest.mark.parametrize(
    ("rule", "mode"), [("Band(TotalVariation(), 0.1, inf)", "dppo_tv"), ("Band(KL(), 0.05, inf)", "dppo_kl")]
)
def test_band_has_the_gradient_of_dppo(rule, mode):
    """Same feasible set, so the same gradient token by token when anchor, cap and truncation are equal."""
    tensors, radius = batch(1), bandpo.parse_rule(rule).radius
    theirs = evaluate(
        actor_config(
            PolicyLossConfig(loss_mode=mode),
            **dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high"), radius),
            clip_ratio_c=1e6,
        ),
        tensors,
    )
    ours = evaluate(actor_config(BandPolicyLossConfig(clip=rule), clip_ratio_c=math.inf), tensors)
    torch.testing.assert_close(ours[1], theirs[1], check_dtype=False)
    assert 0.05 < (theirs[1] == 0)[tensors["response_mask"]].double().mean() < 0.9


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize(
    ("theirs", "low", "high", "ours"),
    [
        ("dppo_kl", 0.05, 0.05, {"clip": "Band(KL(), 0.05, inf)", "objective": "Masked(3)"}),
        ("dppo_tv", 0.15, 0.15, {"clip": "Band(TotalVariation(), 0.15, inf)", "objective": "Masked(3)"}),
        ("cispo", 0.2, 0.3, {"clip": "FixedClip(0.2, 0.3)", "objective": "ClippedWeight"}),
        ("gspo", 0.01, 0.02, {"clip": "FixedClip(0.01, 0.02)", "level": "sequence"}),
    ],
)
def test_the_rivals_have_the_gradients_of_verls_own(theirs, low, high, ours, mode):
    tensors = batch(5, spread=1.2)
    ranges = {"clip_ratio_low": low, "clip_ratio_high": high}
    expected = evaluate(
        actor_config(PolicyLossConfig(loss_mode=theirs), **ranges, clip_ratio_c=3.0), tensors, mode
    )
    found = evaluate(actor_config(BandPolicyLossConfig(**ours), clip_ratio_c=math.inf), tensors, mode)
    torch.testing.assert_close(found[1], expected[1], check_dtype=False)
    blocked = (expected[1] == 0)[tensors["response_mask"]].double().mean()
    assert blocked == 0 if theirs == "cispo" else 0.05 < blocked < 0.95


def test_metrics_are_the_cores():
    tensors = batch(2)
    _, _, metrics = evaluate(actor_config(BandPolicyLossConfig(), clip_ratio_c=10.0), tensors)
    core = bandpo.policy_loss(
        tensors["log_prob"],
        tensors["old_log_prob"],
        tensors["advantages"],
        tensors["response_mask"],
        clip=bandpo.Band(bandpo.KL(), 0.05),
        dual_clip=10.0,
    ).metrics
    assert metrics["actor/clip_high"] > 0
    for name, value in core.items():
        assert metrics[f"actor/{name}"] == pytest.approx(value.item()), name


def test_a_micro_batch_without_tokens_keeps_the_ranks_together():
    tensors = batch(3)
    config = actor_config(BandPolicyLossConfig(), clip_ratio_c=10.0)
    full = evaluate(config, tensors)[2]
    tensors["response_mask"] = torch.zeros_like(tensors["response_mask"])
    loss, gradient, metrics = evaluate(config, tensors)
    assert loss == 0
    assert gradient.abs().max() == 0
    assert metrics.keys() == full.keys()


def test_without_the_config_class_the_rule_is_the_default():
    tensors = batch(4)
    plain = evaluate(actor_config(PolicyLossConfig(loss_mode="band")), tensors)
    ours = evaluate(actor_config(BandPolicyLossConfig()), tensors)
    assert torch.equal(plain[1], ours[1])


@pytest.mark.parametrize("clip", ["Bamd(KL(), 0.05)", "Band(KL(), -1)", "0.2", "KL()"])
def test_a_bad_rule_is_refused_when_the_settings_are_built(clip):
    with pytest.raises(ValueError, match=r"policy_loss\.clip"):
        BandPolicyLossConfig(clip=clip)


def test_a_radius_that_verl_cannot_know_is_refused_and_one_by_surprisal_is_not():
    for radius in ("Linear(0.05, 0.01)", "ByEntropy(0.02, 0.1)", "HoldKL(0.002, 0.05)"):
        with pytest.raises(
            ValueError, match=r"policy_loss\.clip: .* which this framework does not tell its loss"
        ):
            BandPolicyLossConfig(clip=f"Band(KL(), {radius})")
    tensors = batch(4)
    _, ours, _ = evaluate(
        actor_config(BandPolicyLossConfig(clip="Band(KL(), BySurprisal(0.02, 0.1))"), clip_ratio_c=math.inf),
        tensors,
    )
    p = tensors["old_log_prob"].exp()
    tensor = bandpo.Band(bandpo.KL(), 0.02 * p + 0.1 * (1 - p))
    logp = tensors["log_prob"].clone().requires_grad_()
    rest = (tensors["advantages"], tensors["response_mask"])
    bandpo.policy_loss(
        logp, tensors["old_log_prob"], *rest, clip=tensor, weights=tensors["rollout_is_weights"]
    ).loss.backward()
    torch.testing.assert_close(ours, logp.grad)


@pytest.mark.parametrize(("name", "value"), [("objective", "Masked(0)"), ("level", "batch")])
def test_a_bad_objective_or_level_is_refused_too(name, value):
    with pytest.raises(ValueError, match=rf"policy_loss\.{name}: .*must be"):
        BandPolicyLossConfig(**{name: value})


def test_settings_are_immutable():
    config = BandPolicyLossConfig()
    with pytest.raises((AttributeError, TypeError)):
        config.clip = "FixedClip()"


def test_import_verl_registers_the_loss():
    """In a fresh process that never names bandpo, as in the driver and in Ray's workers."""
    try:
        version("bandpo")
    except PackageNotFoundError:
        pytest.skip("bandpo is on the path but not installed, so it has no entry points")
    script = "import verl; from verl.trainer.ppo.core_algos import get_policy_loss_fn as f; print(f('band').__module__)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split()[-1] == "bandpo.integrations.verl"
