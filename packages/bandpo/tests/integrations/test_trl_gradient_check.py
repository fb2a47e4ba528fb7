"""The gradient check in TRL's trainer: an error only where the gradient is not the method's."""

import inspect
import json
import textwrap

import pytest
import torch
from test_trl import SETTINGS, varied_reward
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

import byte_model
from bandpo.core.errors import RunProblem
from bandpo.integrations.trl import AuditedGRPOTrainer, AuditMixin, BandGRPOConfig, BandGRPOTrainer
from bandpo.integrations.trl.gradient_check import EVERY, WatchedLoss
from bandpo_lab.tasks import multiplication
from processes import run_on_processes
from rlvet.runs.quantities import named_rows

pytestmark = pytest.mark.filterwarnings("ignore::bandpo.core.errors.BandWarning")
OTHERS = {"per_device_train_batch_size": 4, "learning_rate": 4e-3, "seed": 3, "max_steps": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return byte_model.save(tmp_path_factory.mktemp("model"))


class Uneven:
    """Completions of several lengths, so that averages over tokens and over sequences differ."""

    def _generate_and_score_completions(self, inputs):
        outputs = super()._generate_and_score_completions(inputs)
        mask = outputs["completion_mask"]
        for row, counted in enumerate(mask):
            counted[3 + 2 * (row % 4) :] = 0
        outputs["num_items_in_batch"] = mask.sum()
        return outputs


def uneven(cls):
    """Return a trainer with `Uneven` completions."""

    class UnevenTrainer(Uneven, cls):
        pass

    return UnevenTrainer


def train(folder, tmp_path, cls=BandGRPOTrainer, config=BandGRPOConfig, **settings):
    trainer = cls(
        model=str(folder),
        reward_funcs=varied_reward,
        args=config(str(tmp_path), **SETTINGS | OTHERS | settings),
        train_dataset=multiplication.dataset("train", 32),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.train()
    return trainer


EVERYTHING = {
    "beta": 0.05,
    "use_bias_correction_kl": True,
    "top_entropy_quantile": 0.5,
    "off_policy_mask_threshold": 1e-3,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
}


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "FixedClip(0.02, 0.03)", "delta": 1.01, "loss_type": "grpo"},
        {"method": "FixedClip(0.02, 0.03)", "loss_type": "cispo"},
        {"method": "GSPO(1e-3, 1e-3)", **EVERYTHING},
        {"method": "BandPO()", "loss_type": "luspo"},
        {"method": "SPO(0.02)", **EVERYTHING},
        {"method": "SAPO()", "bf16": True},
        {"method": "Method(Band(KL(), 1e-3), aggregation='seq-mean-token-sum-norm')"},
        {"method": "BAPO()"},
    ],
    ids=str,
)
def test_the_gradient_is_the_methods(settings, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bandpo.integrations.trl.gradient_check.EVERY", 1)
    train(folder, tmp_path, **settings)
    lines = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("bandpo: gradient equals ")
    ]
    at_one = [line for line in lines if line.endswith("; every ratio is 1")]
    assert len(at_one) == 1
    assert 1 <= len(lines) - len(at_one) <= 2


ONCE = {"num_iterations": 1, "steps_per_generation": 1, "max_steps": 2}
"""TRL's default of one update for each batch: TRL leaves out the old log-probabilities, and every ratio is 1."""
ACCUMULATED = {"gradient_accumulation_steps": 2, "steps_per_generation": 2}


@pytest.mark.filterwarnings("ignore:each batch is used for one optimiser step")
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "FixedClip(0.2)", "loss_type": "grpo"},
        {"method": "FixedClip(0.2)", "loss_type": "cispo", "beta": 0.05},
        {"method": "BandPO()", "bf16": True},
        {"method": "GSPO()", **EVERYTHING, **ACCUMULATED},
        {"method": "SAPO()", **ACCUMULATED},
        {"method": "VESPO()"},
        {"method": "BAPO()"},
        {"method": "SPO()", "loss_type": "dr_grpo"},
    ],
    ids=str,
)
def test_the_gradient_is_compared_where_every_ratio_is_1(settings, folder, tmp_path, capsys):
    train(folder, tmp_path, uneven(BandGRPOTrainer), **ONCE | settings)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bandpo: ")]
    equal = [line for line in lines if line.startswith("bandpo: gradient equals ")]
    assert len(equal) == 1
    assert equal[0].endswith("; every ratio is 1")
    assert not any("no gradient was compared" in line for line in lines)


STOCK_LOSSES = [
    {"loss_type": "grpo"},
    {"loss_type": "bnpo"},
    {"loss_type": "dr_grpo"},
    {"loss_type": "dapo"},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "cispo", "epsilon_high": 1.03},
    {"loss_type": "sapo"},
    {"loss_type": "vespo"},
]
STOCK_VARIATIONS = [
    {},
    ACCUMULATED,
    {"beta": 0.05, "top_entropy_quantile": 0.5, "off_policy_mask_threshold": 1e-3},
]


@pytest.mark.filterwarnings("error:gradient differs")
@pytest.mark.parametrize("moved", [False, True], ids=["ratio 1", "moved"])
@pytest.mark.parametrize("variation", STOCK_VARIATIONS, ids=str)
@pytest.mark.parametrize("loss", STOCK_LOSSES, ids=str)
def test_every_stock_loss_equals_its_method(loss, variation, moved, folder, tmp_path, monkeypatch, capsys):
    """Without a false alarm, whatever TRL's ``loss_type``."""
    monkeypatch.setattr("bandpo.integrations.trl.gradient_check.EVERY", 1)
    settings = ONCE | loss | variation | {"max_steps": 3}
    if moved:
        settings["num_iterations"] = 2
    train(folder, tmp_path, uneven(AuditedGRPOTrainer), GRPOConfig, **settings)
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith("bandpo: gradient equals ")]
    assert lines[0].endswith("; every ratio is 1")
    assert (len(lines) > 1) == moved


class WithWeights(AuditedGRPOTrainer):
    """A stock trainer whose tokens have importance weights, as vLLM's correction gives them."""

    def _compute_loss(self, model, inputs):
        mask = inputs["completion_mask"]
        drawn = torch.rand(mask.shape, generator=torch.Generator().manual_seed(0))
        weights = torch.where(mask > 0, 0.8 + 0.5 * drawn, 1.0)
        # TRL multiplies by the weights only where vLLM generates, which does not run here.
        self.use_vllm = True
        try:
            return super()._compute_loss(model, {**inputs, "importance_sampling_ratio": weights})
        finally:
            self.use_vllm = False


@pytest.mark.filterwarnings("error:gradient differs")
@pytest.mark.parametrize("moved", [False, True], ids=["ratio 1", "moved"])
@pytest.mark.parametrize("loss", STOCK_LOSSES, ids=str)
def test_every_stock_loss_with_importance_weights(loss, moved, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bandpo.integrations.trl.gradient_check.EVERY", 1)
    settings = ONCE | loss | {"max_steps": 3, "num_iterations": 1 + moved}
    train(folder, tmp_path, uneven(WithWeights), GRPOConfig, **settings)
    assert "bandpo: gradient equals " in capsys.readouterr().err


class Doubled(BandGRPOTrainer):
    def _compute_loss(self, model, inputs):
        return 2 * super()._compute_loss(model, inputs)


class Flipped(BandGRPOTrainer):
    def _compute_loss(self, model, inputs):
        return -super()._compute_loss(model, inputs)


class DoubledOutside(BandGRPOTrainer):
    def compute_loss(self, *arguments, **named):
        return 2 * super().compute_loss(*arguments, **named)


class Detached(BandGRPOTrainer):
    """Every second token has no gradient."""

    def _get_per_token_logps_and_entropies(self, *arguments, **named):
        logp, *others = super()._get_per_token_logps_and_entropies(*arguments, **named)
        second = torch.arange(logp.shape[1]) % 2 == 1
        return torch.where(second, logp.detach(), logp), *others


class TokenMean(BandGRPOTrainer):
    """The average over all tokens in the place of the one that ``loss_type`` names."""

    def _compute_loss(self, model, inputs):
        configured, self.loss_type = self.loss_type, "bnpo"
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.loss_type = configured


class Added(BandGRPOTrainer):
    """A term that knows no advantage."""

    def _get_per_token_logps_and_entropies(self, *arguments, **named):
        outputs = super()._get_per_token_logps_and_entropies(*arguments, **named)
        self.logp = outputs[0]
        return outputs

    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs) + 0.01 * self.logp.mean()


SABOTAGES = [Doubled, Flipped, DoubledOutside, Detached, TokenMean, Added]


@pytest.mark.filterwarnings("ignore:each batch is used for one optimiser step")
@pytest.mark.parametrize("method", ["FixedClip(0.2)", "BandPO()", "SAPO()"])
@pytest.mark.parametrize("accumulation", [{}, ACCUMULATED], ids=["", "accumulated"])
@pytest.mark.parametrize("cls", SABOTAGES, ids=lambda cls: cls.__name__)
def test_a_changed_loss_is_stopped_at_ratio_1(cls, accumulation, method, folder, tmp_path):
    """Before the first update."""
    if cls is Detached and method == "SAPO()":
        pytest.skip("its gradient joins where the log-probabilities are computed, so nothing is detached")
    steps = []

    class Observed(cls):
        def training_step(self, *arguments, **named):
            steps.append(self.state.global_step)
            return super().training_step(*arguments, **named)

    settings = ONCE | accumulation | {"method": method, "loss_type": "grpo"}
    if cls is TokenMean and method == "SAPO()":
        # SAPO is TRL's own loss_type, and under another one TRL would clip with an epsilon that is not there.
        with pytest.raises(TypeError, match="this config names a clip rule or method"):
            train(folder, tmp_path, uneven(cls), **settings)
        return
    with pytest.raises(RunProblem, match="gradient differs from "):
        train(folder, tmp_path, uneven(Observed), **settings)
    assert steps == [0]
    train(folder, tmp_path, uneven(cls), **settings, certify="off")


class Copied(BandGRPOTrainer):
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, dict(inputs))


class CopiedAndTimed(BandGRPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, dict(inputs), return_outputs, num_items_in_batch)

    def _compute_loss(self, model, inputs):
        self._metrics["train"]["mine"].append(1.0)
        return super()._compute_loss(model, {**inputs})


class Split(BandGRPOTrainer):
    """Sums over tokens of two halves of a batch, which add to that of the whole."""

    def _compute_loss(self, model, inputs):
        rows = len(inputs["advantages"])

        def half(start):
            return {
                name: x[start::2] if isinstance(x, torch.Tensor) and x.dim() and len(x) == rows else x
                for name, x in inputs.items()
            }

        return super()._compute_loss(model, half(0)) + super()._compute_loss(model, half(1))


class SecondPass(BandGRPOTrainer):
    """Asks for the log-probabilities again, after the loss, for a metric of its own."""

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        length = inputs["completion_ids"].shape[1]
        logp = self._get_per_token_logps_and_entropies(model, ids, attention, length)[0]
        self._metrics["train"]["mine"].append(logp.mean().item())
        return loss


@pytest.mark.parametrize(
    "method", ["FixedClip(0.02, 0.03)", "BandPO()", "SAPO()", "Method(FixedClip(0.02), DropOutside())"]
)
@pytest.mark.parametrize("cls", [Copied, CopiedAndTimed, Split, SecondPass], ids=lambda cls: cls.__name__)
def test_a_subclass_that_leaves_the_loss_alone_trains_as_without_it(cls, method, folder, tmp_path):
    """To the same weights; no bound or advantage of one loss is left in the next."""
    settings = {"method": method, "loss_type": "dapo"}
    subclass, plain = (train(folder, tmp_path, uneven(each), **settings) for each in (cls, BandGRPOTrainer))
    for ours, theirs in zip(subclass.model.parameters(), plain.model.parameters(), strict=True):
        if cls is Split:
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)
        else:
            assert torch.equal(ours, theirs)


class PassedBy(BandGRPOTrainer):
    """TRL's loss, not called through ``super()``."""

    def _compute_loss(self, model, inputs):
        return GRPOTrainer._compute_loss(self, model, inputs)


def test_a_subclass_that_passes_the_method_by_is_stopped(folder, tmp_path):
    with pytest.raises(TypeError, match=r"call super\(\)\._compute_loss in a subclass"):
        train(folder, tmp_path, PassedBy, method="BandPO()")
    # TRL's own settings are the method here.
    train(folder, tmp_path, PassedBy, method="FixedClip(0.02, 0.03)")


class Replaced(BandGRPOTrainer):
    """A loss of its own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        length = inputs["completion_ids"].size(1)
        return -self._get_per_token_logps_and_entropies(model, ids, attention, length)[0].mean()


@pytest.mark.filterwarnings("error:gradient differs")
def test_a_mixin_sees_a_copy_that_the_trainer_below_makes(folder, tmp_path, capsys):
    class Theirs(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, dict(inputs))

    class Mine(AuditMixin, Theirs):
        pass

    train(folder, tmp_path, Mine, GRPOConfig, loss_type="grpo")
    assert "bandpo: gradient equals " in capsys.readouterr().err


class WithoutSuper:
    """A training step of its own, after which nothing compares."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        self._step += 1
        return loss.detach()


NOT_COMPARED = "bandpo: no gradient was compared with that of "


@pytest.mark.parametrize(
    ("cls", "config"), [(BandGRPOTrainer, BandGRPOConfig), (AuditedGRPOTrainer, GRPOConfig)], ids=str
)
def test_the_end_of_training_says_that_nothing_was_compared(cls, config, folder, tmp_path, capsys):
    class Mine(WithoutSuper, cls):
        pass

    class Off(Mine):
        certify = "off"

    class NothingToLearn(cls):
        def _generate_and_score_completions(self, inputs):
            outputs = super()._generate_and_score_completions(inputs)
            outputs["advantages"] = torch.zeros_like(outputs["advantages"])
            return outputs

    train(folder, tmp_path, Mine, config)
    assert capsys.readouterr().err.count(NOT_COMPARED) == 1
    train(folder, tmp_path, NothingToLearn, config)
    assert capsys.readouterr().err.count(NOT_COMPARED) == 1
    train(folder, tmp_path, cls, config)
    assert NOT_COMPARED not in capsys.readouterr().err
    off = {"certify": "off"} if config is BandGRPOConfig else {}
    train(folder, tmp_path, Off, config, **off)
    assert NOT_COMPARED not in capsys.readouterr().err


def test_a_loss_at_ratio_1_is_compared_again_only_after_many_steps(folder, tmp_path, monkeypatch):
    """And one whose ratios have left 1 at once, after which losses at ratio 1 are not compared any more."""
    compared, gradient_check = [], WatchedLoss.gradient_check

    def noted(self, trainer, method):
        compared.append((trainer.state.global_step, bool(self.batch.log_ratio.abs().max() > 1e-6)))
        return gradient_check(self, trainer, method)

    monkeypatch.setattr(WatchedLoss, "gradient_check", noted)
    monkeypatch.setattr("bandpo.integrations.trl.gradient_check.EVERY", 4)
    train(folder, tmp_path, AuditedGRPOTrainer, GRPOConfig, **ONCE | {"max_steps": 9})
    assert compared == [(0, False), (4, False), (8, False)]
    compared.clear()
    train(folder, tmp_path, method="FixedClip(1e-6)", **ONCE | {"num_iterations": 2, "max_steps": 9})
    assert compared == [(0, False), (1, True), (5, True)]


def patched(old, new):
    """TRL's loss with one line changed."""
    source = textwrap.dedent(inspect.getsource(GRPOTrainer._compute_loss))
    assert old in source
    found = {}
    exec(source.replace(old, new), vars(grpo_trainer), found)
    return found["_compute_loss"]


READ = 'advantages = inputs["advantages"]\n'
LOG_RATIO = "per_token_logps - old_per_token_logps"
PATCHES = {
    "advantages clamped": (READ, READ.strip() + ".clamp(-0.3, 0.3)\n", {}),
    "advantages normalised": (READ, READ.strip() + "; advantages = advantages / advantages.std()\n", {}),
    "log-ratio clamped": (f"= {LOG_RATIO}", f"= ({LOG_RATIO}).clamp(-0.01, 0.01)", {}),
    "a clip of its own": ("1 - self.epsilon_low, 1 + self.epsilon_high)", "0.99, 1.01)", {}),
    "half of it": ("return loss", "return loss * 0.5", {}),
    "another KL": ("+ self.beta * per_token_kl", "+ 1.1 * self.beta * per_token_kl", {"beta": 0.05}),
}


@pytest.mark.filterwarnings("ignore:bandpo was not tested with the loss of trl")
@pytest.mark.parametrize("patch", PATCHES)
def test_another_loss_is_stopped_at_the_first_update(patch, folder, tmp_path, monkeypatch):
    old, new, settings = PATCHES[patch]
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", patched(old, new))
    settings = {"method": "FixedClip(0.1)", "loss_type": "grpo", **settings}
    seen = []

    class Seen(BandGRPOTrainer):
        def training_step(self, *arguments, **named):
            seen.append(self.state.global_step)
            return super().training_step(*arguments, **named)

    with pytest.raises(RuntimeError, match=r"gradient differs from FixedClip|does not use the advantages"):
        train(folder, tmp_path, Seen, **settings)
    assert seen[-1] <= 1
    if patch == "half of it":
        with pytest.warns(
            UserWarning, match="every token is 0.5 times as expected.* set certify='warn' to train on"
        ):
            train(folder, tmp_path, **settings, certify="warn")


def test_a_subclass_that_changes_the_loss_is_stopped(folder, tmp_path):
    class Doubled(BandGRPOTrainer):
        def compute_loss(self, *arguments, **named):
            return 2 * super().compute_loss(*arguments, **named)

    with pytest.raises(RuntimeError, match="every token is 2 times as expected"):
        train(folder, tmp_path, Doubled)
    train(folder, tmp_path, Doubled, certify="off")


def test_an_audit_of_another_loss_is_told(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", patched(*PATCHES["a clip of its own"][:2]))
    with pytest.warns(UserWarning, match=r"gradient differs from FixedClip\(low=0.2.*: another clip or mask"):
        train(folder, tmp_path, AuditedGRPOTrainer, GRPOConfig)


def test_the_audit_counts_the_tokens_that_have_a_gradient(folder, tmp_path):
    """Of as many in both runs, up to the first update, a fifth where TRL takes the fifth with the highest entropy."""
    tokens = []
    for share in (1.0, 0.2):
        trainer = train(folder, tmp_path, top_entropy_quantile=share, logging_steps=1)
        tokens.append(named_rows(trainer.state.log_history)[0]["audit/tokens"])
    assert tokens[1] / tokens[0] == pytest.approx(0.2, abs=0.03)


def test_an_unknown_loss_is_told_at_start_up(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", patched("return loss", "return loss * 1"))
    with pytest.warns(UserWarning, match="bandpo was not tested with"):
        train(folder, tmp_path)


class SecondPassInTheLoss(BandGRPOTrainer):
    """A term of supervised learning, which a second forward pass gives."""

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        return loss + 0.01 * model(input_ids=ids, labels=ids).loss


class Penalised(BandGRPOTrainer):
    """A penalty on the parameters."""

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        return loss + 0.01 * sum(parameter.square().sum() for parameter in model.parameters())


class EntropyFlipped(BandGRPOTrainer):
    """An entropy bonus that is a penalty, twenty times as large."""

    def _compute_loss(self, model, inputs):
        configured, self.entropy_coef = self.entropy_coef, -20 * self.entropy_coef
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.entropy_coef = configured


class DetachesHalf(GRPOTrainer):
    """Every second token has no gradient, below the mixin that sees the log-probabilities."""

    def _get_per_token_logps_and_entropies(self, *arguments, **named):
        logp, *others = super()._get_per_token_logps_and_entropies(*arguments, **named)
        second = torch.arange(logp.shape[1]) % 2 == 1
        return torch.where(second, logp.detach(), logp), *others


class DetachedBelow(AuditMixin, DetachesHalf):
    certify = "stop"


class AddsToGradients(GRPOTrainer):
    """A training step that changes gradients after the backward pass."""

    def training_step(self, model, *arguments, **named):
        loss = super().training_step(model, *arguments, **named)
        for parameter in model.parameters():
            parameter.grad.mul_(1.5)
        return loss


class ChangedBelow(AuditMixin, AddsToGradients):
    certify = "stop"


AROUND_THE_LOSS = [
    (SecondPassInTheLoss, {}),
    (Penalised, {}),
    (EntropyFlipped, {"entropy_coef": 0.01}),
    (DetachedBelow, {}),
    (ChangedBelow, {}),
]


@pytest.mark.filterwarnings("ignore:each batch is used for one optimiser step")
@pytest.mark.parametrize("accumulation", [{}, ACCUMULATED], ids=["", "accumulated"])
@pytest.mark.parametrize(("cls", "settings"), AROUND_THE_LOSS, ids=str)
def test_what_is_changed_around_the_loss_is_stopped_at_the_first_update(
    cls, settings, accumulation, folder, tmp_path
):
    config = BandGRPOConfig if issubclass(cls, BandGRPOTrainer) else GRPOConfig
    with Updates() as updates, pytest.raises(RunProblem, match=r"gradient .*differs"):
        train(folder, tmp_path, uneven(cls), config, **ONCE | accumulation | settings)
    assert updates.count == 0


class Updates:
    """The number of optimiser steps."""

    def __enter__(self):
        self.count = 0
        self._hook = register_optimizer_step_post_hook(self._counted)
        return self

    def _counted(self, *_):
        self.count += 1

    def __exit__(self, *_):
        self._hook.remove()


@pytest.mark.filterwarnings("ignore:each batch is used for one optimiser step")
def test_a_flipped_adaptive_entropy_bonus_is_stopped_at_the_next_comparison(folder, tmp_path):
    """TRL's adaptive bonus is 0 in the first update."""
    settings = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 9.0, "max_steps": 40}
    with Updates() as updates, pytest.raises(RunProblem, match="gradient of the entropies differs"):
        train(folder, tmp_path, uneven(EntropyFlipped), **ONCE | settings)
    assert 1 <= updates.count <= EVERY


MASKS = {
    "get_high_entropy_mask": (
        lambda self, entropies, mask, threshold: (entropies > 0) & mask.bool(),
        {"top_entropy_quantile": 0.5},
    ),
    "get_off_policy_mask": (
        staticmethod(lambda advantages, mask, **_: (advantages >= 0).to(mask.dtype)),
        {"off_policy_mask_threshold": 0.5},
    ),
}


@pytest.mark.filterwarnings("ignore:each batch is used for one optimiser step")
@pytest.mark.parametrize("name", MASKS)
def test_a_patched_mask_is_stopped_at_the_first_update(name, folder, tmp_path, monkeypatch):
    function, settings = MASKS[name]
    monkeypatch.setattr(GRPOTrainer, name, function)
    with Updates() as updates, pytest.raises(RunProblem, match="gradient differs"):
        train(folder, tmp_path, uneven(BandGRPOTrainer), **ONCE | settings)
    assert updates.count == 0


@pytest.mark.filterwarnings("ignore:each batch is used for one optimiser step")
@pytest.mark.parametrize("iterations", [1, 2])
def test_a_loss_that_is_patched_later_is_stopped_at_the_next_comparison(
    iterations, folder, tmp_path, monkeypatch
):
    class Patched(BandGRPOTrainer):
        def training_step(self, *arguments, **named):
            if self.state.global_step == 12:
                monkeypatch.setattr(GRPOTrainer, "_compute_loss", patched("return loss", "return loss * 2"))
            return super().training_step(*arguments, **named)

    settings = ONCE | {"max_steps": 40, "num_iterations": iterations}
    with Updates() as updates, pytest.raises(RunProblem, match="every token is 2 times as expected"):
        train(folder, tmp_path, Patched, **settings)
    assert 12 <= updates.count <= 12 + EVERY


@pytest.mark.filterwarnings("error:gradient .*differs")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bf16": True},
        {"gradient_checkpointing": False},
        {"entropy_coef": 0.01, "top_entropy_quantile": 0.5},
        {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 9.0},
        {"beta": 0.05, **ACCUMULATED},
        {"loss_type": "cispo"},
    ],
    ids=str,
)
def test_the_gradient_of_the_parameters_is_that_of_the_loss(settings, folder, tmp_path, capsys):
    train(folder, tmp_path, uneven(AuditedGRPOTrainer), GRPOConfig, **ONCE | settings)
    assert "bandpo: gradient of the parameters equals that of " in capsys.readouterr().err


def test_the_gradient_of_the_parameters_with_dropout(tmp_path, capsys):
    """The repeated pass drops what the loss's pass dropped, and no random number of the training is used up."""
    path = byte_model.save(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.2}))
    weights = []
    for certify in ("stop", "off"):
        trainer = train(path, tmp_path / certify, certify=certify, **SETTINGS)
        weights.append(list(trainer.model.parameters()))
    assert "bandpo: gradient of the parameters equals that of " in capsys.readouterr().err
    for compared, without in zip(*weights, strict=True):
        assert torch.equal(compared, without)


TWO_PROCESSES = """
import sys
from pathlib import Path
from test_trl import LOG, make
from bandpo.integrations.trl import BandGRPOConfig, BandGRPOTrainer

out, said = Path(sys.argv[1]), []
accumulated = {"gradient_accumulation_steps": int(sys.argv[2]), "steps_per_generation": 4}
trainer = make(BandGRPOTrainer, BandGRPOConfig, out, **LOG | accumulated | {"entropy_coef": 0.01, "beta": 0.02})
trainer._announce = said.append
trainer.train()
(out / f"{trainer.accelerator.process_index}.txt").write_text(chr(10).join(said))
"""


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_processes_compare_the_gradients_of_parameters(accumulation, tmp_path):
    """Also where gradients are averaged over processes in the backward pass that is compared."""
    script = TWO_PROCESSES.replace("int(sys.argv[2])", str(accumulation))
    run_on_processes(script, tmp_path)
    for rank in (0, 1):
        said = (tmp_path / f"{rank}.txt").read_text()
        assert "gradient of the parameters equals that of " in said
