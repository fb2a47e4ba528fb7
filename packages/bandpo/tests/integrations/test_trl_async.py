"""TRL's own asynchronous trainer with a method: on old data, on a CPU, against `bandpo.policy_loss` in float64."""

import copy
import functools
import json
from types import SimpleNamespace

import pytest
import torch

from helpers.frameworks import needs

needs("trl", oldest="1.16.0")

import trl
from accelerate import Accelerator
from transformers import TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl_async import CPU, SETTINGS, make_async, sampler, varied_reward

from bandpo import policy_loss
from bandpo.audit.metrics import LOGGED
from bandpo.core.errors import InvalidValue, RunProblem
from bandpo.core.methods import METHODS
from bandpo.core.schedules import TrainingState
from bandpo.core.text import as_method
from bandpo.integrations.trl import AuditMixin, BandAsyncGRPOConfig, BandAsyncGRPOTrainer, BandGRPOConfig
from bandpo.integrations.trl.async_samples import SAMPLES
from bandpo.testing import check_record
from bandpo_lab.tasks import multiplication
from bandpo_lab.training.async_on_cpu import trl_on_a_cpu
from contract import Contract, make_batch, written
from pages import ASYNCHRONOUS, ROOT, framework_blocks
from processes import run_on_processes
from rlvet.records.record import read_record

WHOLE_BATCH = [name for name, paper in METHODS.items() if paper.method().whole_batch]


def moved(inputs, spread, old=None):
    """Return a batch of a loss with other old log-probabilities and with varied advantages.

    Args:
        inputs: The batch.
        spread: The standard deviation (nats) of what is added to the old log-probabilities.
        old: The old log-probabilities; by default those of the batch.
    """
    old = inputs["old_log_probs"] if old is None else old
    generator = torch.Generator().manual_seed(1)
    noise = spread * torch.randn(old.shape, generator=generator)
    advantages = torch.randn(64, generator=generator)
    return inputs | {
        "old_log_probs": (old + noise).clamp(max=-1e-3),
        "advantages": advantages[inputs["segment_id"]],
    }


class Captured(BandAsyncGRPOTrainer):
    """A trainer that keeps the batches of its losses, and the weights at the last one."""

    def compute_loss(self, model, inputs, *arguments, **named):
        if not self._probing:
            self.__dict__.setdefault("batches", []).append({name: x.clone() for name, x in inputs.items()})
        return super().compute_loss(model, inputs, *arguments, **named)


@pytest.fixture(autouse=True)
def _accelerator():
    """Construct the state of accelerate again, which each construction of a config of TRL drops."""
    Accelerator(cpu=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("async")


@pytest.fixture(scope="module")
def trained(folder):
    """A training of six updates of two micro-batches, on data that is two or three versions old."""
    with trl_on_a_cpu():
        trainer = make_async(
            folder, Captured, gradient_accumulation_steps=2, record=str(folder / "tokens"), method="BandPO()"
        )
        trainer.train()
        yield trainer


def packed_gradient(trainer, inputs):
    """Return the gradient of the trainer's loss by the log-probability at each position of the packed row."""
    kept = {}

    def model(**arguments):
        outputs = trainer.model(**arguments)
        outputs.log_probs.retain_grad()
        kept["logp"] = outputs.log_probs
        return outputs

    loss = BandAsyncGRPOTrainer.compute_loss(trainer, model, inputs)
    (gradient,) = torch.autograd.grad(loss, kept["logp"])
    return loss, kept["logp"].detach(), gradient


def padded(x, segments, fill=0.0):
    """Return a value per packed token with one row for each sequence, in float64."""
    count = int(segments.max()) + 1
    lengths = torch.bincount(segments, minlength=count)
    column = torch.cat([torch.arange(int(length)) for length in lengths])
    table = torch.full((count, int(lengths.max())), fill, dtype=torch.float64)
    return table.index_put((segments, column), x.double())


def expected_gradient(method, logp, inputs, state=None):
    """Return the gradient of `policy_loss`, in padded rows and float64, divided as TRL divides its loss."""
    selected = inputs["token_index"] >= 0
    positions = inputs["token_index"][selected]
    segments = inputs["segment_id"][selected]
    tokens = logp.flatten()[positions].double().requires_grad_()
    loss = policy_loss(
        padded(tokens, segments, -1.0),
        padded(inputs["old_log_probs"][selected], segments, -1.0),
        padded(inputs["advantages"][selected], segments),
        padded(torch.ones_like(tokens.detach()), segments),
        method=method,
        aggregation="sum",
        state=state,
    ).loss
    (gradient,) = torch.autograd.grad(loss, tokens)
    at_positions = torch.zeros(logp.numel(), dtype=torch.float64).index_add(0, positions, gradient)
    return loss.detach(), at_positions.view(logp.shape)


@pytest.mark.parametrize("policy", ["as sampled", "near the sampler", "far from the sampler"])
@pytest.mark.parametrize("name", METHODS)
def test_the_gradient_of_every_method(name, policy, trained, monkeypatch):
    method = METHODS[name].method()
    monkeypatch.setattr(trained, "method", method)
    monkeypatch.setattr(trained, "_probing", True)
    inputs = trained.batches[-1]
    if policy == "near the sampler":
        _, logp, _ = packed_gradient(trained, inputs)
        inputs = moved(inputs, 0.02, logp.flatten()[inputs["token_index"]])
    elif policy == "far from the sampler":
        inputs = moved(inputs, 1.2)
    loss, logp, gradient = packed_gradient(trained, inputs)
    expected_loss, expected = expected_gradient(method, logp, inputs)
    scale = float(inputs["global_n_tokens"][0]) * 2
    error = (gradient.double() * scale - expected).abs().max() / expected.abs().max().clamp(min=1e-12)
    assert error < 1e-6
    assert loss.item() == pytest.approx(expected_loss.item() / scale, rel=1e-4, abs=1e-6)
    if policy == "near the sampler":
        assert gradient.abs().max() > 0


def test_the_data_is_old_and_its_age_is_recorded(trained, folder):
    losses = list(read_record(folder / "tokens"))
    assert [loss.step for loss in losses] == [step for step in range(6) for _ in range(2)]
    ages = [int(loss.lag[loss.mask].min()) for loss in losses]
    assert ages == [int(loss.lag[loss.mask].max()) for loss in losses]
    # Of the first micro-batches all are fresh: the first version is the only one. Then TRL has requested the first
    # micro-batch of an update before the one before it.
    assert ages == [0, 0, 1, 1, 2, 2, 3, 2, 3, 2, 3, 2]
    first = losses[0]
    assert abs(first.log_ratio[first.mask]).max() < 1e-5
    assert max(abs(loss.log_ratio[loss.mask]).max() for loss in losses[4:]) > 1e-2


def test_the_record_has_what_trl_knows(trained, folder):
    losses = list(read_record(folder / "tokens"))
    first, *_ = losses
    assert first.anchor == "rollout"
    assert first.framework == f"trl {trl.__version__}"
    assert first.sampling == {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    assert (first.logp_rollout == first.logp_old).all()
    assert first.group.tolist() == [0] * 4 + [1] * 4
    assert {loss.generation for loss in losses} == set(range(6))
    for loss in losses:
        texts = [
            trained.processing_class.decode(ids[mask], skip_special_tokens=True)
            for ids, mask in zip(loss.token, loss.mask, strict=True)
        ]
        assert loss.reward.tolist() == pytest.approx(varied_reward(texts))
        ends = [int(ids[mask][-1]) for ids, mask in zip(loss.token, loss.mask, strict=True)]
        is_end = [end == trained.processing_class.eos_token_id for end in ends]
        assert loss.truncated.tolist() == [not flag for flag in is_end]
    assert any(loss.truncated.any() for loss in losses)


def test_what_is_logged(trained):
    rows = [row for row in trained.state.log_history if "loss" in row]
    assert len(rows) == 6
    shown = {f"audit/{name}" for name in LOGGED}
    assert shown & rows[-1].keys() >= {"audit/tokens", "audit/clip_low", "audit/inert"}
    assert "audit/entropy" in rows[-1]["audit_detail"]
    for row in rows:
        assert row["radius"] == pytest.approx(0.05)
        # TRL's clip metrics are means of micro-batches, the audit's are over all tokens.
        assert row["clip_ratio/region_mean"] == pytest.approx(
            row["audit/clip_low"] + row["audit/clip_high"], abs=0.02
        )
    assert any(row["clip_ratio/region_mean"] > 0 for row in rows)
    assert [row["age_max"] for row in rows] == [0, 1, 2, 3, 3, 3]
    assert [row["age_mean"] for row in rows[:3]] == [0, 1, 2]
    assert all(2 < row["age_mean"] < 3 for row in rows[3:])
    assert rows[0]["objective"] == pytest.approx(-rows[0]["loss"] / 1, rel=1e-3, abs=1e-3)


def test_trls_metrics_are_those_of_the_stock_trainer(folder):
    """Of the first step, and the clip metrics of a later one under the same clip."""
    settings = {"max_steps": 3, "method": "FixedClip(0.05, 0.1)"}
    with trl_on_a_cpu():
        ours = make_async(folder / "ours", **settings)
        ours.train()
        stock_settings = {"max_steps": 3, "epsilon": 0.05, "epsilon_high": 0.1}
        stock = make_async(folder / "stock", AsyncGRPOTrainer, AsyncGRPOConfig, **stock_settings)
        stock.train()
    names = (
        "loss",
        "grad_norm",
        "ratio",
        "kl",
        "entropy",
        "reward",
        "sample/staleness_mean",
        "batch/packing_ratio",
    )
    clips = [name for name in stock.state.log_history[0] if name.startswith("clip_ratio/")]
    assert len(clips) == 5
    for row, expected in zip(ours.state.log_history[:3], stock.state.log_history[:3], strict=True):
        for name in (*names, *clips):
            assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    assert stock.state.log_history[2]["clip_ratio/region_mean"] > 0
    for weight, expected in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        # Adam moves a weight by up to 1e-3 in each update, whatever the size of its gradient.
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-4)


def test_the_loss_is_announced_as_certified(folder, capsys):
    with trl_on_a_cpu():
        make_async(folder / "said", max_steps=1).train()
    said = capsys.readouterr().err
    assert "bandpo: the loss with trl" in said
    assert "has the gradient of BandPO" not in said
    assert "has the gradient of Band(" in said
    assert "ratios and bounds refer to the sampler's log-probabilities" in said


# The comparison before training.


class Halved(BandAsyncGRPOTrainer):
    def compute_loss(self, *arguments, **named):
        return 0.5 * super().compute_loss(*arguments, **named)


def test_another_loss_of_a_subclass_stops_the_run_or_warns(tmp_path):
    with trl_on_a_cpu():
        with pytest.raises(RunProblem, match=r"the loss of Halved .* differs by 0.5"):
            make_async(tmp_path / "stop", Halved).train()
        with pytest.warns(match="the loss of Halved"):
            make_async(tmp_path / "warn", Halved, certify="warn", max_steps=1).train()
        make_async(tmp_path / "off", Halved, certify="off", max_steps=1).train()


def test_the_probe_leaves_the_trainer_as_it_was(tmp_path):
    with trl_on_a_cpu():
        trainer = make_async(tmp_path)
        before = copy.copy(vars(trainer))
        metrics = copy.deepcopy(trainer._metrics)
        trainer._probe_loss()
    assert vars(trainer).keys() == before.keys()
    assert all(vars(trainer)[name] is value for name, value in before.items())
    assert trainer._metrics == metrics


# Settings.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epsilon": 0.1}, r"epsilon=0.1 would have no effect beside method="),
        ({"epsilon_high": 0.3}, r"epsilon_high=0.3 would have no effect beside method="),
        ({"method": "Bnd()"}, r"method: .*did you mean Band"),
        ({"method": "FixedClip(0.2, 28)"}, r"method: at no probability does FixedClip"),
        ({"top_p": 0.9}, r"^top_p=0.9: .* sample with top_p=1.0$"),
        ({"top_k": 5, "min_p": 0.1}, r"^top_k=5, min_p=0.1: .* sample with top_k=0, min_p=None$"),
        ({"repetition_penalty": 1.1}, r"^repetition_penalty=1.1: .* sample with repetition_penalty=1.0$"),
        (
            {"method": "Band(KL(), Linear(0.05, 0.01))"},
            r"Linear\(.*\) depends on the progress .* set max_steps",
        ),
        ({"certify": "perhaps"}, r"certify must be one of stop, warn, off, got 'perhaps'"),
        ({"audit_steps": -1}, r"audit_steps must be at least 0"),
    ],
)
def test_refuses_what_cannot_work(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        BandAsyncGRPOConfig(str(tmp_path), **CPU, **settings)


@pytest.mark.parametrize("name", WHOLE_BATCH)
def test_a_method_of_a_whole_batch_needs_it_in_one_loss(name, tmp_path):
    settings = CPU | {"method": f"{name}()", "gradient_accumulation_steps": 2}
    with pytest.raises(
        ValueError, match=r"^gradient_accumulation_steps=2: .* set it to 1, and token_budget as much"
    ):
        BandAsyncGRPOConfig(str(tmp_path), **settings)
    with pytest.raises(ValueError, match=r"set it to 1, and per_device_train_batch_size as much"):
        BandAsyncGRPOConfig(str(tmp_path), **settings, token_budget=0)
    BandAsyncGRPOConfig(str(tmp_path), **settings | {"gradient_accumulation_steps": 1})


@pytest.mark.parametrize(
    "settings", [{"top_p": None}, {"top_k": -1}, {"min_p": 0.0}, {"repetition_penalty": None}]
)
def test_neutral_sampling_settings_are_accepted(settings, tmp_path):
    BandAsyncGRPOConfig(str(tmp_path), **CPU, **settings)


def test_the_method_is_text_in_the_config(tmp_path):
    made = BandAsyncGRPOConfig(str(tmp_path), method="FixedClip(0.2)", **CPU)
    assert made.method == "FixedClip(low=0.2, high=0.2)"
    again = BandAsyncGRPOConfig(str(tmp_path), method=made.method, **CPU)
    assert again.to_dict() == made.to_dict()
    assert made.to_dict()["epsilon"] is None


def test_a_stock_trainer_refuses_the_config(tmp_path):
    with trl_on_a_cpu():
        trainer = make_async(tmp_path, AsyncGRPOTrainer)
        with pytest.raises(TypeError, match="BandAsyncGRPOTrainer"):
            trainer.train()


def test_another_config_is_refused(tmp_path):
    with pytest.raises(TypeError, match="args must be a BandAsyncGRPOConfig, got BandGRPOConfig"):
        BandAsyncGRPOTrainer("model", varied_reward, BandGRPOConfig(str(tmp_path), num_iterations=2, **CPU))


def test_the_mixin_of_the_other_trainer_is_refused():
    with pytest.raises(TypeError, match=r"AsyncGRPOTrainer, which is no GRPOTrainer.*BandAsyncGRPOTrainer"):
        type("Mine", (AuditMixin, AsyncGRPOTrainer), {})


class ChangesEpsilon(TrainerCallback):
    def __init__(self):
        self.trainer = None

    def on_step_end(self, *_, **__):
        self.trainer.epsilon_high = 0.4


def test_a_callback_that_changes_the_clip_stops_the_run(tmp_path):
    callback = ChangesEpsilon()
    with trl_on_a_cpu():
        trainer = make_async(tmp_path, callbacks=[callback])
        callback.trainer = trainer
        with pytest.raises(
            ValueError, match=r"trainer.epsilon_high was changed from 0.2 to 0.4 during training"
        ):
            trainer.train()


# Schedules and controllers.


def test_a_schedule_follows_the_updates(tmp_path):
    with trl_on_a_cpu():
        trainer = make_async(tmp_path, method="Band(KL(), Linear(0.1, 0.04))", gradient_accumulation_steps=2)
        trainer.train()
    radii = [row["radius"] for row in trainer.state.log_history if "radius" in row]
    assert radii == pytest.approx([0.1 - 0.01 * step for step in range(6)])


def test_a_controller_is_updated_after_each_update(tmp_path):
    controller = "ClipRateController(target=0.01, start=0.001)"
    with trl_on_a_cpu():
        trainer = make_async(tmp_path, method=f"Band(KL(), {controller})", gradient_accumulation_steps=2)
        trainer.train()
    method = as_method(trainer.args.method)
    rows = [row for row in trainer.state.log_history if "radius" in row]
    state = {}
    for row in rows:
        radius = method.resolve(TrainingState(progress=0.0, controller_state=state)).clip.radius
        assert row["radius"] == pytest.approx(radius, rel=1e-5)
        metrics = {name: row[f"audit/{name}"] for name in ("clip_high", "clip_low")}
        state = method.update_controllers(state, metrics)
    assert len({row["radius"] for row in rows}) > 1
    assert trainer._controller_state == pytest.approx(state)


# What TRL does not know.


def test_without_versions_the_age_is_unknown_and_nothing_else_changes(trained, monkeypatch):
    inputs = trained.batches[-1]
    monkeypatch.setattr(trained, "_probing", True)
    _, _, expected = packed_gradient(trained, inputs)
    unknown = inputs[SAMPLES].clone()
    unknown[..., 0, 0] = torch.nan
    for batch in (inputs | {SAMPLES: unknown}, {name: x for name, x in inputs.items() if name != SAMPLES}):
        _, _, gradient = packed_gradient(trained, batch)
        assert torch.equal(gradient, expected)


def train_with(worker, folder, **settings):
    """Train on the samples of a worker, and return the trainer."""
    with trl_on_a_cpu():
        trainer = BandAsyncGRPOTrainer(
            str(multiplication.base_model_path()),
            args=BandAsyncGRPOConfig(str(folder), **SETTINGS | {"num_generations": 32} | settings),
            train_dataset=multiplication.dataset("train", 64),
            rollout_worker=worker,
            weight_transfer=worker,
        )
        trainer.train()
    return trainer


def test_a_worker_with_versions_of_its_own_gives_no_age(tmp_path):
    """Old data is then not taken for data of another policy."""
    pytest.importorskip("pyarrow")
    worker = sampler(num_generations=32)
    get = worker.get

    def unnumbered(*arguments, **named):
        sample = get(*arguments, **named)
        sample.model_version += 1_000
        return sample

    worker.get = unnumbered
    settings = {"per_device_train_batch_size": 64, "max_steps": 4, "learning_rate": 3e-3, "watched": "stop"}
    train_with(worker, tmp_path, record=str(tmp_path / "tokens"), **settings)
    losses = list(read_record(tmp_path / "tokens"))
    assert all(loss.lag is None for loss in losses)
    distances = [abs(loss.log_ratio[loss.mask]).mean() for loss in losses]
    assert distances[0] < 1e-4
    assert min(distances[1:]) > 0.1


@pytest.mark.parametrize(("temperature", "is_told"), [(1.0, False), (0.7, True)])
def test_log_probabilities_at_another_temperature_are_told_at_the_first_batch(temperature, is_told, tmp_path):
    """The tokens of the first batch are fresh, so their ratios should be 1."""
    pytest.importorskip("rlvet")
    worker = sampler(num_generations=32, temperature=temperature)
    settings = {"per_device_train_batch_size": 64, "max_steps": 2, "watched": "stop"}
    record = tmp_path / "tokens"
    if not is_told:
        assert train_with(worker, tmp_path, record=str(record), **settings).state.global_step == 2
        return
    with pytest.raises(RunProblem, match="temperature"):
        train_with(worker, tmp_path, record=str(record), **settings)


# The loss alone, against the contract of all adapters.


class TestAsyncGRPO(Contract):
    """On a trainer that is constructed once, with a model whose log-probabilities are those of the contract."""

    any_method = True
    whole_batch = True

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _trainer(cls, tmp_path_factory):
        with trl_on_a_cpu():
            cls.trainer = make_async(tmp_path_factory.mktemp("contract"), watched="off")
            cls.trainer.model.train()
            yield

    def call(self, cls, batch):
        """Compute a class's loss on rows of tokens packed to their mask, as TRL's collator lays them out."""
        counted = batch.mask.bool()
        tokens = int(counted.sum())
        zeros = torch.zeros_like(batch.mask).long()
        inputs = {
            "attention_mask": counted.long(),
            **dict.fromkeys(("input_ids", "position_ids"), zeros),
            "token_index": (zeros - 1).masked_scatter(counted, torch.arange(tokens)),
            "shift_labels": torch.arange(counted.numel()).view(counted.shape),
            "old_log_probs": batch.logp_old,
            "advantages": batch.advantages[:, None].expand_as(batch.mask),
            "segment_id": torch.arange(len(batch.mask))[:, None].expand_as(batch.mask),
            **dict.fromkeys(("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k"), torch.zeros(1)),
            "tree_max_seqlens": torch.ones(1, 2),
            **dict.fromkeys(
                ("global_n_tokens", "global_n_forward_tokens", "mean_seq_len"), torch.tensor([tokens])
            ),
        }
        logp = batch.logp[counted]
        outputs = SimpleNamespace(log_probs=logp, entropy=-logp.detach())
        self.trainer.current_gradient_accumulation_steps = 1
        return cls.compute_loss(self.trainer, lambda **_: outputs, inputs)

    def ours(self, batch, clip):
        config = BandAsyncGRPOConfig("unused", method=clip, **CPU)
        Accelerator(cpu=True)
        self.trainer.method = config.effective_method
        return self.call(BandAsyncGRPOTrainer, batch)

    def recorded(self, batch, folder):
        from bandpo.audit.recorder import Recorder

        trainer = self.trainer
        trainer.state.global_step = 4
        trainer._recorder = Recorder(
            folder, method="DAPO()", anchor="rollout", framework="trl", sampling={"temperature": 0.9}
        )
        try:
            return self.ours(batch, "DAPO()")
        finally:
            trainer._recorder.close()
            trainer._recorder = None
            trainer.state.global_step = 0

    def test_a_record_has_ids_and_entropies(self, tmp_path):
        pytest.importorskip("pyarrow")
        batch = make_batch(27)
        self.recorded(batch, str(tmp_path))
        loss = written(
            batch,
            logp_rollout=batch.logp_old,
            entropy=-batch.logp,
            tokens=torch.arange(batch.mask.numel()).view(batch.mask.shape),
            step=4,
        )
        check_record(tmp_path, [loss], anchor="rollout", sampling={"temperature": 0.9})

    def stock(self, batch, low, high):
        configured = self.trainer.epsilon_low, self.trainer.epsilon_high
        self.trainer.epsilon_low, self.trainer.epsilon_high = low, high
        try:
            return self.call(AsyncGRPOTrainer, batch)
        finally:
            self.trainer.epsilon_low, self.trainer.epsilon_high = configured

    test_sequence_level_ratios_are_refused = None  # GSPO and others are supported


# The page.


def test_the_example_of_the_page(tmp_path, monkeypatch):
    """With stand-ins for the model, the reward and the data, as these need a GPU and a server."""
    made = []

    class Trainer:
        def __init__(self, *arguments):
            made.extend(arguments)

        def train(self):
            made.append("trained")

    config = functools.partial(BandAsyncGRPOConfig, **CPU)
    monkeypatch.setattr("bandpo.integrations.trl.BandAsyncGRPOTrainer", Trainer, raising=False)
    monkeypatch.setattr("bandpo.integrations.trl.BandAsyncGRPOConfig", config, raising=False)
    monkeypatch.chdir(tmp_path)
    (block,) = framework_blocks(ASYNCHRONOUS, ROOT / "docs/trl.md")
    exec(block, {"reward_funcs": "reward", "train_dataset": "data"})
    name, reward, args, data, trained = made
    assert (name, reward, data, trained) == ("Qwen/Qwen3-4B", "reward", "data", "trained")
    assert args.method == "BandAbove(divergence=KL(), radius=None, low=0.2, max_ratio=10.0)"


# Two processes.

TWO_PROCESSES = """
import json, sys
from pathlib import Path
import torch
from test_trl_async import Captured, moved, packed_gradient
from trl_async import make_async
from bandpo.core.methods import METHODS
from bandpo_lab.training.async_on_cpu import trl_on_a_cpu

out = Path(sys.argv[1])
with trl_on_a_cpu():
    trainer = make_async(out, Captured, max_steps=3, record=str(out / "tokens"), method="BandPO()")
    trainer.train()
    rank = trainer.accelerator.process_index
    inputs = moved(trainer.batches[-1], 0.3)
    trainer._probing = True
    gradients = {}
    for name in METHODS:
        trainer.method = METHODS[name].method()
        loss, logp, gradient = packed_gradient(trainer, inputs)
        gradients[name] = gradient
torch.save({"inputs": inputs, "logp": logp, "gradients": gradients}, out / f"{rank}.pt")
rows = [row for row in trainer.state.log_history if "loss" in row]
(out / f"{rank}.json").write_text(json.dumps(rows))
"""


@pytest.mark.slow
def test_gradients_of_two_processes_are_those_of_the_whole_batch(tmp_path):
    run_on_processes(TWO_PROCESSES, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    # One packed row of both.
    offset = ranks[0]["logp"].numel()
    samples = int(ranks[0]["inputs"]["segment_id"].max()) + 1
    parts = []
    for rank, shift, first in zip(ranks, (0, offset), (0, samples), strict=True):
        selected = rank["inputs"]["token_index"] >= 0
        part = {name: rank["inputs"][name][selected] for name in ("old_log_probs", "advantages")}
        part["token_index"] = rank["inputs"]["token_index"][selected] + shift
        part["segment_id"] = rank["inputs"]["segment_id"][selected] + first
        parts.append(part)
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    logp = torch.cat([rank["logp"].flatten() for rank in ranks])
    tokens = float(ranks[0]["inputs"]["global_n_tokens"][0])
    assert tokens == len(whole["token_index"])
    for name in METHODS:
        _, expected = expected_gradient(METHODS[name].method(), logp, whole)
        # torch's data parallelism takes the mean of the gradients of the two processes.
        gradient = torch.cat([rank["gradients"][name].flatten() for rank in ranks]).double() / 2
        expected = expected / tokens
        # TRM drops every sequence of this batch.
        error = (gradient - expected).abs().max() / expected.abs().max().clamp(min=1e-12)
        assert error < 1e-6, name
    losses = list(read_record(tmp_path / "tokens"))
    assert sorted((loss.step, int(loss.lag[loss.mask].max())) for loss in losses) == [
        (0, 0),
        (0, 0),
        (1, 1),
        (1, 1),
        (2, 2),
        (2, 2),
    ]
    logged = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    shared = [
        name for name in logged[1][-1] if name.startswith(("audit/", "clip_ratio/", "objective", "radius"))
    ]
    assert len(shared) > 10
    for row, other in zip(*logged, strict=True):
        for name in shared:
            assert row.get(name) == other.get(name), name


class Spoiling(TrainerCallback):
    """Sets a weight to NaN after the third step."""

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step == 3:
            with torch.no_grad():
                model.get_parameter("model.norm.weight")[0] = torch.nan


@pytest.mark.filterwarnings("ignore")
def test_a_weight_that_is_not_finite_is_named(tmp_path):
    message = r"^logp holds nan, .*After step 3, the weight model\.norm\.weight is NaN or infinite$"
    with trl_on_a_cpu(), pytest.raises(InvalidValue, match=message):
        make_async(tmp_path, callbacks=[Spoiling()]).train()
