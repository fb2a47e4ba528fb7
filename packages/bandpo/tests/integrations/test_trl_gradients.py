"""The gradient that TRL's loss gives each log-probability is `policy_loss`'s, for every method under every average."""

import os
from functools import partial

import pytest
import torch

from helpers.frameworks import needs

needs("trl")

from test_trl import make
from trl import GRPOTrainer

from bandpo import Batch, Rows
from bandpo.core.aggregation import aggregate
from bandpo.core.methods import METHODS
from bandpo.core.text import as_method
from bandpo.integrations.trl import BandGRPOConfig, BandGRPOTrainer
from bandpo.integrations.trl.config import AGGREGATIONS
from processes import run_on_processes
from rlvet.runs.configs import TRL_CLIPS

pytestmark = pytest.mark.filterwarnings(
    "ignore::bandpo.core.errors.BandWarning", "ignore:You are using 'rollout_func'"
)

ROWS, COLUMNS = 6, 9

VARIATIONS = {
    "plain": {},
    "KL term": {"beta": 0.05},
    "importance weights": {"weights": True},
    "tools": {"tools": True},
    "advantages of tokens": {"token_advantages": True},
}


BY_TOKEN = ("importance weights", "advantages of tokens")
"""Variations in which tokens of a sequence have factors of their own."""


def batch(seed, *, weights=False, tools=False, token_advantages=False):
    """Return inputs of TRL's loss in float64.

    Lengths differ, a row has no token, an advantage is 0, and ratios are near and far.
    """
    random = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*shape, generator=random, dtype=torch.float64)

    old = -4 * uniform(ROWS, COLUMNS) - 1e-3
    distance = (0.02, 0.5)[seed % 2]
    logp = old + distance * torch.randn(ROWS, COLUMNS, generator=random, dtype=torch.float64)
    logp = logp.clamp(max=-1e-4)
    lengths = torch.tensor([9, 7, 9, 1, 0, 5])
    mask = (torch.arange(COLUMNS) < lengths[:, None]).double()
    advantages = torch.tensor([1.2, -0.7, 0.0, -1.9, 0.4, 0.3], dtype=torch.float64)
    if token_advantages:
        advantages = advantages[:, None] + 0.1 * torch.randn(
            ROWS, COLUMNS, generator=random, dtype=torch.float64
        )
    inputs = {
        "prompt_ids": torch.zeros(ROWS, 2, dtype=torch.long),
        "prompt_mask": torch.ones(ROWS, 2, dtype=torch.long),
        "completion_ids": torch.zeros(ROWS, COLUMNS, dtype=torch.long),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "sampling_per_token_logps": old + 0.01 * uniform(ROWS, COLUMNS) - 0.02,
        "ref_per_token_logps": old - 0.1 * uniform(ROWS, COLUMNS),
        "importance_sampling_ratio": torch.where(mask > 0, 0.8 + 0.5 * uniform(ROWS, COLUMNS), 1.0)
        if weights
        else None,
        "num_items_in_batch": mask.sum(),
    }
    if tools:
        inputs["tool_mask"] = (uniform(ROWS, COLUMNS) > 0.3).double()
        inputs["num_items_in_batch"] = (mask * inputs["tool_mask"]).sum()
    inputs = {name: x for name, x in inputs.items() if x is not None}
    return logp, -logp.detach() + 0.2, inputs


def configure(trainer, config):
    """Put the method and the average of a config into a trainer."""
    trainer.method = config.effective_method
    trainer.is_native = config.native_settings is not None
    set_stock(trainer, config)


def set_stock(trainer, config):
    """Put the settings of TRL's loss into a trainer."""
    trainer.args = config
    trainer.loss_type = config.loss_type
    trainer.importance_sampling_level = config.importance_sampling_level
    trainer.epsilon_low = config.epsilon
    trainer.epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    trainer.beta = config.beta
    trainer.max_completion_length = config.max_completion_length
    trainer.current_gradient_accumulation_steps = 1


def gradient_in_trl(trainer, logp, entropy, inputs, monkeypatch):
    leaf = logp.clone().requires_grad_()
    monkeypatch.setattr(
        GRPOTrainer, "_get_per_token_logps_and_entropies", lambda *_, **__: (leaf, entropy, None)
    )
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = "importance_sampling_ratio" in inputs
    trainer.model.train()
    return torch.autograd.grad(trainer.compute_loss(trainer.model, inputs), leaf)[0]


def gradient_of_policy_loss(config, logp, entropy, inputs):
    leaf = logp.clone().requires_grad_()
    method = config.effective_method
    mask = inputs["completion_mask"] * inputs.get("tool_mask", 1.0)
    rollout = method.old_policy == "rollout"
    average = AGGREGATIONS.get(config.loss_type, config.loss_type)
    normalizer = config.max_completion_length if average == "dr_grpo" else None
    loss = (
        as_method(method)
        .loss(
            Batch.read(
                leaf,
                inputs["sampling_per_token_logps" if rollout else "old_per_token_logps"],
                inputs["advantages"],
                mask,
                entropy=entropy,
                weights=inputs.get("importance_sampling_ratio"),
                layout=Rows(),
            ),
            aggregation=average,
            normalizer=normalizer,
        )
        .loss
    )
    if config.beta:
        gap = inputs["ref_per_token_logps"] - leaf
        kl = gap.exp() - gap - 1
        loss = loss + config.beta * aggregate(kl, mask, average, normalizer=normalizer)
    return torch.autograd.grad(loss, leaf)[0]


# The losses are given ratios that are not 1, whatever the number of updates for each batch.
UNWATCHED = {"certify": "off", "watched": "off", "audit_steps": 0, "accept_idle_clip": True}


def make_trainer(tmp_path):
    """Return a trainer whose losses are computed from given log-probabilities."""
    return make(
        BandGRPOTrainer,
        BandGRPOConfig,
        tmp_path,
        lambda prompts, trainer: None,
        method="BandPO()",
        **UNWATCHED,
    )


@pytest.mark.parametrize("average", TRL_CLIPS)
@pytest.mark.parametrize("variation", VARIATIONS)
def test_gradients_are_those_of_policy_loss(variation, average, tmp_path, monkeypatch):
    """Of every method, on two batches.

    TRL's own losses are less exact: SAPO rounds its temperatures to float32. At the level of sequences they spread a
    factor of a token over its sequence, where `policy_loss` leaves it at the token; they are not compared there.
    """
    given = dict(VARIATIONS[variation])
    settings = {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "max_completion_length": COLUMNS,
        "steps_per_generation": 1,
        "loss_type": average,
        "beta": given.pop("beta", 0.0),
        "use_bias_correction_kl": False,
    }
    # A config resets the state that a trainer shares with the process.
    configs = {
        name: BandGRPOConfig(str(tmp_path), method=f"{name}()", **settings | UNWATCHED) for name in METHODS
    }
    trainer = make_trainer(tmp_path)
    differences = {}
    not_zero = dict.fromkeys(METHODS, False)
    for name, config in configs.items():
        native = config.native_settings is not None
        if native and config.effective_method.level == "sequence" and variation in BY_TOKEN:
            not_zero[name] = True
            continue
        configure(trainer, config)
        for seed in range(2):
            logp, entropy, inputs = batch(seed, **given)
            found = gradient_in_trl(trainer, logp, entropy, inputs, monkeypatch)
            expected = gradient_of_policy_loss(config, logp, entropy, inputs)
            largest = float(expected.abs().max())
            not_zero[name] |= largest > 0
            if not largest:
                assert not found.any()
                continue
            difference = float((found - expected).abs().max()) / largest
            if not difference <= (1e-7 if native else 1e-12):
                differences[name, seed] = difference
        # What is put in for one loss is taken back.
        expected_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
        assert (trainer.loss_type, trainer.args.delta) == (config.loss_type, config.delta)
        assert (trainer.epsilon_low, trainer.epsilon_high) == (config.epsilon, expected_high)
    assert not differences
    assert all(not_zero.values())


SCENARIOS = {
    "plain": {},
    "KL term": {"beta": 0.05, "use_bias_correction_kl": False},
    "KL term times the ratio": {"beta": 0.05, "use_bias_correction_kl": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "tools": {"tools": True},
    "tokens of high entropy": {"top_entropy_quantile": 0.4},
    "off-policy mask": {"off_policy_mask_threshold": 0.05},
    "off-policy mask from the sampler": {"off_policy_mask_threshold": 0.05, "weights": True},
    "off-policy mask below 0": {"off_policy_mask_threshold": -0.02},
    "importance weights": {"weights": True},
    "entropy bonus": {"entropy_coef": 0.02},
    "advantages of tokens": {"token_advantages": True},
    "delta": {"delta": 1.3},
    "everything": {
        "beta": 0.05,
        "tools": True,
        "top_entropy_quantile": 0.6,
        "entropy_coef": 0.02,
        "weights": True,
        "off_policy_mask_threshold": 0.1,
    },
}
OF_BATCH = ("tools", "weights", "token_advantages")
"""The entries of a scenario that are arguments of `batch`."""
NOT_COMPARED = ("policy_loss", "objective")
"""Metrics that differ: TRL's value of the loss, which leaves blocked tokens out, and bandpo's own."""


def set_scenario(trainer, config):
    """Put a config with the settings of a scenario into a trainer."""
    if isinstance(config, BandGRPOConfig):
        configure(trainer, config)
    else:
        set_stock(trainer, config)
    trainer.top_entropy_quantile = config.top_entropy_quantile
    trainer.off_policy_mask_threshold = config.off_policy_mask_threshold
    trainer.entropy_coef = config.entropy_coef
    trainer._entropy_bonus_enabled = bool(config.entropy_coef)
    trainer.current_gradient_accumulation_steps = config.gradient_accumulation_steps


def gradients_and_metrics(trainer, logp, entropy, inputs, monkeypatch):
    """Return the gradients of the log-probabilities and of the entropies, and the metrics of one loss."""
    logp = logp.clone().requires_grad_()
    entropy = entropy.clone().requires_grad_()
    monkeypatch.setattr(
        GRPOTrainer, "_get_per_token_logps_and_entropies", lambda *_, **__: (logp, entropy, None)
    )
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = "importance_sampling_ratio" in inputs
    trainer.model.train()
    trainer._metrics["train"].clear()
    loss = trainer.compute_loss(trainer.model, inputs) + 0 * (logp.sum() + entropy.sum())
    metrics = {name: values for name, values in trainer._metrics["train"].items() if name not in NOT_COMPARED}
    return torch.autograd.grad(loss, (logp, entropy)), metrics


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("average", [*TRL_CLIPS, "cispo"])
def test_a_fixed_clip_is_stock_bit_for_bit_through_the_advantages_too(average, level, tmp_path, monkeypatch):
    """As if TRL did not implement it, so that nothing depends on which methods TRL implements."""
    configs = {}
    for scenario, settings in SCENARIOS.items():
        if average == "cispo" and "delta" in settings:
            continue
        configs[scenario] = BandGRPOConfig(
            str(tmp_path),
            method="FixedClip(0.2, 0.28)",
            use_cpu=True,
            bf16=False,
            report_to="none",
            max_completion_length=COLUMNS,
            steps_per_generation=2,
            num_iterations=2,
            loss_type=average,
            importance_sampling_level=level,
            **UNWATCHED,
            **{name: value for name, value in settings.items() if name not in OF_BATCH},
        )
    trainer = make_trainer(tmp_path)
    different = []
    for scenario, config in configs.items():
        set_scenario(trainer, config)
        for seed in range(2):
            for dtype in (torch.float32, torch.float64):
                given = {name: True for name in OF_BATCH if name in SCENARIOS[scenario]}
                logp, entropy, inputs = batch(seed, **given)
                inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
                tensors = logp.to(dtype), entropy.to(dtype), inputs
                trainer.is_native = True
                stock, stock_metrics = gradients_and_metrics(trainer, *tensors, monkeypatch)
                trainer.is_native = False
                ours, our_metrics = gradients_and_metrics(trainer, *tensors, monkeypatch)
                equal = torch.equal
                if average == "cispo":  # whose weight is not the ratio: r·(w/r) is w up to rounding
                    equal = partial(torch.allclose, rtol=1e-6, atol=1e-9)
                if not all(equal(x, y) for x, y in zip(ours, stock, strict=True)):
                    different.append((scenario, seed, dtype))
                for name, values in stock_metrics.items():
                    if scenario == "delta" and name.startswith("clip_ratio/"):
                        continue  # TRL does not count the tokens that delta clips
                    assert our_metrics[name] == pytest.approx(values, rel=1e-6, nan_ok=True), (scenario, name)
    assert not different


FAR_RATIOS = (-100.0, -90.0, -61.0, -59.0, -30.0, 30.0, 59.0, 61.0, 88.0, 90.0, 100.0)
"""Log-ratios, of which a float32 ratio of those beyond ±88 overflows or is not a normal number."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_ratios_at_the_limits_of_float32_have_the_gradient_of_the_method(level, dtype, tmp_path, monkeypatch):
    """One token, or one sequence, for each log-ratio and sign; the padding holds what it likes."""
    names = [name for name, paper in METHODS.items() if paper.method().level == level]
    texts = [f"{name}()" for name in names]
    if level == "sequence":
        texts = [
            "Method(Band(), level='sequence')",
            "Method(FixedClip(0.2), KeepBound(0.5), level='sequence')",
        ]
    settings = {"use_cpu": True, "bf16": False, "report_to": "none", "loss_type": "bnpo"}
    configs = {text: BandGRPOConfig(str(tmp_path), method=text, **settings | UNWATCHED) for text in texts}
    trainer = make_trainer(tmp_path)

    distance = torch.tensor(FAR_RATIOS, dtype=dtype).repeat(2)[:, None].expand(-1, 3)
    rows = len(distance)
    logp = torch.where(distance < 0, distance - 0.5, torch.full_like(distance, -0.5))
    old = logp - distance
    mask = torch.tensor([[1.0, 1.0, 0.0]]).expand(rows, 3)
    sign = torch.tensor([1.0, -1.0]).repeat_interleave(len(FAR_RATIOS))
    inputs = {
        "prompt_ids": torch.zeros(rows, 2, dtype=torch.long),
        "prompt_mask": torch.ones(rows, 2, dtype=torch.long),
        "completion_ids": torch.zeros(rows, 3, dtype=torch.long),
        "completion_mask": mask,
        "advantages": sign.to(dtype),
        "old_per_token_logps": torch.where(mask > 0, old, torch.nan),
        "sampling_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }
    differences = {}
    for text, config in configs.items():
        if config.native_settings is not None:
            continue
        configure(trainer, config)
        found = gradient_in_trl(trainer, logp, -logp.detach(), inputs, monkeypatch)
        expected = gradient_of_policy_loss(config, logp, -logp.detach(), inputs)
        is_close = torch.isclose(found, expected, rtol=1e-5, atol=1e-30)
        if not is_close.all():
            worst = (~is_close).nonzero()[0].tolist()
            differences[text] = (distance[worst[0], 0].item(), found[*worst].item(), expected[*worst].item())
    assert not differences


def test_a_ratio_by_which_the_kl_term_cannot_be_multiplied_is_refused_by_name(tmp_path, monkeypatch):
    settings = {"use_cpu": True, "bf16": False, "report_to": "none", "beta": 0.05}
    corrected, plain = (
        BandGRPOConfig(
            str(tmp_path), method="BandPO()", use_bias_correction_kl=corrects, **settings | UNWATCHED
        )
        for corrects in (True, False)
    )
    trainer = make_trainer(tmp_path)
    logp, entropy, inputs = batch(0)
    configure(trainer, corrected)
    assert gradient_in_trl(trainer, logp, entropy, inputs, monkeypatch).any()
    configure(trainer, plain)
    inputs["old_per_token_logps"][0, 0] = -1e-3
    logp[0, 0] = inputs["ref_per_token_logps"][0, 0] = -61.5
    assert gradient_in_trl(trainer, logp, entropy, inputs, monkeypatch).isfinite().all()
    configure(trainer, corrected)
    message = r"1 tokens have a log-ratio beyond ±60, up to 61.5, and use_bias_correction_kl=True multiplies"
    with pytest.raises(RuntimeError, match=message):
        gradient_in_trl(trainer, logp, entropy, inputs, monkeypatch)
    assert trainer.epsilon_high == corrected.epsilon  # restored after the error too


@pytest.mark.parametrize("text", ["BandPO()", "KLCov()", "GPPO()", "DPPO()", "VESPO()", "M2PO()"])
def test_the_objective_is_that_of_policy_loss(text, tmp_path, monkeypatch):
    config = BandGRPOConfig(
        str(tmp_path), method=text, use_cpu=True, bf16=False, report_to="none", **UNWATCHED
    )
    trainer = make_trainer(tmp_path)
    configure(trainer, config)
    trainer.is_native = False
    trainer.loss_type = AGGREGATIONS.get(trainer.loss_type, trainer.loss_type)
    logp, entropy, inputs = batch(1, weights=True)
    gradient_in_trl(trainer, logp, entropy, inputs, monkeypatch)
    old = (
        "sampling_per_token_logps"
        if config.effective_method.old_policy == "rollout"
        else "old_per_token_logps"
    )
    given = Batch.read(
        logp,
        inputs[old],
        inputs["advantages"],
        inputs["completion_mask"],
        weights=inputs["importance_sampling_ratio"],
        entropy=entropy,
        layout=Rows(),
    )
    expected = -config.effective_method.loss(given, aggregation="token-mean").loss
    assert trainer._metrics["train"]["objective"] == [pytest.approx(expected.item(), rel=1e-9)]


WHOLE_BATCH = (
    "M2PO(0.01)",
    "KLCov(share=0.1)",
    "ClipCov(share=0.1, min_covariance=0.01)",
    "BAPO()",
    "BandPO()",
)
OF_PROCESS = (slice(0, 3), slice(3, 6))
"""The sequences of each of two processes, as many in each, as in TRL; in tokens they differ."""
SCRIPT = "import sys; from test_trl_gradients import of_this_process; of_this_process(sys.argv[1])"


def gradients_of_sequences(rows, folder, monkeypatch):
    """Return the gradient of some sequences of an update, by average and method."""
    configs = {}
    settings = {"use_cpu": True, "bf16": False, "report_to": "none", "steps_per_generation": 1}
    for average in ("grpo", "dapo"):
        for text in WHOLE_BATCH:
            configs[average, text] = BandGRPOConfig(
                str(folder), method=text, loss_type=average, **settings | UNWATCHED
            )
    trainer = make_trainer(folder)
    gradients = {}
    for (average, text), config in configs.items():
        configure(trainer, config)
        for seed in (0, 1):
            logp, entropy, inputs = batch(seed)
            part = {name: x[rows] if x.dim() else x for name, x in inputs.items()}
            gradients[average, text, seed] = gradient_in_trl(
                trainer, logp[rows], entropy[rows], part, monkeypatch
            )
    return gradients


def of_this_process(folder):
    """Save the gradients of this process's sequences; called in each process."""
    rank = int(os.environ["RANK"])
    with pytest.MonkeyPatch.context() as monkeypatch:
        gradients = gradients_of_sequences(OF_PROCESS[rank], folder, monkeypatch)
    torch.save(gradients, f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_two_processes_have_the_gradient_of_one(tmp_path, monkeypatch):
    run_on_processes(
        "import sys; from test_trl_gradients import of_this_process; of_this_process(sys.argv[1])", tmp_path
    )
    expected = gradients_of_sequences(slice(None), tmp_path, monkeypatch)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for key, gradient in expected.items():
        # The trainer takes the mean over processes.
        found = torch.cat([ranks[0][key], ranks[1][key]]) / 2
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-15, msg=str(key))
