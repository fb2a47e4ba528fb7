"""The probe of TRL's trainer: an error before training only where the gradient of the loss is not the method's."""

import json
import re
import time
from dataclasses import dataclass

import pytest
import torch

from helpers.frameworks import needs

needs("trl")

import trl
from integrations.sabotages.trl import ACCUMULATED, MUTATIONS, Doubled, PassedBy, patched, train, uneven
from test_trl import make
from test_trl_gradients import OF_BATCH, SCENARIOS, UNWATCHED, make_trainer, set_scenario
from trl import GRPOConfig, GRPOTrainer

import byte_model
from bandpo import Batch, Method, RatioBounds, Rows, policy_loss
from bandpo.core.errors import RunProblem
from bandpo.core.methods import METHODS
from bandpo.core.rules import TokenRule
from bandpo.integrations.trl import AuditedGRPOTrainer, AuditMixin, BandGRPOConfig, BandGRPOTrainer
from bandpo.integrations.trl.probe import UNSEEN, GRPOSubject, probe_loss
from processes import run_on_processes
from rlvet.runs.configs import TRL_CLIPS
from rlvet.runs.quantities import named_rows

pytestmark = pytest.mark.filterwarnings("ignore::bandpo.core.errors.BandWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return byte_model.save(tmp_path_factory.mktemp("model"))


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


ONE_SIDED = {"KLCov": [False, True], "ClipCov": [True, False]}
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
    subject = GRPOSubject(make_trainer(tmp_path))
    inputs = subject.inputs
    method = METHODS[name].method()
    old = "sampling_per_token_logps" if method.old_policy == "rollout" else "old_per_token_logps"
    mask = inputs["completion_mask"] * inputs["tool_mask"]
    read = Batch.read(subject.tokens.logp, inputs[old], inputs["advantages"], mask, layout=Rows())
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
        r"compared on 32 sequences of 0 to \d+ tokens, ratios 0\.\d+ to \d+ \(\d+ tokens beyond a bound\), "
        rf"the KL term, the entropy bonus, high-entropy tokens, the off-policy mask; not compared: {UNSEEN}"
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


def test_a_subclass_that_passes_the_method_by_is_stopped(folder, tmp_path):
    with pytest.raises(TypeError, match=r"call super\(\)\._compute_loss in a subclass"):
        train(folder, tmp_path, PassedBy, method="BandPO()")
    # With TRL's own settings for the method, its loss would not be audited.
    with pytest.raises(RunProblem, match=r"so neither a clip rule nor the audit can act; call super\(\)"):
        train(folder, tmp_path, PassedBy, method="FixedClip(0.02, 0.03)")


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
    assert GRPOSubject(probed).tokens.logp.shape != expected.shape


def test_a_function_of_trl_that_is_gone_is_named(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    monkeypatch.delattr(GRPOTrainer, "_get_per_token_logps_and_entropies")
    with pytest.raises(RunProblem, match=r"AttributeError on .* '_get_per_token_logps_and_entropies'"):
        probe_loss(trainer)


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
