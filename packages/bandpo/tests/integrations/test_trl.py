import json
import math
from dataclasses import dataclass, replace
from zlib import crc32

import pytest
import torch

from helpers.frameworks import needs

needs("trl")

from accelerate import Accelerator
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer

from bandpo import DCPO, GSPO, KL, Band, Batch, FixedClip, Method, TotalVariation, Unclipped, policy_loss
from bandpo.audit.metrics import LOGGED, Audit
from bandpo.core import objectives
from bandpo.core.errors import BandWarning, InvalidValue
from bandpo.core.methods import CISPO, SAPO
from bandpo.core.objectives import ClippedWeight, SequenceMask, SigmoidGate
from bandpo.core.text import as_method
from bandpo.core.token_rules import BalancedBounds
from bandpo.integrations.trl import AuditedGRPOTrainer, AuditMixin, BandGRPOConfig, BandGRPOTrainer
from bandpo_lab.tasks import multiplication
from processes import run_on_processes
from rlvet.runs.configs import TRL_CLIPS
from rlvet.runs.logs import read_log
from rlvet.runs.quantities import named_rows

SETTINGS = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "per_device_train_batch_size": 8,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "num_generations": 4,
    "max_completion_length": 12,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "constant",
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "max_steps": 3,
}


LOG = {"logging_strategy": "steps", "logging_steps": 2, "max_steps": 4, "gradient_accumulation_steps": 2}


def varied_reward(completions, **_):
    """Return rewards that differ within every group, so that no advantage is 0."""
    return [crc32(text.encode()) % 97 / 97 for text in completions]


def half(prompts, trainer):
    """Return completions, as a ``rollout_func`` does, in which every token has the probability ½."""
    tokenizer = trainer.processing_class
    ids = [tokenizer.convert_tokens_to_ids(list(f"|{k % 7}{k % 5}")) for k in range(len(prompts))]
    return {
        "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": ids,
        "logprobs": [[math.log(0.5)] * 3 for _ in prompts],
    }


def make(trainer, config, tmp_path, rollout_func=None, **settings):
    path = multiplication.base_model_path()
    return trainer(
        model=str(path),
        reward_funcs=varied_reward,
        args=config(str(tmp_path), **SETTINGS | settings),
        train_dataset=multiplication.dataset("train", 64),
        processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
        **({} if rollout_func is None else {"rollout_func": rollout_func}),
    )


def off_policy_batch(trainer, monkeypatch):
    """Return a micro-batch of the first generation after some updates, as the trainer passes it to its loss."""
    seen, original = [], trainer.compute_loss

    def compute_loss(model, inputs, *arguments, **named):
        seen.append(inputs)
        return original(model, inputs, *arguments, **named)

    monkeypatch.setattr(trainer, "compute_loss", compute_loss)
    trainer.train()
    monkeypatch.undo()
    inputs = seen[-1]
    assert (inputs["advantages"] != 0).all()
    inputs["completion_mask"][::2, -1] = 0  # some padding, whatever the lengths drawn
    return inputs


def logps(trainer, inputs):
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    length = inputs["completion_ids"].size(1)
    return trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, length)[0]


def dense_reference(trainer, inputs, rule, aggregation):
    """Compute the loss by the formula: solved bounds, clamp, min, masked mean."""
    logp, logp_old, mask = logps(trainer, inputs), inputs["old_per_token_logps"], inputs["completion_mask"]
    ratio, bounds = (logp - logp_old).exp(), rule.bounds(logp_old.masked_fill(mask == 0, 0.0))
    advantages = inputs["advantages"][:, None]
    loss = -torch.minimum(ratio * advantages, ratio.clamp(bounds.lower, bounds.upper) * advantages) * mask
    if aggregation == "grpo":
        return (loss.sum(1) / mask.sum(1)).mean()
    return loss.sum() / mask.sum()


# The radius is tiny, so that something is clipped.
@pytest.mark.filterwarnings("ignore::bandpo.core.errors.BandWarning")
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo"])
@pytest.mark.parametrize("rule", [Band(KL(), 1e-3), Band(KL(), 0.05)], ids=repr)
def test_equals_a_dense_reference(loss_type, rule, tmp_path, monkeypatch):
    trainer = make(BandGRPOTrainer, BandGRPOConfig, tmp_path, loss_type=loss_type, method=rule)
    inputs = off_policy_batch(trainer, monkeypatch)
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(trainer.model, inputs)
    gradient = torch.autograd.grad(loss, trainer.model.lm_head.weight)[0]
    dense = dense_reference(trainer, inputs, rule, loss_type)
    dense_gradient = torch.autograd.grad(dense, trainer.model.lm_head.weight)[0]
    torch.testing.assert_close(gradient, dense_gradient, rtol=1e-4, atol=1e-6)
    tensors = (inputs[name] for name in ("old_per_token_logps", "advantages", "completion_mask"))
    ours = policy_loss(logps(trainer, inputs), *tensors, method=rule, aggregation=loss_type)
    expected = torch.autograd.grad(ours.loss, trainer.model.lm_head.weight)[0]
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    if rule.radius == 1e-3:
        assert ours.metrics["clip_high"] + ours.metrics["clip_low"] > 0.05


STOCK = [
    *(({"loss_type": loss_type}, "FixedClip(0.05, 0.1)") for loss_type in (*TRL_CLIPS, "cispo")),
    ({"loss_type": "grpo", "delta": 1.03}, "FixedClip(0.05, 0.1)"),
    ({"loss_type": "grpo", "delta": 1.03, "importance_sampling_level": "sequence"}, "FixedClip(0.05, 0.1)"),
    ({"loss_type": "vespo"}, "VESPO()"),
]


@pytest.mark.filterwarnings("ignore::bandpo.core.errors.BandWarning")  # old log-probabilities are made up
@pytest.mark.parametrize(("settings", "method"), STOCK, ids=str)
def test_a_method_that_stock_trl_has_is_its_loss(settings, method, tmp_path, monkeypatch):
    """Value, gradient and TRL's own metrics, under importance weights."""
    bounds = {} if method == "VESPO()" else {"epsilon": 0.05, "epsilon_high": 0.1}
    stock = make(GRPOTrainer, GRPOConfig, tmp_path, **settings | bounds)
    if stock.loss_type == "cispo":
        stock.epsilon_high = 1.1  # CISPO's epsilon_high is the bound itself
    named = {"method": method} | ({"loss_type": "dapo"} if method == "VESPO()" else {})
    ours = make(BandGRPOTrainer, BandGRPOConfig, tmp_path, **settings | named)
    inputs = off_policy_batch(stock, monkeypatch)
    now, old = logps(stock, inputs).detach(), inputs["old_per_token_logps"]
    inputs["old_per_token_logps"] = now.lerp(old, 0.3)  # else VESPO's weights are all 0
    drawn = torch.rand(old.shape, generator=torch.Generator().manual_seed(0))
    inputs["importance_sampling_ratio"] = torch.where(inputs["completion_mask"] > 0, 0.8 + 0.5 * drawn, 1.0)
    ours.model.load_state_dict(stock.model.state_dict())
    found = []
    for trainer in (stock, ours):
        trainer.current_gradient_accumulation_steps, trainer.use_vllm = 1, True
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, inputs)
        found.append((loss, torch.autograd.grad(loss, trainer.model.lm_head.weight)[0]))
    if method != "VESPO()":  # TRL reports φ·A·log π, whose value means nothing
        torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-7)
    assert found[0][1].abs().max() > 1e-4
    shown, theirs = ours._metrics["train"], stock._metrics["train"]
    clip_metrics = [key for key in theirs if "clip_ratio" in key and "completions" not in key]
    assert clip_metrics or method == "VESPO()"
    for key in clip_metrics:
        assert shown[key][-1] == pytest.approx(theirs[key][-1], abs=1e-6)


VARIATIONS = [
    {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    {"beta": 0.05, "use_bias_correction_kl": True},
    {"delta": 1.5},
    {"mask_truncated_completions": True, "off_policy_mask_threshold": 0.01},
    {"top_entropy_quantile": 0.5, "entropy_coef": 0.01},
    {"bf16": True},
]


EVERY_NIGHT = [
    pytest.param("grpo", variation, "sequence", 1, marks=pytest.mark.exhaustive) for variation in VARIATIONS
]
"""At the level of sequences the variations' own code is that of tokens."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_type", "variation", "level", "audit_steps"),
    [(name, {}, level, 1) for name in (*TRL_CLIPS, "cispo") for level in ("token", "sequence")]
    + [("grpo", variation, "token", 1) for variation in VARIATIONS]
    + [("grpo", {}, level, 0) for level in ("token", "sequence")]
    + EVERY_NIGHT,
    ids=str,
)
def test_a_fixed_clip_trains_bit_for_bit_as_stock(loss_type, variation, level, audit_steps, tmp_path):
    """Weights, losses and TRL's own metrics."""
    settings = LOG | {"loss_type": loss_type, "importance_sampling_level": level, "logging_steps": 1}
    settings |= {"gradient_accumulation_steps": 1, "max_steps": 6} | variation
    bound = {"epsilon": 0.02, "epsilon_high": 1.03 if loss_type == "cispo" else 0.03}
    stock = make(GRPOTrainer, GRPOConfig, tmp_path / "stock", **settings | bound)
    stock.train()
    settings |= {"method": FixedClip(0.02, 0.03), "audit_steps": audit_steps}
    ours = make(BandGRPOTrainer, BandGRPOConfig, tmp_path / "ours", **settings)
    ours.train()
    for mine, theirs in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    clipped = 0.0
    for mine, theirs in zip(ours.state.log_history, stock.state.log_history, strict=True):
        times = ("step_time", "train_runtime", "train_samples_per", "train_steps_per", "profiling")
        for name in theirs:
            if name.startswith(times):
                continue
            # The tensors of an interval round 0.02 and 1.03 to float32, which a mean of clipped ratios shows.
            assert mine[name] == pytest.approx(theirs[name], rel=1e-6, abs=1e-9, nan_ok=True), name
        clipped += theirs.get("clip_ratio/region_mean", 0.0) + theirs.get("cispo_clip_ratio", 0.0)
    # CISPO's count is of ratios above the bound with A > 0; of these few sequences there is none.
    assert clipped > 0 or (loss_type, level) == ("cispo", "sequence")


NATIVE = {
    "PPO(0.02, 0.03)": {"loss_type": "dapo", "epsilon": 0.02, "epsilon_high": 0.03},
    "GRPO(0.02, 0.03)": {"loss_type": "grpo", "epsilon": 0.02, "epsilon_high": 0.03},
    "GSPO(0.002, 0.003)": {
        "loss_type": "grpo",
        "epsilon": 0.002,
        "epsilon_high": 0.003,
        "importance_sampling_level": "sequence",
    },
    "CISPO(1.0, 0.03)": {"loss_type": "cispo", "epsilon_high": 1.03},
    "SAPO(2.0, 2.5)": {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 2.5},
    "VESPO(1.0, 2.0, 2.0, 1.5)": {
        "loss_type": "vespo",
        "vespo_k_pos": 1.0,
        "vespo_lambda_pos": 2.0,
        "vespo_k_neg": 2.0,
        "vespo_lambda_neg": 1.5,
    },
    "Method(FixedClip(0.02), RatioCap(1.03))": {"loss_type": "dapo", "epsilon": 0.02, "delta": 1.03},
}
"""What stock TRL is told, for each method that it has."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::bandpo.core.errors.BandWarning")
@pytest.mark.parametrize("method", NATIVE)
def test_a_method_that_trl_has_trains_bit_for_bit_as_stock(method, tmp_path):
    """Weights, and every figure that TRL logs; and its config makes the same config again."""
    settings = LOG | {"logging_steps": 1, "gradient_accumulation_steps": 1, "max_steps": 6}
    stock = make(GRPOTrainer, GRPOConfig, tmp_path / "stock", **settings | NATIVE[method])
    stock.train()
    ours = make(BandGRPOTrainer, BandGRPOConfig, tmp_path / "ours", **settings | {"method": method})
    assert ours.is_native
    ours.train()
    for mine, theirs in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    timed = ("runtime", "per_second", "step_time")
    for mine, theirs in zip(ours.state.log_history, stock.state.log_history, strict=True):
        figures = {name: x for name, x in theirs.items() if not any(word in name for word in timed)}
        assert {name: mine[name] for name in figures} == figures
    again = replace(ours.args, generation_batch_size=None)
    assert again.to_dict() | {"logging_dir": ""} == ours.args.to_dict() | {"logging_dir": ""}


def gradients_of(trainer, inputs, **settings):
    """Return the trainer's gradient, and that of `policy_loss` on the same tensors."""
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    before = inputs["advantages"].clone()
    weight = trainer.model.lm_head.weight
    theirs = torch.autograd.grad(trainer.compute_loss(trainer.model, inputs), weight)[0]
    assert torch.equal(inputs["advantages"], before)
    logp = logps(trainer, inputs)
    tensors = (inputs["old_per_token_logps"], inputs["advantages"], inputs["completion_mask"])
    settings = {"aggregation": trainer.loss_type, **settings}
    method = as_method(settings.pop("method", trainer.method))
    fields = {name: settings.pop(name) for name in ("logp_anchor", "weights", "layout") if name in settings}
    loss, metrics = method.loss(Batch.read(logp, *tensors, **fields), **settings)
    return theirs, torch.autograd.grad(loss, weight)[0], metrics


@pytest.fixture
def trained(_trained):
    """One trainer and one of its off-policy batches, for tests that set the trainer's rule themselves."""
    Accelerator(cpu=True)  # other tests build configs, and each of those resets accelerate's global state
    return _trained


@pytest.fixture(scope="module")
def _trained(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        trainer = make(BandGRPOTrainer, BandGRPOConfig, tmp_path_factory.mktemp("trl"), loss_type="grpo")
        return trainer, off_policy_batch(trainer, monkeypatch)


@dataclass(frozen=True)
class Pulled(objectives.Quadratic):
    """SPO's penalty, and (log r)²/20."""

    def bias(self, tokens):
        return -0.1 * tokens.log_ratio

    def regularizer(self, tokens):
        return 0.05 * tokens.log_ratio**2


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("objective", "clip"),
    [
        (objectives.Surrogate(), FixedClip(0.01, 0.02)),
        (objectives.Surrogate(), DCPO(1e-4, 1e-4)),
        (objectives.Surrogate(0.3), Band(KL(), 1e-3)),
        (objectives.DropOutside(1.05), Band(TotalVariation(), 0.01, math.inf)),
        (objectives.DropOutside(both_sides=True), FixedClip(0.9, 0.01)),
        (ClippedWeight(), FixedClip(0.02, 0.03)),
        (ClippedWeight(0.9), Band(KL(), 1e-3)),
        (objectives.KeepBound(0.5), FixedClip(0.02, 0.03)),
        (objectives.InverseRatio(), FixedClip(0.02, 0.03)),
        (objectives.Quadratic(), Band(KL(), 0.01)),
        (SigmoidGate(3.0, 4.0), Unclipped()),
        (objectives.GammaWeight(), Unclipped()),
        (objectives.SelfAnchored(), FixedClip(0.02, 0.03)),
        (objectives.DualClip(1.01), FixedClip(0.02, 0.03)),
        (SequenceMask(1e-3), FixedClip(0.02, 0.03)),
        (objectives.GeometricMean(), FixedClip(0.02, 0.03)),
        (
            objectives.Surrogate(),
            BalancedBounds(lower=0.98, upper=1.01, max_lower=0.99, max_upper=1.05, step=0.01),
        ),
        (Pulled(), FixedClip(0.02, 0.03)),
    ],
    ids=repr,
)
def test_every_objective_at_both_levels(level, objective, clip, trained):
    trainer, inputs = trained
    trainer.method, trainer.importance_sampling_level = Method(clip, objective, level), level
    theirs, ours, metrics = gradients_of(trainer, inputs)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-6 * max(1.0, ours.abs().max().item()))
    assert ours.abs().sum() > 0
    unclipped = gradients_of(trainer, inputs, method=Method(Unclipped(), level=level))[1]
    assert not torch.allclose(ours, unclipped, rtol=1e-2)
    if level == "token":  # TRL counts sequences, where there is one ratio for each
        logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
        pushed_out = isinstance(objective, (objectives.Surrogate, objectives.DropOutside))
        if pushed_out and not getattr(objective, "both_sides", False):
            assert logged["clip_ratio/high_mean"] == pytest.approx(metrics["clip_high"].item(), abs=1e-6)
            assert logged["clip_ratio/low_mean"] == pytest.approx(metrics["clip_low"].item(), abs=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("objective", [objectives.Quadratic(), objectives.Surrogate(-0.9)], ids=repr)
def test_the_off_policy_mask_reads_the_sign_of_the_advantages(objective, level, trained, monkeypatch):
    """Whatever the sign of the weights."""
    trainer, inputs = trained
    clip = FixedClip(1e-3)
    trainer.method, trainer.importance_sampling_level = Method(clip, objective, level), level
    monkeypatch.setattr(trainer, "off_policy_mask_threshold", 1e-4)
    masked = Method(clip, SequenceMask(1e-4, objective), level)
    theirs, ours, metrics = gradients_of(trainer, inputs, method=masked)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-6 * max(1.0, ours.abs().max().item()))
    assert metrics["clip_low"] > 0.1


@pytest.mark.parametrize("method", [SAPO(), Method(FixedClip(), objectives.Quadratic())], ids=repr)
def test_ratios_far_from_1_are_exact(method, trained):
    """TRL's own SAPO has another gradient here: in float32 its 1 − sigmoid(x) has no digits left."""
    trainer, inputs = trained
    trainer.method, trainer.importance_sampling_level = method, "token"
    old = inputs["old_per_token_logps"] - torch.linspace(0, 3, inputs["old_per_token_logps"].size(1))
    theirs, ours, _ = gradients_of(trainer, inputs | {"old_per_token_logps": old})
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-6 * max(1.0, ours.abs().max().item()))


def test_the_reported_loss_is_the_mean_slope(trained):
    trainer, inputs = trained
    trainer.importance_sampling_level = "token"
    mask = inputs["completion_mask"]
    tensors = [inputs[name] for name in ("old_per_token_logps", "advantages", "completion_mask")]
    for trainer.method in (Method(Unclipped(), SigmoidGate()), Method(FixedClip(0.02), Pulled())):
        logp = logps(trainer, inputs).detach().requires_grad_()
        loss = policy_loss(logp, *tensors, method=trainer.method, aggregation="grpo").loss
        slope = torch.autograd.grad(loss, logp)[0]
        trainer.current_gradient_accumulation_steps = 1
        expected = (slope * mask).sum()
        torch.testing.assert_close(trainer.compute_loss(trainer.model, inputs), expected)


@pytest.mark.parametrize("objective", [objectives.Surrogate(), objectives.DropOutside()], ids=repr)
def test_the_rollout_engine_as_anchor(objective, trained):
    """Check log-probabilities of vLLM, NaN where it has none, in the form in which TRL passes them on."""
    trainer, inputs = trained
    trainer.method, trainer.importance_sampling_level = Method(FixedClip(0.02), objective), "token"
    old = inputs["old_per_token_logps"]
    sampled = (old + 0.3 * torch.randn(old.shape, generator=torch.Generator().manual_seed(0))).clamp(max=0)
    given = sampled.index_fill(1, torch.tensor([0]), math.nan)
    anchor = torch.where(given.isnan(), old, sampled)
    trainer.args.anchor = "rollout"
    settings = {"logp_anchor": anchor}
    theirs, ours, _ = gradients_of(trainer, inputs | {"sampling_per_token_logps": given}, **settings)
    trainer.args.anchor = "trainer"
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-6 * max(1.0, ours.abs().max().item()))
    assert not torch.allclose(theirs, gradients_of(trainer, inputs)[0], rtol=1e-2)
    # The ratio refers to it too, as in DPPO and IcePop.
    trainer.method = Method(FixedClip(0.2), objective, old_policy="rollout")
    theirs = gradients_of(trainer, inputs | {"sampling_per_token_logps": given})[0]
    ours = gradients_of(
        trainer, inputs | {"old_per_token_logps": anchor, "sampling_per_token_logps": anchor}
    )[1]
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-6 * max(1.0, ours.abs().max().item()))


def test_a_stock_trainer_is_audited_and_not_changed(tmp_path, monkeypatch):
    settings = LOG | {"steps_per_generation": 4, "epsilon": 0.02, "epsilon_high": 0.03}
    stock = make(GRPOTrainer, GRPOConfig, tmp_path / "stock", **settings)
    stock.train()
    audited = make(AuditedGRPOTrainer, GRPOConfig, tmp_path / "audited", **settings)
    seen, of = [], Audit.of

    def record(batch, run, tokens, **rest):
        seen.append((run, tokens))
        return of(batch, run, tokens, **rest)

    monkeypatch.setattr(Audit, "of", record)
    audited.train()
    for ours, theirs in zip(audited.model.parameters(), stock.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    rows = [row for row in named_rows(audited.state.log_history) if "audit/clip_high" in row]
    assert len(rows) == 2
    assert len(seen) == 8  # four steps of two micro-batches
    for row, calls in zip(rows, (seen[:4], seen[4:]), strict=True):
        assert row["audit/calls"] == 4
        # Each is a mean over all tokens of the four losses, and no mean of four means.
        for name in ("clip_high", "clip_low", "approx_kl"):
            metric, tokens = 0.0, 0.0
            for run, view in calls:
                assert run == Method(FixedClip(0.02, 0.03))
                n = view.mask.sum().item()
                old = view.logp_old
                loss = policy_loss(old + view.log_ratio, old, view.advantages, view.mask, method=run.clip)
                metric += n * loss.metrics[name].item()
                tokens += n
            assert row[f"audit/{name}"] == pytest.approx(metric / tokens, rel=1e-4, abs=1e-9)
        assert row["audit/entropy"] == pytest.approx(row["entropy"], rel=0.05)
    assert rows[0]["audit/on_policy"] == 0.5  # the two micro-batches before the first update
    assert any(row["audit/clip_high"] + row["audit/clip_low"] > 0 for row in rows)


TWO_PROCESSES = """
import json, sys
from pathlib import Path
from trl import GRPOConfig
from test_trl import LOG, make
from bandpo.audit.metrics import Audit
from rlvet.runs.quantities import named_rows
from bandpo.integrations.trl import AuditedGRPOTrainer

seen, of = [], Audit.of
Audit.of = lambda *views, **rest: seen.append(of(*views, **rest)) or seen[-1]
out = Path(sys.argv[1])
trainer = make(AuditedGRPOTrainer, GRPOConfig, out, **LOG | {"steps_per_generation": 4, "epsilon": 0.02})
trainer.train()
own = [audit.metrics() for audit in seen[:4]]
logged = next(row for row in named_rows(trainer.state.log_history) if "audit/tokens" in row)
rank = trainer.accelerator.process_index
(out / f"{rank}.json").write_text(json.dumps({"own": own, "logged": logged}))
"""


@pytest.mark.slow
def test_metrics_are_over_all_tokens_of_two_processes(tmp_path):
    run_on_processes(TWO_PROCESSES, tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    calls = [metrics for rank in ranks for metrics in rank["own"]]
    tokens = [metrics["tokens"] for metrics in calls]
    assert len(set(tokens)) > 1  # a mean of means would be another number
    for rank in ranks:
        assert rank["logged"]["audit/calls"] == 8
        assert rank["logged"]["audit/tokens"] == sum(tokens)
        for name in ("clip_low", "entropy", "approx_kl"):
            mean = sum(m[name] * n for m, n in zip(calls, tokens, strict=True)) / sum(tokens)
            assert rank["logged"][f"audit/{name}"] == pytest.approx(mean, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({}, Method(FixedClip(0.2, 0.2))),
        ({"epsilon": 0.1, "epsilon_high": 0.3}, Method(FixedClip(0.1, 0.3))),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, Method(Unclipped(), ClippedWeight(5.0))),
        ({"loss_type": "cispo", "epsilon_high": 0.2}, Method(Unclipped(), ClippedWeight(0.2))),
        ({"loss_type": "sapo"}, Method(Unclipped(), SigmoidGate(1.0, 1.05))),
        ({"loss_type": "vespo"}, Method(Unclipped(), objectives.GammaWeight(2.0, 3.0, 3.0, 2.0))),
        ({"importance_sampling_level": "sequence"}, Method(FixedClip(0.2, 0.2), level="sequence")),
        ({"delta": 3.0}, Method(FixedClip(0.2, 0.2), objectives.RatioCap(3.0))),
    ],
    ids=str,
)
def test_the_method_of_a_stock_trainer(settings, method, trained, monkeypatch):
    trainer, _ = trained
    stock = {"epsilon": 0.2, "epsilon_high": None, "importance_sampling_level": "token"} | settings
    epsilon, epsilon_high = stock.pop("epsilon"), stock.pop("epsilon_high")
    stock |= {"epsilon_low": epsilon, "epsilon_high": epsilon if epsilon_high is None else epsilon_high}
    for name, value in stock.items():
        monkeypatch.setattr(trainer.args if name == "delta" else trainer, name, value)
    assert AuditedGRPOTrainer.loss_method(trainer) == method


def test_warns_when_the_old_policy_is_of_other_tokens(tmp_path, monkeypatch):
    trainer = make(AuditedGRPOTrainer, GRPOConfig, tmp_path, **LOG | {"steps_per_generation": 4})
    original = type(trainer)._check_and_record

    def test_and_record(self, inputs, logp, entropy):
        inputs["old_per_token_logps"] = inputs["old_per_token_logps"].roll(1, 1)
        original(self, inputs, logp, entropy)

    monkeypatch.setattr(type(trainer), "_check_and_record", test_and_record)
    with pytest.warns(BandWarning, match=r"shift: logp_old is shifted by \+1 tokens against logp"):
        trainer.train()


def test_wide_bounds_are_no_clip_and_padding_may_hold_anything(tmp_path, monkeypatch):
    trainer = make(BandGRPOTrainer, BandGRPOConfig, tmp_path, loss_type="bnpo", method=Unclipped())
    inputs = off_policy_batch(trainer, monkeypatch)
    trainer.current_gradient_accumulation_steps = 1
    mask, ratio = inputs["completion_mask"], (logps(trainer, inputs) - inputs["old_per_token_logps"]).exp()
    unclipped = -(ratio * inputs["advantages"][:, None] * mask).sum() / mask.sum()
    head = trainer.model.lm_head.weight
    gradients = [
        torch.autograd.grad(loss, head)[0]
        for loss in (trainer.compute_loss(trainer.model, inputs), unclipped)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)

    trainer.method = Method(Band())
    clean = trainer.compute_loss(trainer.model, inputs)
    assert (mask == 0).any()
    # No log-probability, so it would be refused. (TRL multiplies the padding's ratio by 0: a NaN is TRL's to prevent.)
    dirty = inputs | {"old_per_token_logps": inputs["old_per_token_logps"].masked_fill(mask == 0, 3.0)}
    torch.testing.assert_close(trainer.compute_loss(trainer.model, dirty), clean)
    assert (float(trainer.epsilon_low), float(trainer.epsilon_high)) == (0.2, 0.2)


ONCE = {"num_iterations": 1, "steps_per_generation": 1}


@pytest.mark.parametrize(
    ("sizes", "enough"),
    [
        ({"steps_per_generation": 1, "num_iterations": 1}, 2),
        ({"steps_per_generation": 4, "num_iterations": 1, "gradient_accumulation_steps": 4}, 2),
        # Two passes over a batch are one update, and so are four.
        ({"steps_per_generation": 1, "num_iterations": 2, "gradient_accumulation_steps": 4}, 3),
        ({"steps_per_generation": 2, "num_iterations": 1, "gradient_accumulation_steps": 4}, 3),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "method", [None, "BandPO()", "FixedClip(0.2)", "DAPO()", "SAPO()", "CISPO()", "GSPO()"]
)
def test_a_run_in_which_every_ratio_is_one_is_refused(sizes, enough, method, tmp_path):
    settings = SETTINGS | {"gradient_accumulation_steps": 1} | sizes | {"method": method}
    with pytest.raises(
        InvalidValue, match=rf"every ratio is 1 and .* never acts: set num_iterations={enough}, or"
    ):
        BandGRPOConfig(str(tmp_path), **settings)
    assert BandGRPOConfig(str(tmp_path), **settings, accept_idle_clip=True).method
    # Both remedies.
    BandGRPOConfig(str(tmp_path), **settings | {"num_iterations": enough})
    accumulated = settings["gradient_accumulation_steps"]
    BandGRPOConfig(str(tmp_path), **settings | {"num_iterations": 1, "steps_per_generation": 2 * accumulated})


@pytest.mark.parametrize(
    "settings",
    [
        *({"method": method} for method in ("Unclipped()", "GPG()", "ClipCov()", "DPPO()", "IcePop()")),
        {"anchor": "rollout"},
        # Four losses of a batch, three of them in the first update.
        {"gradient_accumulation_steps": 3, "num_iterations": 2, "steps_per_generation": 2},
    ],
    ids=str,
)
def test_a_run_in_which_the_method_acts_or_promises_nothing_is_accepted(settings, tmp_path):
    assert BandGRPOConfig(str(tmp_path), **SETTINGS | ONCE | settings).check_ratio_moves() == ""


def test_an_accepted_idle_clip_is_announced_and_checked_again(tmp_path, capsys):
    make(BandGRPOTrainer, BandGRPOConfig, tmp_path, **ONCE, method="DAPO()", accept_idle_clip=True)
    assert "bandpo: DAPO(low=0.2, high=0.28) never acts, as every ratio is 1" in capsys.readouterr().err

    def changed(path, **settings):
        config = BandGRPOConfig(path, **settings)
        config.num_iterations = config.steps_per_generation = 1
        return config

    with pytest.raises(InvalidValue, match="every ratio is 1"):
        make(BandGRPOTrainer, changed, tmp_path)
    # TRL's own losses are audited as they are.
    make(AuditedGRPOTrainer, GRPOConfig, tmp_path, **ONCE)


@pytest.mark.parametrize(
    ("settings", "loss_type"),
    [
        ({"method": "GRPO()"}, "grpo"),
        ({"method": "GMPO()"}, "grpo"),
        ({"method": "SPO()"}, "dapo"),
        ({"method": "Band()"}, "dapo"),
        ({"method": "Method(aggregation='seq-mean-token-sum')"}, "luspo"),
        ({"method": "Method(aggregation='seq-mean-token-sum-norm')"}, "dr_grpo"),
        ({"method": "SPO()", "loss_type": "bnpo"}, "bnpo"),
    ],
    ids=str,
)
def test_the_average_is_the_methods(settings, loss_type, tmp_path):
    config = BandGRPOConfig(str(tmp_path), **SETTINGS | settings)
    assert config.loss_type == loss_type
    assert not config.overrides_aggregation
    assert config.to_dict()["epsilon"] == (0.2 if settings["method"] == "GRPO()" else None)


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_what_differs_from_the_method_is_said_or_refused(tmp_path, capsys):
    with pytest.raises(
        ValueError,
        match=r"method='DPPO.* needs use_vllm, or a rollout_func .* write method=.Method\(clip=Band",
    ):
        make(BandGRPOTrainer, BandGRPOConfig, tmp_path, method="DPPO()")
    make(BandGRPOTrainer, BandGRPOConfig, tmp_path, half, method="DPPO()", loss_type="grpo")
    said = capsys.readouterr().err
    assert "bandpo: loss_type='grpo' replaces the loss aggregation of DPPO(" in said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "sapo"}, r"loss_type='sapo' is an objective of its own; .* method='SAPO\(\)'"),
        ({"method": "Method(Band(), DropOutsid())"}, "method: .*did you mean DropOutside"),
        ({"method": "GSPO()", "delta": 3.0}, "GSPO.* and delta=3.0 both define a clip"),
        ({"delta": 0.9}, r"delta=0.9 is no bound above 1"),
        ({"method": "SAPO()", "importance_sampling_level": "sequence"}, "is a method of tokens"),
        ({"method": "GRPO()", "loss_type": "cispo"}, "GRPO.* and loss_type='cispo' both define a clip"),
        ({"method": "SAP()"}, "did you mean SAPO"),
        ({"anchor": "sampler"}, "anchor must be one of trainer, rollout, got 'sampler'"),
        ({"certify": "yes"}, "certify must be one of stop, warn, off, got 'yes'"),
        ({"audit_steps": -1}, "audit_steps must be at least 0"),
        ({"epsilon": 0.2}, r"epsilon=0.2 would have no effect beside method="),
        ({"epsilon_high": 0.28}, r"epsilon_high=0.28 would have no effect"),
        (
            {"method": "BAPO()", "gradient_accumulation_steps": 2},
            "gradient_accumulation_steps=2: BAPO\\(.*all tokens of an update",
        ),
        ({"method": "Method(aggregation='sum')"}, "TRL does not support the loss aggregation .sum."),
        ({"method": "Bnd()"}, "method: .*did you mean Band"),
    ],
)
def test_refuses_what_cannot_work(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        BandGRPOConfig(str(tmp_path), **SETTINGS | settings)


@pytest.mark.parametrize("loss_type", ["grpo", "cispo"])
def test_a_trainer_refuses_the_config_of_another(loss_type, tmp_path):
    """A stock one would clip at its own default, whatever rule the config names."""
    trainer = make(GRPOTrainer, BandGRPOConfig, tmp_path, loss_type=loss_type)
    with pytest.raises(TypeError, match="which only BandGRPOTrainer supports"):
        trainer.train()
    with pytest.raises(TypeError, match="args must be a BandGRPOConfig, got GRPOConfig"):
        BandGRPOTrainer("model", varied_reward, GRPOConfig(str(tmp_path), **SETTINGS))
    with pytest.raises(AttributeError, match=r"BandGRPOConfig has no .* not for another trainer"):
        make(RLOOTrainer, BandGRPOConfig, tmp_path)
    with pytest.raises(TypeError, match="Mine derives from RLOOTrainer, which is no GRPOTrainer"):
        type("Mine", (AuditMixin, RLOOTrainer), {})


def test_arguments_by_position(tmp_path):
    path = multiplication.base_model_path()
    config = BandGRPOConfig(str(tmp_path), method="SAPO()", **SETTINGS)
    data = multiplication.dataset("train", 64)
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    trainer = BandGRPOTrainer(str(path), varied_reward, config, data, None, tokenizer)
    assert trainer.train_dataset is data
    assert trainer.method == Method(Unclipped(), SigmoidGate(1.0, 1.05), aggregation="seq-mean-token-mean")


@pytest.mark.filterwarnings("ignore:`use_liger_kernel=True` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:bandpo was not tested with the loss of trl")
def test_a_loss_that_asks_for_no_log_probabilities_is_refused(tmp_path, monkeypatch):
    """As Liger's fused loss of TRL 1.9, or a trainer whose methods Unsloth has replaced."""
    trainer = make(BandGRPOTrainer, BandGRPOConfig, tmp_path)
    nothing = (None, None, None)
    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", lambda *_, **__: nothing)
    with pytest.raises(RuntimeError, match="gets no log-probabilities"):
        trainer.train()
    monkeypatch.undo()
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda *_: torch.zeros((), requires_grad=True))
    with pytest.raises(RuntimeError, match="computed without asking for log-probabilities"):
        make(BandGRPOTrainer, BandGRPOConfig, tmp_path, certify="off").train()
    monkeypatch.undo()
    monkeypatch.setattr(GRPOTrainer, "compute_liger_loss", None, raising=False)
    with pytest.raises(ValueError, match="use_liger_kernel=True computes the loss in a fused kernel"):
        make(AuditedGRPOTrainer, FusedConfig, tmp_path)


def test_unsloth_imported_first_is_said_at_construction(tmp_path):
    """It puts a class of this name in the place of TRL's, so that ours derives from it."""

    class UnslothGRPOTrainer(GRPOTrainer):
        pass

    class Audited(AuditMixin, UnslothGRPOTrainer):
        pass

    with pytest.raises(ValueError, match=r"import bandpo\.integrations\.trl before unsloth"):
        make(Audited, GRPOConfig, tmp_path)


class FusedConfig(GRPOConfig):
    """Of a TRL whose flag means the loss; here it would have transformers look for the package."""

    def __post_init__(self):
        super().__post_init__()
        self.use_liger_kernel = True


def test_a_method_by_name(tmp_path):
    config = BandGRPOConfig(str(tmp_path), method="GSPO(3e-4, 4e-4)", **SETTINGS)
    assert (config.method, config.importance_sampling_level) == ("GSPO(low=0.0003, high=0.0004)", "sequence")
    assert config.effective_method == GSPO()
    sapo = BandGRPOConfig(str(tmp_path), method=SAPO(1.0, 2.0), **SETTINGS)
    assert sapo.method == "SAPO(positive=1.0, negative=2.0)"
    trainer = make(BandGRPOTrainer, BandGRPOConfig, tmp_path, method="CISPO()", **LOG)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "audit/clip_high" in row]
    assert {row["audit/clip_high"] + row["audit/clip_low"] for row in rows} == {0.0}
    assert CISPO().clip == trainer.method.clip


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.filterwarnings("ignore::bandpo.core.errors.BandWarning")
def test_a_rollout_function_may_give_the_anchor(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="anchor='rollout' needs use_vllm, or a rollout_func"):
        make(BandGRPOTrainer, BandGRPOConfig, tmp_path, anchor="rollout")
    trainer = make(BandGRPOTrainer, BandGRPOConfig, tmp_path, half, anchor="rollout", **LOG)
    seen, weigh = [], BandGRPOTrainer._replace_advantages
    monkeypatch.setattr(
        BandGRPOTrainer, "_replace_advantages", lambda *given: seen.append(given[3]) or weigh(*given)
    )
    trainer.train()
    counted = seen[-1].mask != 0
    anchor, old = (logp[counted].exp() for logp in (seen[-1].logp_anchor, seen[-1].logp_old))
    torch.testing.assert_close(anchor, torch.full_like(anchor, 0.5))
    assert not torch.allclose(old, anchor)


def test_the_rule_is_text_in_the_config(tmp_path):
    config = BandGRPOConfig(str(tmp_path), method=Band(KL(), 0.1), **SETTINGS)
    assert config.method == "Band(divergence=KL(), radius=0.1, max_ratio=10.0)"
    assert config.to_dict()["method"] == config.method
    assert config.updates_per_batch == 4


def test_clip_is_no_setting(tmp_path):
    with pytest.raises(TypeError, match="unexpected keyword argument 'clip'"):
        BandGRPOConfig(str(tmp_path), clip="Band()", **SETTINGS)


@pytest.mark.parametrize(("audit_steps", "audited"), [(0, []), (1, [1, 2, 3, 4]), (2, [1, 3])])
def test_steps_between_audits(audit_steps, audited, tmp_path):
    settings = {"logging_strategy": "steps", "logging_steps": 1, "max_steps": 4, "audit_steps": audit_steps}
    trainer = make(BandGRPOTrainer, BandGRPOConfig, tmp_path, **settings)
    trainer.train()
    assert [row["step"] for row in trainer.state.log_history if "audit/clip_high" in row] == audited


@pytest.mark.parametrize("detail", [False, True])
def test_the_console_and_trackers_get_few_metrics_and_the_history_all(detail, tmp_path):
    shown = []

    class Tracker(TrainerCallback):
        def on_log(self, args, state, control, logs, **_):
            shown.append(dict(logs))

    trainer = make(BandGRPOTrainer, BandGRPOConfig, tmp_path, **LOG | {"audit_detail": detail})
    trainer.add_callback(Tracker())
    trainer.train()
    trainer.state.save_to_json(tmp_path / "trainer_state.json")
    kept = [row for row in read_log(tmp_path).rows if "audit/tokens" in row]
    assert len(kept) == 2
    for row, sent in zip(kept, shown, strict=False):
        audit = {name for name in row if name.startswith("audit/")}
        few = {name for name in sent if name.startswith("audit/")}
        assert {"audit/ratio_mean", "audit/if/DCPO/clip_high"} <= audit
        assert few == (audit if detail else {f"audit/{name}" for name in LOGGED} & audit)
        assert {name: row[name] for name in few} == {name: sent[name] for name in few}
