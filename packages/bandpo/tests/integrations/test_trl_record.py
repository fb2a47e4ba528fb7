"""TRL's trainers write records, which changes nothing in training and replays to what they logged."""

import warnings
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch

from helpers.frameworks import needs

needs("trl")

from test_trl import LOG, SETTINGS, half, make, varied_reward
from trl import GRPOConfig, GRPOTrainer

from bandpo.integrations.trl import AuditedGRPOTrainer, AuditMixin, BandGRPOConfig, BandGRPOTrainer
from bandpo.replay.blocked_tokens import decoder
from bandpo.replay.record import RUN, method_of, replay_record
from bandpo.testing import check_record
from bandpo_lab.tasks import multiplication
from processes import run_on_processes
from rlvet import diagnose
from rlvet.records.record import read_record
from rlvet.records.recorded_advantages import RecordedAdvantages

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.filterwarnings("ignore::bandpo.core.errors.BandWarning")


@pytest.mark.parametrize(
    "method", ["Band(KL(), 1e-3)", "GSPO(1e-3, 1e-3)", "Band(KL(), Linear(0.01, 0.001))"]
)
def test_a_record_changes_nothing_and_replays_to_what_was_logged(method, tmp_path):
    once = {"logging_strategy": "steps", "logging_steps": 4, "max_steps": 4, "audit_detail": True}
    weights, rows = [], []
    for name in ("without", "with"):
        settings = once | ({"record": str(tmp_path / "tokens")} if name == "with" else {})
        trainer = make(BandGRPOTrainer, BandGRPOConfig, tmp_path / name, method=method, **settings)
        trainer.train()
        weights.append(list(trainer.model.parameters()))
        rows.append(next(row for row in trainer.state.log_history if "audit/tokens" in row))
    for ours, stock in zip(*weights, strict=True):
        assert torch.equal(ours, stock)
    # The record has the run's tokenizer, also where the run saved no checkpoint.
    ids = next(read_record(tmp_path / "tokens")).token[0].tolist()
    assert decoder(tmp_path / "tokens")(ids) == trainer.processing_class.decode(ids)
    seen = replay_record(tmp_path / "tokens")
    found = {f"audit/{name}": value for name, value in seen.audits[RUN].metrics().items()}
    logged = {name: rows[1][name] for name in found if name in rows[1]}
    assert len(logged) > 20
    assert {name: found[name] for name in logged} == pytest.approx(logged, rel=1e-3, abs=1e-7)
    assert logged["audit/clip_high"] + logged["audit/clip_low"] > 0
    if method_of(seen.setup).level == "token":
        for name in ("clip 0.2", "Band"):
            metrics = seen.audits[name].metrics()
            assert metrics["clip_low"] == pytest.approx(rows[1][f"audit/if/{name}/clip_low"], abs=1e-7)
    assert seen.setup.framework == "trl"
    assert sorted(seen.by_step[RUN]) == [0, 1, 2, 3]


def test_the_record_holds_what_the_loss_was_given(tmp_path):
    """Log-probabilities, rewards, groups and cuts are computed anew here, from TRL's batch."""
    losses = []

    class Recorded(AuditedGRPOTrainer):
        record = str(tmp_path / "tokens")
        certify = "off"  # the probe's loss is none of the run

        def _generate_and_score_completions(self, inputs):
            outputs = super()._generate_and_score_completions(inputs)
            texts = self.processing_class.batch_decode(outputs["prompt_ids"])
            self.prompts_in_order = list(dict.fromkeys(texts))
            return outputs

        def _compute_loss(self, model, inputs):
            tokenizer, ids, mask = self.processing_class, inputs["completion_ids"], inputs["completion_mask"]
            texts = [
                tokenizer.decode(row[here > 0], skip_special_tokens=True)
                for row, here in zip(ids, mask, strict=True)
            ]
            prompts = tokenizer.batch_decode(inputs["prompt_ids"])
            numbers = {prompt: number for number, prompt in enumerate(self.prompts_in_order)}
            tokens = torch.cat([inputs["prompt_ids"], ids], 1)
            attention = torch.cat([inputs["prompt_mask"], mask], 1)
            with torch.no_grad():  # as stock TRL does, which nothing records
                stock = GRPOTrainer._get_per_token_logps_and_entropies
                logp = stock(self, model, tokens, attention, ids.shape[1])[0]
            generation, call = divmod(len(losses), 4)
            loss = {
                "logp": logp,
                "logp_old": inputs["old_per_token_logps"],
                "advantages": inputs["advantages"],
                "mask": mask,
                "tokens": ids,
                "reward": varied_reward(texts),
                "group": [numbers[prompt] for prompt in prompts],
                "truncated": ~((ids == tokenizer.eos_token_id) & (mask > 0)).any(1),
                "step": self.state.global_step,
                "generation": generation,
                "update": call // 2,
            }
            losses.append({name: torch.as_tensor(values).clone() for name, values in loss.items()})
            return super()._compute_loss(model, inputs)

    trainer = make(Recorded, GRPOConfig, tmp_path / "run", **LOG | {"temperature": 0.8, "top_p": 1.0})
    trainer.train()
    assert len(losses) == 8
    check_record(tmp_path / "tokens", losses)
    assert next(iter(read_record(tmp_path / "tokens"))).sampling["temperature"] == 0.8


def group_sizes(folder):
    """Return the number of answers of each group of a record, by the generated batch and the group's number."""
    recorded = RecordedAdvantages.of(read_record(folder))
    assert not np.isnan(recorded.group).any()
    return Counter(zip(recorded.batch.tolist(), recorded.group.tolist(), strict=True))


def formula(folder):
    """Return what `rlvet diagnose` says of the advantages of a record."""
    (note,) = [note for note in diagnose(folder).notes if note.startswith("advantages")]
    return note


README = {
    "num_generations": 16,
    "per_device_train_batch_size": 24,
    "steps_per_generation": 8,
    "num_iterations": 1,
}
"""The settings of the program of README, with a quarter of its answers."""
SPLIT_BATCHES = [
    README | {"max_steps": 24},
    README | {"gradient_accumulation_steps": 4, "max_steps": 6},
    README | {"num_iterations": 2, "max_steps": 48},
    README | {"max_steps": 24, "eval_strategy": "steps", "eval_steps": 5, "per_device_eval_batch_size": 16},
]


@pytest.mark.parametrize(
    "settings", SPLIT_BATCHES, ids=["updates", "accumulation", "iterations", "evaluation"]
)
def test_a_group_is_whole_though_its_answers_are_in_several_losses(settings, tmp_path):
    folder = tmp_path / "tokens"
    with_evaluation = partial(BandGRPOTrainer, eval_dataset=multiplication.dataset("train", 4))
    make(with_evaluation, BandGRPOConfig, tmp_path / "run", record=str(folder), **settings).train()
    assert group_sizes(folder) == {(batch, group): 16 for batch in range(3) for group in range(12)}
    assert formula(folder) == "advantages are those of GRPO, in all 3 batches"
    finding = next(one for one in diagnose(folder).tested if one.subject == "missing answers of a group")
    assert (finding.ok, finding.figure) == (True, 1)


def test_a_prompt_that_is_drawn_twice_has_two_groups(tmp_path):
    folder = tmp_path / "tokens"
    settings = README | {"max_steps": 8}
    trainer = make(BandGRPOTrainer, BandGRPOConfig, tmp_path / "run", record=str(folder), **settings)
    trainer.train_dataset = trainer.train_dataset.select([0] * 12)
    trainer.train()
    assert set(group_sizes(folder).values()) == {16}
    assert formula(folder) == "advantages are those of GRPO, in all 1 batches"


def test_of_a_trainer_that_leaves_answers_out_equal_prompts_are_a_group(tmp_path):
    """Then the place of an answer in the batch does not tell its group."""

    class Filtered(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            outputs = super()._generate_and_score_completions(inputs)
            rows = len(outputs["completion_ids"])
            kept = torch.arange(rows) % 4 != 1
            return {
                name: value[kept] if torch.is_tensor(value) and value.ndim and len(value) == rows else value
                for name, value in outputs.items()
            }

    class Recorded(AuditMixin, Filtered):
        record = str(tmp_path / "tokens")

    settings = README | {"max_steps": 8}
    make(Recorded, GRPOConfig, tmp_path / "run", **settings).train()
    assert sorted(group_sizes(tmp_path / "tokens").values()) == [12] * 12
    assert all(
        loss.reward is None for loss in read_record(tmp_path / "tokens")
    )  # whose they are is not known


def test_a_metric_and_a_rule_get_the_groups(tmp_path):
    """The metric ``luck`` needs them, and a rule of groups does not get those of a single loss."""
    settings = README | {
        "max_steps": 2,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "audit_detail": True,
    }
    groups = []

    class Seen(BandGRPOTrainer):
        def _training_state(self, inputs):
            state = super()._training_state(inputs)
            groups.append(None if state.group is None else state.group.tolist())
            return state

    trainer = make(Seen, BandGRPOConfig, tmp_path, method="Band()", certify="off", **settings)
    trainer.train()
    assert len(groups) == 2
    assert all(set(group) <= set(range(12)) and len(group) == 24 for group in groups)
    assert any("audit/luck" in row for row in trainer.state.log_history)


@pytest.mark.slow
def test_a_stock_trainer_writes_one_too_and_resuming_appends(tmp_path):
    class Recorded(AuditedGRPOTrainer):
        record = str(tmp_path / "tokens")

    saved = SETTINGS | {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    make(Recorded, GRPOConfig, tmp_path / "run", **saved).train()
    again = make(Recorded, GRPOConfig, tmp_path / "run", **saved | {"max_steps": 5})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert len(list((tmp_path / "tokens").glob("*.arrow"))) == 2
    steps = [loss.step for loss in read_record(tmp_path / "tokens")]
    assert steps == sorted(steps)
    assert {step: steps.count(step) for step in steps} == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}
    # The first batch serves four updates, of which two were before the checkpoint. The resumed run generates anew.
    assert [loss.generation for loss in read_record(tmp_path / "tokens")] == [0, 0, 1, 1, 1]


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_the_engine_s_log_probabilities_are_recorded(tmp_path):
    settings = LOG | {"anchor": "rollout", "record": str(tmp_path / "tokens")}
    trainer = make(BandGRPOTrainer, BandGRPOConfig, tmp_path, half, **settings)
    trainer.train()
    for loss in read_record(tmp_path / "tokens"):
        rollout = loss.logp_anchor[loss.mask]
        np.testing.assert_allclose(np.exp(rollout), 0.5, rtol=1.3e-6, atol=1e-5)
        assert loss.anchor == "rollout"
    seen = replay_record(tmp_path / "tokens")
    row = next(row for row in trainer.state.log_history if "audit/tokens" in row)
    first = [seen.by_step[RUN][step] for step in (0, 1)]
    assert (first[0] + first[1]).metrics()["clip_low"] == pytest.approx(row["audit/clip_low"], abs=1e-7)


TWO_PROCESSES = """
import sys
from test_trl import LOG, make
from bandpo.integrations.trl import BandGRPOConfig, BandGRPOTrainer

out = sys.argv[1]
make(BandGRPOTrainer, BandGRPOConfig, out + "/run", **LOG, steps_per_generation=4, record=out + "/tokens").train()
of_both = {"num_generations": 16, "steps_per_generation": 3, "num_iterations": 1, "max_steps": 12}
make(BandGRPOTrainer, BandGRPOConfig, out + "/run2", **of_both, record=out + "/of_both").train()
"""


@pytest.mark.slow
def test_two_processes_write_two_files(tmp_path):
    run_on_processes(TWO_PROCESSES, tmp_path)
    files = sorted(file.name for file in (tmp_path / "tokens").iterdir())
    assert files[0] == "tokenizer.json"  # once, from the first process
    assert files[1:] == [
        f"tokens-{process:05}-0000.{ending}" for process in range(2) for ending in ("arrow", "sha256")
    ]
    seen = replay_record(tmp_path / "tokens")
    calls = seen.audits[RUN].metrics()["calls"]
    assert calls == 16  # four steps of two micro-batches on two processes
    # Each process has one and a half of the three groups.
    assert set(group_sizes(tmp_path / "of_both").values()) == {16}
    assert (
        formula(tmp_path / "of_both") == "advantages are those of GRPO over all processes, in all 4 batches"
    )
    assert "micro-batch-lost" not in {finding.code for finding in diagnose(tmp_path / "of_both").findings}
