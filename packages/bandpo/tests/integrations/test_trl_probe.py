"""The probe of TRL's trainer: an error before training only where the gradient of the loss is not the method's."""

import inspect
import json
import re
import textwrap
import time
from dataclasses import dataclass

import pytest
import torch

from helpers.frameworks import needs

needs("trl")

import trl
from test_trl import SETTINGS, make, varied_reward
from test_trl_gradients import OF_BATCH, SCENARIOS, UNWATCHED, make_trainer, set_scenario
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

import byte_model
from bandpo import Batch, Method, RatioBounds, Rows, policy_loss
from bandpo.core.errors import RunProblem
from bandpo.core.methods import METHODS
from bandpo.core.rules import TokenRule
from bandpo.integrations.trl import AuditedGRPOTrainer, AuditMixin, BandGRPOConfig, BandGRPOTrainer
from bandpo.integrations.trl.probe import SyntheticBatch, probe_loss
from bandpo_lab.tasks import multiplication
from processes import run_on_processes
from rlvet.runs.configs import TRL_CLIPS
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


ONCE = {"num_iterations": 1, "steps_per_generation": 1, "max_steps": 2}
"""TRL's default of one update for each batch."""
ACCUMULATED = {"gradient_accumulation_steps": 2, "steps_per_generation": 2}


@pytest.mark.parametrize("average", TRL_CLIPS)
def test_every_method_passes_in_every_scenario(average, tmp_path):
    base = {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "steps_per_generation": 2,
        "num_iterations": 2,
    }
    configs = {}
    for name in METHODS:
        for scenario, settings in SCENARIOS.items():
            given = {key: value for key, value in settings.items() if key not in OF_BATCH}
            given |= base | UNWATCHED | {"method": f"{name}()", "loss_type": average}
            is_refused = "delta" in given or (
                METHODS[name].method().whole_batch and "accumulation" in scenario
            )
            if not is_refused:
                configs[name, scenario] = BandGRPOConfig(str(tmp_path), **given)
    trainer = make_trainer(tmp_path)
    for (name, scenario), config in configs.items():
        set_scenario(trainer, config)
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = "weights" in SCENARIOS[scenario]
        assert "has the gradient of " in probe_loss(trainer), (name, scenario)


ONE_SIDED = {"KLCov": [False, True]}
"""Whether a method's weight differs from the ratio for each sign of the advantage, if not for both."""
STOCK_LOSSES = [
    *({"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "vespo")),
    {"loss_type": "cispo", "epsilon_high": 1.03},
    {"loss_type": "cispo", "epsilon_high": 0.2},
    {"loss_type": "dapo", "delta": 1.5},
]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_every_stock_loss_passes(level, tmp_path, capsys):
    configs = []
    for loss in STOCK_LOSSES:
        for settings in SCENARIOS.values():
            if "delta" in settings:
                continue
            given = {key: value for key, value in settings.items() if key not in OF_BATCH}
            base = {"use_cpu": True, "bf16": False, "report_to": "none", "steps_per_generation": 2}
            configs.append((GRPOConfig(str(tmp_path), **base | loss | given), settings))
    trainer = make(AuditedGRPOTrainer, GRPOConfig, tmp_path)
    for config, settings in configs:
        set_scenario(trainer, config)
        trainer.importance_sampling_level = level
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = "weights" in settings
        assert "has the gradient of " in probe_loss(trainer), (config.loss_type, settings)


@pytest.mark.parametrize("name", METHODS)
def test_its_batch_tells_a_method_from_one_without_bounds(name, tmp_path):
    """For both signs of the advantage: a weight that is not the ratio, or a bias."""
    batch = SyntheticBatch.of(make_trainer(tmp_path))
    method = METHODS[name].method()
    old = "sampling_per_token_logps" if method.old_policy == "rollout" else "old_per_token_logps"
    mask = batch.inputs["completion_mask"] * batch.inputs["tool_mask"]
    read = Batch.read(batch.logp, batch.inputs[old], batch.inputs["advantages"], mask, layout=Rows())
    tokens = method.tokens(read)
    differs = (method.weight(tokens) - tokens.ratio).abs() > 0.02
    bias = method.objective.bias(tokens)
    if bias is not None:
        differs |= bias.abs() > 0.02
    signs = [bool((differs & (mask > 0) & side).any()) for side in (read.advantages > 0, read.advantages < 0)]
    assert signs == ONE_SIDED.get(name, [True, True])


def test_its_line_says_what_was_compared(folder, tmp_path, capsys):
    settings = {
        "beta": 0.05,
        "entropy_coef": 0.01,
        "top_entropy_quantile": 0.5,
        "off_policy_mask_threshold": 0.1,
    }
    train(folder, tmp_path, method="BandPO()", **settings)
    said = [line for line in capsys.readouterr().err.splitlines() if "has the gradient of" in line]
    assert len(said) == 1
    expected = (
        rf"bandpo: the loss with trl {re.escape(trl.__version__)} has the gradient of BandPO\(.*\), [0-9]e[-+]\d\d: "
        r"compared on 8 sequences of 0 to 9 tokens, ratios 0\.\d+ to \d(\.\d)? \(\d+ tokens beyond a bound\), the KL "
        "term, the entropy bonus, high-entropy tokens, the off-policy mask"
    )
    assert re.fullmatch(expected, said[0])


def test_it_leaves_the_trainer_and_the_random_numbers_as_they_are(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.model.eval()
    attributes = dict(vars(trainer))
    metrics = json.dumps(trainer._metrics)
    random = torch.get_rng_state()
    delta, epsilon = trainer.args.delta, trainer.args.epsilon
    probe_loss(trainer)
    assert vars(trainer) == attributes
    assert json.dumps(trainer._metrics) == metrics
    assert torch.equal(torch.get_rng_state(), random)
    assert (trainer.args.delta, trainer.args.epsilon) == (delta, epsilon)
    assert not trainer.model.training
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_it_takes_little_time(tmp_path):
    """About 9 ms of processor time on a server's core."""
    trainer = make_trainer(tmp_path)
    times = []
    for _ in range(10):
        start = time.process_time()
        probe_loss(trainer)
        times.append(time.process_time() - start)
    assert min(times) < 0.04


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


@pytest.mark.parametrize("accumulation", [{}, ACCUMULATED], ids=["", "accumulated"])
@pytest.mark.parametrize(("cls", "settings", "message"), SABOTAGES, ids=str)
def test_a_changed_loss_is_stopped_before_the_first_batch(
    cls, settings, message, accumulation, folder, tmp_path
):
    generated = []

    class Observed(cls):
        def _generate_and_score_completions(self, inputs):
            generated.append(inputs)
            return super()._generate_and_score_completions(inputs)

    config = BandGRPOConfig if issubclass(cls, BandGRPOTrainer) else GRPOConfig
    methods = ["FixedClip(0.2)", "BandPO()", "SAPO()"] if config is BandGRPOConfig else [None]
    for method in methods:
        given = ONCE | accumulation | settings | {"loss_type": "grpo"}
        if method is not None:
            given |= {"method": method, "accept_idle_clip": True}
        if cls is TokenMean and method == "SAPO()":
            # SAPO is TRL's own loss_type, and under another one TRL would clip with an epsilon that is not there.
            with pytest.raises(TypeError, match="this config names a clip rule or method"):
                train(folder, tmp_path, Observed, config, **given)
            continue
        with pytest.raises(RunProblem, match=rf"with trl {trl.__version__} is not that of (.|\n)*") as caught:
            train(folder, tmp_path, Observed, config, **given)
        if method != "SAPO()":
            assert re.search(message, str(caught.value)), str(caught.value)
        assert not generated


def test_a_changed_loss_trains_with_a_warning_or_without_the_probe(folder, tmp_path):
    with pytest.warns(UserWarning, match="is 2 times as expected.* set certify='warn' to train on"):
        train(folder, tmp_path, Doubled, certify="warn")
    train(folder, tmp_path, Doubled, certify="off")


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
    # With TRL's own settings for the method, its loss would not be audited.
    with pytest.raises(RunProblem, match=r"so neither a clip rule nor the audit can act; call super\(\)"):
        train(folder, tmp_path, PassedBy, method="FixedClip(0.02, 0.03)")


class Replaced(BandGRPOTrainer):
    """A loss of its own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        length = inputs["completion_ids"].size(1)
        return -self._get_per_token_logps_and_entropies(model, ids, attention, length)[0].mean()


def test_a_subclass_with_a_loss_of_its_own_is_stopped(folder, tmp_path):
    with pytest.raises(RunProblem, match=r"the loss of Replaced with .* is not that of BandPO\("):
        train(folder, tmp_path, Replaced, method="BandPO()")


def test_a_mixin_sees_a_copy_that_the_trainer_below_makes(folder, tmp_path, capsys):
    class Theirs(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, dict(inputs))

    class Mine(AuditMixin, Theirs):
        certify = "stop"

    train(folder, tmp_path, Mine, GRPOConfig, loss_type="grpo")
    assert "has the gradient of " in capsys.readouterr().err


class OwnInputs(BandGRPOTrainer):
    """A loss that reads what its own generation adds, and attributes of its own constructor."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.seen = 0

    def _generate_and_score_completions(self, inputs):
        return super()._generate_and_score_completions(inputs) | {"mine": torch.ones(len(inputs))}

    def _compute_loss(self, model, inputs):
        self.seen += len(inputs["mine"])
        return super()._compute_loss(model, inputs)


def test_a_loss_that_needs_inputs_of_its_own_is_not_compared_and_trains(folder, tmp_path, capsys):
    trainer = train(folder, tmp_path, OwnInputs)
    assert trainer.seen == 16
    assert "the loss of OwnInputs was not compared with Band" in capsys.readouterr().err


@dataclass(frozen=True)
class NarrowerWithAge(TokenRule):
    """A rule of a user's own, which needs the age of the weights that sampled."""

    width: float = 0.4

    def for_tokens(self, tokens):
        width = self.width / (1 + tokens.age)
        return RatioBounds(log_lower=-width, log_upper=width)


def test_a_rule_that_depends_on_the_age_is_compared(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.method = Method(NarrowerWithAge())
    assert "has the gradient of NarrowerWithAge(" in probe_loss(trainer)


def test_the_audit_counts_the_tokens_that_have_a_gradient(folder, tmp_path):
    """Of as many in both runs, up to the first update, a fifth where TRL takes the fifth with the highest entropy."""
    tokens = []
    for share in (1.0, 0.2):
        trainer = train(folder, tmp_path, top_entropy_quantile=share, logging_steps=1)
        tokens.append(named_rows(trainer.state.log_history)[0]["audit/tokens"])
    assert tokens[1] / tokens[0] == pytest.approx(0.2, abs=0.03)


# --- Other versions of TRL


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


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize("method", ["BandPO()", "Method(FixedClip(0.2), DropOutside())"])
def test_another_loss_of_trl_is_trained_rightly_or_stopped_by_one_sentence(
    method, name, tmp_path, monkeypatch
):
    changes, settings, message = MUTATIONS[name]
    given = {key: value for key, value in settings.items() if key != "weights"}
    base = {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "steps_per_generation": 2,
        "num_iterations": 2,
    }
    config = BandGRPOConfig(str(tmp_path), method=method, **{"loss_type": "dapo"} | base | UNWATCHED | given)
    trainer = make_trainer(tmp_path)
    set_scenario(trainer, config)
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = "weights" in settings
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", patched(*changes))
    if message is TRAINS:
        assert "has the gradient of " in probe_loss(trainer)
        return
    with pytest.raises(RunProblem, match=message) as caught:
        probe_loss(trainer)
    assert f"trl {trl.__version__}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("certify", ["warn", "off"])
@pytest.mark.parametrize("name", ["advantages read first", "clip metrics renamed"])
def test_a_loss_without_the_method_stops_even_if_it_is_not_compared(
    name, certify, folder, tmp_path, monkeypatch
):
    """At its first step, before an update."""
    changes, _, message = MUTATIONS[name]
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", patched(*changes))
    updates = []

    class Observed(BandGRPOTrainer):
        def training_step(self, *arguments, **named):
            loss = super().training_step(*arguments, **named)
            updates.append(loss)
            return loss

    with pytest.raises(RunProblem, match=message):
        train(folder, tmp_path, Observed, certify=certify, loss_type="dapo")
    assert not updates


class OldRenamed(GRPOTrainer):
    """TRL with another name of the old log-probabilities, in its batch and in its loss."""

    _compute_loss = patched(('inputs.get("old_per_token_logps")', 'inputs.get("old_logps")'))

    def _generate_and_score_completions(self, inputs):
        outputs = super()._generate_and_score_completions(inputs)
        outputs["old_logps"] = outputs.pop("old_per_token_logps")
        return outputs


class OverOldRenamed(BandGRPOTrainer, OldRenamed):
    pass


@pytest.mark.parametrize("certify", ["warn", "off"])
def test_renamed_old_log_probabilities_stop_even_if_they_are_not_compared(certify, folder, tmp_path):
    """Else every ratio would be 1, and no clip would act."""
    with pytest.raises(RunProblem, match="has no entry 'old_per_token_logps' in its batches, which in trl"):
        train(folder, tmp_path, OverOldRenamed, method="BandPO()", certify=certify)


class Copying(GRPOTrainer):
    """A class below bandpo's that gives TRL's loss a copy of its inputs, which the method does not reach."""

    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, dict(inputs))


class OverACopy(BandGRPOTrainer, Copying):
    pass


@pytest.mark.parametrize("certify", ["stop", "off"])
def test_a_copy_that_the_method_does_not_reach_is_stopped(certify, folder, tmp_path):
    with pytest.raises(RunProblem, match=r"or from a copy of its inputs, so BandPO.* would have no effect"):
        train(folder, tmp_path, OverACopy, method="BandPO()", certify=certify)


class TermBefore(BandGRPOTrainer):
    """Log-probabilities for a metric of its own, before TRL's loss."""

    def compute_loss(self, model, inputs, *arguments, **named):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        length = inputs["completion_ids"].shape[1]
        with torch.no_grad():
            self._get_per_token_logps_and_entropies(model, ids, attention, length)
        return super().compute_loss(model, inputs, *arguments, **named)

    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        length = inputs["completion_ids"].shape[1]
        with torch.no_grad():
            self._get_per_token_logps_and_entropies(model, ids, attention, length)
        return super()._compute_loss(model, inputs)


@pytest.mark.parametrize("method", ["FixedClip(0.02, 0.03)", "BandPO()"])
def test_a_term_before_the_loss_is_neither_audited_nor_recorded(method, folder, tmp_path):
    rows, tokens = [], []
    for cls in (TermBefore, BandGRPOTrainer):
        record = tmp_path / cls.__name__
        trainer = train(folder, tmp_path, cls, method=method, record=str(record), logging_steps=1)
        tokens.append(
            [row["audit/tokens"] for row in named_rows(trainer.state.log_history) if "audit/tokens" in row]
        )
        rows.append(sum(path.stat().st_size for path in record.rglob("*") if path.is_file()))
    assert tokens[0] == tokens[1]
    assert tokens[0]
    assert rows[0] == pytest.approx(rows[1], rel=0.02)


def test_another_trainer_of_the_process_keeps_its_forward_pass(tmp_path):
    probed, other = make_trainer(tmp_path), make_trainer(tmp_path)
    batch = SyntheticBatch.of(probed)
    ids = torch.randint(0, 8, (2, 6))
    found = {}

    class Probed(type(probed)):
        def _compute_loss(self, model, inputs):
            forward = other._get_per_token_logps_and_entropies
            found["logp"] = forward(other.model, ids, torch.ones_like(ids), 3)[0].detach()
            return super()._compute_loss(model, inputs)

    probed.__class__ = Probed
    assert "has the gradient of " in probe_loss(probed)
    expected = other._get_per_token_logps_and_entropies(other.model, ids, torch.ones_like(ids), 3)[0]
    assert torch.equal(found["logp"], expected)
    assert batch.logp.shape != expected.shape


def test_a_function_of_trl_that_is_gone_is_named(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    monkeypatch.delattr(GRPOTrainer, "_get_per_token_logps_and_entropies")
    with pytest.raises(RunProblem, match=r"AttributeError on .* '_get_per_token_logps_and_entropies'"):
        probe_loss(trainer)


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


@pytest.mark.parametrize("name", MASKS)
def test_a_patched_mask_is_stopped(name, folder, tmp_path, monkeypatch):
    function, settings = MASKS[name]
    monkeypatch.setattr(GRPOTrainer, name, function)
    with pytest.raises(RunProblem, match="its gradient differs"):
        train(folder, tmp_path, **settings)


def test_an_audit_of_another_loss_is_told(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", patched(*MUTATIONS["a clip of its own"][0]))
    with pytest.warns(UserWarning, match=r"is not that of FixedClip\(low=0.2.*: another clip or mask"):
        train(folder, tmp_path, AuditedGRPOTrainer, GRPOConfig)


@pytest.mark.parametrize("settings", [{}, ACCUMULATED], ids=str)
def test_the_parameters_of_a_training_step_get_the_gradient_of_policy_loss(settings, folder, tmp_path):
    """By a second pass over the batch, for a method that TRL does not implement, after the ratios have moved."""
    compared = []

    class Compared(uneven(BandGRPOTrainer)):
        def _compute_loss(self, model, inputs):
            self.loss_inputs = dict(inputs)
            return super()._compute_loss(model, inputs)

        def training_step(self, model, *arguments, **named):
            before = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
            loss = super().training_step(model, *arguments, **named)
            inputs = self.loss_inputs
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            length = inputs["completion_ids"].shape[1]
            logp = GRPOTrainer._get_per_token_logps_and_entropies(self, model, ids, attention, length)[0]
            old = inputs.get("old_per_token_logps")
            old = logp.detach() if old is None else old
            outputs = policy_loss(
                logp,
                old,
                inputs["advantages"],
                inputs["completion_mask"],
                method=self.method,
                aggregation="bnpo",
            )
            expected = torch.autograd.grad(
                outputs.loss / self.current_gradient_accumulation_steps,
                list(model.parameters()),
                allow_unused=True,
            )
            moved = (logp.detach() - old).abs().max().item()
            for parameter, start, gradient in zip(model.parameters(), before, expected, strict=True):
                if gradient is not None:
                    torch.testing.assert_close(parameter.grad - start, gradient, rtol=2e-3, atol=2e-5)
            compared.append(moved)
            return loss

    method = "Method(Band(KL(), 1e-3), DropOutside())"
    train(
        folder, tmp_path, Compared, method=method, loss_type="bnpo", gradient_checkpointing=False, **settings
    )
    assert max(compared) > 1e-3


TWO_PROCESSES = """
import sys
from pathlib import Path
from test_trl import LOG, make
from bandpo.integrations.trl import BandGRPOConfig, BandGRPOTrainer

out, said = Path(sys.argv[1]), []
for method in ("BandPO()", "KLCov()", "M2PO()", "BAPO()"):
    settings = LOG | {"entropy_coef": 0.01, "beta": 0.02, "method": method, "max_steps": 1}
    settings["gradient_accumulation_steps"] = 1
    trainer = make(BandGRPOTrainer, BandGRPOConfig, out / method, **settings)
    trainer._announce = said.append
    trainer.train()
(out / f"{trainer.accelerator.process_index}.txt").write_text(chr(10).join(said))
"""


@pytest.mark.slow
def test_it_runs_on_two_processes(tmp_path):
    run_on_processes(TWO_PROCESSES, tmp_path)
    for rank in (0, 1):
        said = (tmp_path / f"{rank}.txt").read_text()
        assert said.count("has the gradient of ") == 4
