"""Sabotages of TRL's trainer: subclasses, other versions of TRL's loss, and what surrounds the loss."""

import inspect
import textwrap
from functools import partial

import torch
from integrations.sabotages.table import Row

from helpers.frameworks import needs

needs("trl")

import trl
from test_trl import SETTINGS, varied_reward
from test_trl_gradients import UNWATCHED, make_trainer, set_scenario
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

import byte_model
from bandpo.integrations.trl import AuditMixin, BandGRPOConfig, BandGRPOTrainer
from bandpo.integrations.trl.probe import probe_loss
from bandpo_lab.tasks import multiplication

OTHERS = {"per_device_train_batch_size": 4, "learning_rate": 4e-3, "seed": 3, "max_steps": 4}


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


ONCE = {"num_iterations": 1, "steps_per_generation": 1, "max_steps": 2}
"""TRL's default of one update for each batch."""
ACCUMULATED = {"gradient_accumulation_steps": 2, "steps_per_generation": 2}


# --- Subclasses


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


class OverPadding(BandGRPOTrainer):
    """An average over padding, which is the right one while all completions are equally long."""

    def _compute_loss(self, model, inputs):
        mask = inputs["completion_mask"]
        return super()._compute_loss(model, inputs) * mask.sum() / mask.numel()


class K2(BandGRPOTrainer):
    """Another estimate of the KL term, whose gradient is the same while the policy is the reference."""

    def _get_per_token_logps_and_entropies(self, *arguments, **named):
        outputs = super()._get_per_token_logps_and_entropies(*arguments, **named)
        self.logp = outputs[0]
        return outputs

    def _compute_loss(self, model, inputs):
        beta, self.beta = self.beta, 0.0
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self.beta = beta
        gap = (inputs["ref_per_token_logps"] - self.logp) * inputs["completion_mask"]
        return loss + beta * (gap**2 / 2).sum() / inputs["completion_mask"].sum()


class CertainDetached(BandGRPOTrainer):
    """Tokens of p ≥ 0.98 have no gradient."""

    def _get_per_token_logps_and_entropies(self, *arguments, **named):
        logp, *others = super()._get_per_token_logps_and_entropies(*arguments, **named)
        return torch.where(logp > -0.02, logp.detach(), logp), *others


class ClampedAdvantages(BandGRPOTrainer):
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs | {"advantages": inputs["advantages"].clamp(-1, 1)})


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


ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 9.0}
SABOTAGES = [
    (Doubled, {}, "is 2 times|2 to 2 times"),
    (Flipped, {}, "is -1 times"),
    (DoubledOutside, {}, "is 2 times"),
    (Detached, {}, "share of a token in the loss is 0 to 1 times"),
    (TokenMean, {}, "each sequence has a factor of its own"),
    (Added, {}, "with advantages of 0 its gradient differs"),
    (OverPadding, {}, "times as expected"),
    (K2, {"beta": 0.05, "use_bias_correction_kl": False}, "with advantages of 0 its gradient differs"),
    (CertainDetached, {}, "share of a token in the loss is 0 to 1 times"),
    (ClampedAdvantages, {}, "its gradient differs"),
    (SecondPassInTheLoss, {}, "on another path than the log-probabilities"),
    (Penalised, {}, "on another path than the log-probabilities"),
    (EntropyFlipped, {"entropy_coef": 0.01}, "by the entropies differs"),
    (EntropyFlipped, ADAPTIVE, "by the entropies differs"),
    (DetachedBelow, {}, "share of a token in the loss is 0 to 1 times"),
]


class PassedBy(BandGRPOTrainer):
    """TRL's loss, not called through ``super()``."""

    def _compute_loss(self, model, inputs):
        return GRPOTrainer._compute_loss(self, model, inputs)


class Replaced(BandGRPOTrainer):
    """A loss of its own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        length = inputs["completion_ids"].size(1)
        return -self._get_per_token_logps_and_entropies(model, ids, attention, length)[0].mean()


def patched(*changes):
    """TRL's loss with changed lines."""
    source = textwrap.dedent(inspect.getsource(GRPOTrainer._compute_loss))
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    found = {}
    exec(source, vars(grpo_trainer), found)
    return found["_compute_loss"]


READ = 'advantages = inputs["advantages"]\n'
LOG_RATIO = "per_token_logps - old_per_token_logps"
KL_TERM = "- (ref_per_token_logps - per_token_logps) - 1"
TRAINS = None
MUTATIONS = {
    "advantages clamped": (
        [(READ, READ.strip() + ".clamp(-0.3, 0.3)\n")],
        {},
        "0.3 to 0.3 times that of the average",
    ),
    "advantages divided": (
        [(READ, READ.strip() + "; advantages = advantages / 2\n")],
        {},
        "0.5 to 0.5 times that of",
    ),
    "advantages read first": (
        [
            (READ, "\n"),
            (
                'prompt_ids, prompt_mask = inputs["prompt_ids"]',
                'advantages = inputs["advantages"]; prompt_ids, prompt_mask = inputs["prompt_ids"]',
            ),
        ],
        {},
        "reads the advantages before _get_per_token_logps_and_entropies returns",
    ),
    "advantages renamed": (
        [(READ, 'advantages = inputs["adv"]\n')],
        {},
        "ends with KeyError on .* batch: 'adv'",
    ),
    "log-ratio clamped": (
        [(f"= {LOG_RATIO}", f"= ({LOG_RATIO}).clamp(-0.01, 0.01)")],
        {},
        "its gradient differs",
    ),
    "old log-probabilities renamed": (
        [('inputs.get("old_per_token_logps")', 'inputs.get("old_logps")')],
        {},
        "its gradient differs",
    ),
    "a clip of its own": (
        [("1 - self.epsilon_low, 1 + self.epsilon_high)", "0.99, 1.01)")],
        {},
        "its gradient differs",
    ),
    "epsilon renamed": (
        [("self.epsilon_low", "self.eps_low")],
        {},
        "ends with AttributeError on .* 'eps_low'",
    ),
    "forward pass renamed": (
        [("self._get_per_token_logps_and_entropies(", "self._get_logps(")],
        {},
        "ends with AttributeError on .* '_get_logps'",
    ),
    "half of it": ([("return loss", "return loss * 0.5")], {}, "0.5 to 0.5 times that of the average"),
    "average over padding": (
        [("mask.sum(-1).clamp(min=1.0)).mean()", "mask.shape[-1]).mean()")],
        {"loss_type": "grpo"},
        "times that of the average 'seq-mean-token-mean'",
    ),
    "a sum over tools": (
        [('if "tool_mask" not in inputs else completion_mask * inputs["tool_mask"]', "")],
        {},
        "times that of the average|its gradient differs|tokens that do not count",
    ),
    "weights twice": (
        [
            (
                'per_token_loss * inputs["importance_sampling_ratio"]',
                'per_token_loss * inputs["importance_sampling_ratio"] ** 2',
            )
        ],
        {"weights": True},
        "its gradient differs",
    ),
    "off-policy mask renamed": (
        [("self.get_off_policy_mask(", "self.off_policy_mask(")],
        {"off_policy_mask_threshold": 0.05},
        "ends with AttributeError on .* 'off_policy_mask'",
    ),
    "advantages per sequence only": (
        [(READ, READ.strip() + "; assert advantages.dim() == 1\n")],
        {},
        "ends with AssertionError",
    ),
    "another KL term": (
        [("+ self.beta * per_token_kl", "+ 1.1 * self.beta * per_token_kl")],
        {"beta": 0.05, "use_bias_correction_kl": False},
        TRAINS,
    ),
    "another estimate of KL": (
        [
            (
                "torch.exp(ref_per_token_logps - per_token_logps)",
                "(ref_per_token_logps - per_token_logps) ** 2 / 2",
            ),
            (KL_TERM, ""),
        ],
        {"beta": 0.05, "use_bias_correction_kl": False},
        TRAINS,
    ),
    "clip metrics renamed": (
        [("clip_ratio/", "clipped/")],
        {},
        "has no metric 'clip_ratio/low_mean' in its loss, which in trl",
    ),
}


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


METHODS = ("FixedClip(0.2)", "BandPO()", "SAPO()")
VERSION = rf"with trl {trl.__version__} is not that of (.|\n)*"


class Generated(Exception):
    """The loss was certified, and the trainer generates its first batch."""


def until_generation(cls):
    """Return a trainer that ends where its first batch would be generated."""

    class Observed(cls):
        def _generate_and_score_completions(self, inputs):
            raise Generated

    Observed.__name__ = cls.__name__
    return Observed


def train_subclass(cls, settings, method, accumulation, folder, monkeypatch):
    """Train until the first batch, which a sabotaged loss does not reach."""
    config = BandGRPOConfig if issubclass(cls, BandGRPOTrainer) else GRPOConfig
    given = ONCE | accumulation | settings | {"loss_type": "grpo"}
    if method is not None:
        given |= {"method": method, "accept_idle_clip": True}
    train(byte_model.save(folder / "model"), folder, until_generation(cls), config, **given)


def mutate(name, method, folder, monkeypatch):
    """Certify a loss after a change of TRL's text."""
    changes, settings, _ = MUTATIONS[name]
    given = {key: value for key, value in settings.items() if key != "weights"}
    base = {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "steps_per_generation": 2,
        "num_iterations": 2,
    }
    config = BandGRPOConfig(str(folder), method=method, **{"loss_type": "dapo"} | base | UNWATCHED | given)
    trainer = make_trainer(folder)
    set_scenario(trainer, config)
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = "weights" in settings
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", patched(*changes))
    line = probe_loss(trainer)
    assert "has the gradient of " in line


def patch_mask(name, folder, monkeypatch):
    """Train with another function of TRL for a mask."""
    function, settings = MASKS[name]
    monkeypatch.setattr(GRPOTrainer, name, function)
    train(byte_model.save(folder / "model"), folder, until_generation(BandGRPOTrainer), **settings)


ROWS = {}
for cls, settings, message in SABOTAGES:
    for accumulation in ({}, ACCUMULATED):
        for method in METHODS if issubclass(cls, BandGRPOTrainer) else [None]:
            if cls is TokenMean and method == "SAPO()":
                continue  # SAPO is TRL's own loss_type, and under another one TRL would have no epsilon
            name = f"{cls.__name__}, {', '.join((method or 'audited', *settings, *list(accumulation)[:1]))}"
            sentence = VERSION if method == "SAPO()" else f"{VERSION}({message})"
            run = partial(train_subclass, cls, settings, method, accumulation)
            ROWS[name] = Row(run, sentence)
ROWS["Replaced"] = Row(
    partial(train_subclass, Replaced, {}, "BandPO()", {}),
    r"the loss of Replaced with .* is not that of BandPO\(",
)
for name, (_, _, message) in MUTATIONS.items():
    for method in ("BandPO()", "Method(FixedClip(0.2), DropOutside())"):
        sentence = None if message is TRAINS else rf"^(?=.*trl {trl.__version__}).*({message})"
        ROWS[f"{name}, {method}"] = Row(partial(mutate, name, method), sentence)
for name in MASKS:
    ROWS[name] = Row(partial(patch_mask, name), "its gradient differs")


# --- Outside of the loss


def replaced(monkeypatch, name, change):
    """Replace a function of TRL by one that changes its result."""
    original = getattr(GRPOTrainer, name)

    def changed(self, *arguments, **named):
        return change(original(self, *arguments, **named))

    monkeypatch.setattr(GRPOTrainer, name, changed)


def backward_three_times(monkeypatch):
    original = GRPOTrainer.training_step

    def training_step(self, *arguments, **named):
        backward = self.accelerator.backward

        def three_times(loss, **kwargs):
            for _ in range(3):
                backward(loss, retain_graph=True, **kwargs)

        self.accelerator.backward = three_times
        try:
            return original(self, *arguments, **named)
        finally:
            self.accelerator.backward = backward

    monkeypatch.setattr(GRPOTrainer, "training_step", training_step)


def old_shifted(monkeypatch):
    def change(outputs):
        return outputs | {"old_per_token_logps": outputs["old_per_token_logps"].roll(1, 1)}

    replaced(monkeypatch, "_generate_and_score_completions", change)


def scaled_in_the_loss(monkeypatch):
    def change(outputs):
        logp, *others = outputs
        return (0.7 * logp if torch.is_grad_enabled() else logp), *others

    replaced(monkeypatch, "_get_per_token_logps_and_entropies", change)


def first_tokens_detached(monkeypatch):
    def change(outputs):
        logp, *others = outputs
        return torch.cat([logp[:, :2].detach(), logp[:, 2:]], 1), *others

    replaced(monkeypatch, "_get_per_token_logps_and_entropies", change)


def advantages_times_three(monkeypatch):
    def change(outputs):
        return outputs | {"advantages": 3 * outputs["advantages"]}

    replaced(monkeypatch, "_generate_and_score_completions", change)


OUTSIDE = {
    "backward three times": (backward_three_times, "the backward pass", ""),
    "old log-probabilities shifted by one": (
        old_shifted,
        "old log-probabilities from generation",
        r"logp_old is shifted by \+1 tokens",
    ),
    "log-probabilities times 0.7 in the loss alone": (
        scaled_in_the_loss,
        "the forward pass",
        "logp_old is at 0.70 times the temperature",
    ),
    "first tokens detached": (first_tokens_detached, "the forward pass", ""),
    "advantages times 3 in generation": (advantages_times_three, "advantages and .* from generation", ""),
}
"""Sabotages of TRL outside of its loss: the change, what the certificate does not compare, and what the checks of the
run say at the first update of a fresh batch, where every ratio is 1."""


def train_beside(sabotage, folder, monkeypatch):
    """Train some steps of a sabotaged TRL, and return the certificate."""
    sabotage(monkeypatch)
    trainer = train(byte_model.save(folder / "model"), folder, method="BandPO()", max_steps=2)
    return probe_loss(trainer)


for name, (sabotage, unseen, warning) in OUTSIDE.items():
    ROWS[name] = Row(partial(train_beside, sabotage), None, unseen=unseen, warning=warning)
