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
from helpers.frameworks import needs
from processes import run_on_processes

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
    needs("trl")
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
    assert not method.within_process


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (Method(SecondMoment()), False),
        (Method(TwoSided(FixedClip(0.2), SecondMoment())), False),
        (Method(Tightest(BalancedBounds(), SecondMoment())), False),
        (Method(Tightest(BalancedBounds(), AboveMean())), True),
        (Method(BalancedBounds()), False),
        (Method(BalancedBounds(), CovarianceMask()), False),
        (Method(AboveMean(), CovarianceMask()), True),
        (Method(BalancedBounds(), DualClip(3.0, CovarianceMask())), False),
        (Method(FixedClip(0.2), CovariancePenalty()), False),
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


OWN_RULES = (Method(AboveMean()), Method(TwoSided(AboveMean(), FixedClip())))
"""Methods with a rule of a user's own, which looks at the tokens of one process."""
TWO_PROCESSES = """
import json, sys
from pathlib import Path
import torch.distributed as dist
from bandpo.integrations.trl import BandGRPOConfig
from bandpo.core.methods import METHODS
from integrations.test_refused_methods import OWN_RULES

out = Path(sys.argv[1])
results = {}
for method in [*(f"{name}()" for name in METHODS), *OWN_RULES]:
    try:
        settings = {"bf16": False, "use_cpu": True, "num_generations": 2, "num_iterations": 2}
        config = BandGRPOConfig(str(out), method=method, **settings)
        results[str(method)] = config.world_size
    except ValueError as error:
        results[str(method)] = str(error)
(out / f"{dist.get_rank()}.json").write_text(json.dumps(results))
"""


ONLY_OWN_PROCESS = "a part of it only looks at those of its own process, of 2"


def test_trl_accepts_published_methods_on_two_processes_and_refuses_rules_of_one(monkeypatch):
    needs("trl")
    from transformers import TrainingArguments

    from bandpo.integrations.trl import BandGRPOConfig

    settings = {"bf16": False, "use_cpu": True, "num_generations": 2, "num_iterations": 2}
    for method in OWN_RULES:
        BandGRPOConfig("out", method=method, **settings)
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: 2))
    for name in METHODS:
        BandGRPOConfig("out", method=f"{name}()", **settings)
    for method in OWN_RULES:
        with pytest.raises(ValueError, match=ONLY_OWN_PROCESS):
            BandGRPOConfig("out", method=method, **settings)


@pytest.mark.slow
def test_trl_does_so_on_two_real_processes(tmp_path):
    needs("trl")
    run_on_processes(TWO_PROCESSES, tmp_path)
    for rank in (0, 1):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        assert {results[f"{name}()"] for name in METHODS} == {2}
        for method in OWN_RULES:
            assert ONLY_OWN_PROCESS in results[str(method)]


def test_trl_refuses_accumulation_for_methods_of_a_whole_update():
    needs("trl")
    from bandpo.integrations.trl import BandGRPOConfig

    settings = {"bf16": False, "use_cpu": True, "num_generations": 2, "num_iterations": 2}
    settings["gradient_accumulation_steps"] = 2
    for name, paper in METHODS.items():
        if not paper.method().whole_batch:
            BandGRPOConfig("out", method=f"{name}()", **settings)
            continue
        with pytest.raises(ValueError, match="runs the backward pass of each accumulation step before"):
            BandGRPOConfig("out", method=f"{name}()", **settings)


def test_verl_accepts_published_methods_on_two_gpus_and_refuses_copies_and_rules_of_one():
    needs("verl")
    from integrations.test_verl import actor_config, batch, begin, evaluate, whole_config

    from bandpo.integrations.verl import BandPolicyLossConfig

    actor = "actor_rollout_ref.actor."

    def validate(text, gpus, *more):
        settings = [
            f"+{actor}policy_loss.method='{text}'",
            f"{actor}ppo_micro_batch_size_per_gpu={256 // gpus}",
            f"trainer.n_gpus_per_node={gpus}",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
            *more,
        ]
        begin(whole_config(*settings))

    for name, paper in METHODS.items():
        method = paper.method()
        if method.old_policy == "rollout":
            continue
        for gpus in (1, 2):
            validate(f"{name}()", gpus)
        if method.whole_batch:
            copies = (
                f"{actor}fsdp_config.ulysses_sequence_parallel_size=2",
                "actor_rollout_ref.model.use_remove_padding=true",
            )
            if name in ("KLCov", "ClipCov"):
                with pytest.raises(
                    ValueError, match="each token is on 2 GPUs, which would count as different"
                ):
                    validate(f"{name}()", 2, f"{actor}ppo_micro_batch_size_per_gpu=256", *copies)
            else:
                validate(f"{name}()", 2, f"{actor}ppo_micro_batch_size_per_gpu=256", *copies)

    info = {"dp_size": 2, "batch_num_tokens": 60, "global_batch_size": 6}
    for method in OWN_RULES:
        config = actor_config(BandPolicyLossConfig(method=method), global_batch_info=info)
        with pytest.raises(ValueError, match="only looks at those of its own GPU, of 2"):
            evaluate(config, batch(3))
    with pytest.raises(ValueError, match="at no probability does"):
        BandPolicyLossConfig(method="FixedClip(0.2, 28)")
