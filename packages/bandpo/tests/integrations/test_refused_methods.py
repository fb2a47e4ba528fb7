"""Methods that every integration refuses: a clip that can never act, and a rule of one process's tokens on several."""

import json
from dataclasses import dataclass

import pytest
import torch

import bandpo
from bandpo import KL, Band, BandPO, FixedClip, Method, Rows, TwoSided, Unclipped, policy_loss
from bandpo.core.methods import METHODS
from bandpo.core.objectives import CovarianceMask, CovariancePenalty, DropOutside, DualClip
from bandpo.core.rules import LogClip, Tightest, TokenRule
from bandpo.core.schedules import ClipRateController, Linear
from bandpo.core.token_rules import BalancedBounds, SecondMoment
from bandpo.integrations import read_bounds, read_method
from two_processes import run_on_two_processes

MISTYPED = (
    "FixedClip(0.2, 28)",
    "FixedClip(0.2, 8.5)",
    "FixedClip(0.95, 0.2)",
    "BandPO(radius=5)",
    "Band(KL(), 5)",
    "Band(KL(), Linear(5, 8))",
    "TwoSided(FixedClip(0.2), FixedClip(0.2, 28))",
    "Tightest(FixedClip(0.2, 28), FixedClip(0.2, 30))",
    "Loosest(FixedClip(0.2), FixedClip(0.2, 28))",
    "Method(FixedClip(0.2, 28), DropOutside())",
    "Method(FixedClip(0.2, 28), DualClip(3.0), level='sequence')",
    "GSPO(0.0003, 40)",
    "CISPO(1.0, 40)",
    "LogClip(0.4, 4)",
    "DAPO(0.2, 28)",
)
"""Methods of which one bound is above or below every ratio that training reaches."""
MEANT = (
    *(
        "FixedClip(0.2, 1.0)",
        "FixedClip(0.2, 4.0)",
        "FixedClip(0.2, inf)",
        "FixedClip(1.0, 0.2)",
        "Unclipped()",
    ),
    *("FixedClip(1.0, inf)", "TwoSided(FixedClip(0.2), Unclipped())", "LogClip(inf, 0.4)", "Band(KL(), 0.5)"),
    *("Tightest(Band(KL(), 0.05), FixedClip(0.2, 28))", "Method(Unclipped(), DropOutside(2))"),
    *("Band(KL(), 0.05, inf)", "TwoSided(Unclipped(), FixedClip(0.2, 0.28))"),
)
"""Methods without a bound on a side, and wide ones."""


@pytest.mark.parametrize("text", MISTYPED)
def test_a_clip_that_can_never_act_is_refused_by_each_reader(text):
    message = (
        r"^my\.method: at no probability does .* block a ratio .* training reaches. Is a number mistyped"
    )
    with pytest.raises(ValueError, match=message):
        read_method("my.", text, has_state=True)
    if "Linear" not in text:
        with pytest.raises(ValueError, match=message):
            read_bounds("my.", text)


@pytest.mark.parametrize("text", MEANT)
def test_a_wide_or_missing_bound_is_accepted(text):
    assert read_method(method=text) == bandpo.core.text.as_method(text)


@pytest.mark.parametrize("name", METHODS)
def test_published_methods_are_accepted(name):
    read_method(method=f"{name}()", whole_batch=True)


def test_a_schedule_is_refused_if_it_never_reaches_a_bound():
    read_method(method=Band(KL(), Linear(5, 0.05)), has_state=True)
    read_method(method=Band(KL(), ClipRateController(target=0.01, start=5.0)), has_state=True)
    with pytest.raises(ValueError, match="at no probability does"):
        read_method(method=Band(KL(), ClipRateController(target=0.01, start=90.0)), has_state=True)


def test_configurations_refuse_it():
    pytest.importorskip("trl")
    from bandpo.integrations.trl import BandGRPOConfig

    for text in ("FixedClip(0.2, 28)", "BandPO(radius=5)", "Method(FixedClip(0.2, 28), DropOutside())"):
        with pytest.raises(ValueError, match="at no probability does"):
            BandGRPOConfig("out", method=text, bf16=False, use_cpu=True)


# --- Several processes


@dataclass(frozen=True)
class AboveMean(TokenRule):
    """A rule of a user's own, whose bounds depend on the mean over the batch."""

    @property
    def whole_batch(self):
        return True

    def for_tokens(self, tokens):
        return FixedClip(0.2)


def halves_differ(method) -> bool:
    """Return True if the gradient of a batch is not that of its two halves, in any of 20 batches of groups of four."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        logp_old = -torch.rand(16, 12, generator=generator) * 4 - 0.05
        logp = (logp_old + torch.randn(16, 12, generator=generator)).clamp(max=-0.01)
        scale = torch.cat([torch.ones(8, 1), 3 * torch.ones(8, 1)])
        advantages = (torch.randn(16, 1, generator=generator) * scale).expand(16, 12)
        # The halves differ in their drift, as the batches of two processes may.
        logp[8:] = (logp_old[8:] + 0.1 * (logp - logp_old)[8:]).clamp(max=-0.01)

        def gradient(rows, tensors=(logp, logp_old, advantages)):
            new, old, advantage = (tensor[rows].double() for tensor in tensors)
            new = new.requires_grad_()
            loss, _ = policy_loss(new, old, advantage, method=method, aggregation="sum", layout=Rows())
            return torch.autograd.grad(loss, new)[0]

        whole = gradient(slice(None))
        parts = torch.cat([gradient(slice(8)), gradient(slice(8, None))])
        if not torch.allclose(whole, parts, rtol=1e-6, atol=1e-9):
            return True
    return False


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_a_whole_batch_are_those_whose_gradient_depends_on_the_split(name):
    """Measured on each published method: the property that integrations read says what the gradient does."""
    method = bandpo.core.text.as_method(f"{name}()")
    assert halves_differ(method) == method.whole_batch
    assert method.within_process == (method.whole_batch and name != "BAPO")


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (Method(SecondMoment()), True),
        (Method(TwoSided(FixedClip(0.2), SecondMoment())), True),
        (Method(Tightest(BalancedBounds(), SecondMoment())), True),
        (Method(BalancedBounds()), False),
        (Method(BalancedBounds(), CovarianceMask()), True),
        (Method(BalancedBounds(), DualClip(3.0, CovarianceMask())), True),
        (Method(FixedClip(0.2), CovariancePenalty()), True),
        (Method(AboveMean()), True),
        (Method(TwoSided(AboveMean(), FixedClip())), True),
        (Method(FixedClip(0.2), DropOutside()), False),
        (Method(Unclipped()), False),
        (BandPO(), False),
        (Method(LogClip(0.2, 0.2)), False),
    ],
    ids=repr,
)
def test_the_parts_of_a_method_decide(method, expected):
    assert method.within_process is expected


REFUSED = (
    *("M2PO()", "KLCov()", "ClipCov()", "Method(FixedClip(0.2), CovarianceMask())"),
    "TwoSided(FixedClip(0.2), SecondMoment())",
)
TWO_PROCESSES = """
import json, sys
from pathlib import Path
import torch.distributed as dist
from bandpo.integrations.trl import BandGRPOConfig

out = Path(sys.argv[1])
results = {}
for method in (METHODS):
    try:
        config = BandGRPOConfig(str(out), method=method, bf16=False, use_cpu=True, num_generations=2)
        results[method] = config.world_size
    except ValueError as error:
        results[method] = str(error)
(out / f"{dist.get_rank()}.json").write_text(json.dumps(results))
"""


@pytest.mark.parametrize("name", METHODS)
def test_trl_refuses_methods_of_one_process_on_two(name, monkeypatch):
    pytest.importorskip("trl")
    from transformers import TrainingArguments

    from bandpo.integrations.trl import BandGRPOConfig

    arguments = {"method": f"{name}()", "bf16": False, "use_cpu": True, "num_generations": 2}
    BandGRPOConfig("out", **arguments)
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: 2))
    if not bandpo.core.text.as_method(f"{name}()").within_process:
        BandGRPOConfig("out", **arguments)
        return
    with pytest.raises(ValueError, match=rf"method='{name}\(.*2 processes would each .*train on one process"):
        BandGRPOConfig("out", **arguments)


@pytest.mark.slow
def test_trl_refuses_them_on_two_real_processes(tmp_path):
    pytest.importorskip("trl")
    methods = [*REFUSED, "BAPO()", "BandPO()", "GSPO()"]
    run_on_two_processes(TWO_PROCESSES.replace("METHODS", repr(methods)), tmp_path)
    for rank in (0, 1):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        for method in methods:
            if method in REFUSED:
                assert "2 processes would each do so for their own tokens" in results[method]
            else:
                assert results[method] == 2


def test_verl_refuses_them_at_its_start_and_in_its_workers():
    pytest.importorskip("verl")
    from integrations.test_verl import actor_config, batch, evaluate, whole_config
    from verl.utils import config as verls_settings

    from bandpo.integrations.verl import BandPolicyLossConfig

    actor = "actor_rollout_ref.actor."
    for name in METHODS:
        method = bandpo.core.text.as_method(f"{name}()")
        if method.old_policy == "rollout":
            continue
        for gpus in (1, 2):
            settings = [
                f"+{actor}policy_loss.method='{name}()'",
                f"{actor}ppo_micro_batch_size_per_gpu={256 // gpus}",
                f"trainer.n_gpus_per_node={gpus}",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
            ]
            config = whole_config(*settings)
            if method.within_process and gpus == 2:
                with pytest.raises(ValueError, match=r"each of 2 GPUs would do so .*n_gpus_per_node=1"):
                    verls_settings.validate_config(config, False, False)
            else:
                verls_settings.validate_config(config, False, False)
    info = {"dp_size": 2, "batch_num_tokens": 60, "global_batch_size": 6}
    for method in REFUSED:
        config = actor_config(BandPolicyLossConfig(method=method), global_batch_info=info)
        with pytest.raises(ValueError, match="each of 2 GPUs"):
            evaluate(config, batch(3))
    with pytest.raises(ValueError, match="at no probability does"):
        BandPolicyLossConfig(method="FixedClip(0.2, 28)")
