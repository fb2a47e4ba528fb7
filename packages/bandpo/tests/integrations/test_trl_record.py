"""TRL's trainers write records, which changes nothing in training and replays to what they logged."""

import warnings

import numpy as np
import pytest
import torch

from helpers.frameworks import needs

needs("trl")

from test_trl import LOG, SETTINGS, half, make, varied_reward
from trl import GRPOConfig, GRPOTrainer

from bandpo.integrations.trl import AuditedGRPOTrainer, BandGRPOConfig, BandGRPOTrainer
from bandpo.replay.blocked_tokens import decoder
from bandpo.replay.record import RUN, method_of, replay_record
from bandpo.testing import check_record
from processes import run_on_processes
from rlvet.records.record import read_record

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

        def _compute_loss(self, model, inputs):
            tokenizer, ids, mask = self.processing_class, inputs["completion_ids"], inputs["completion_mask"]
            texts = [
                tokenizer.decode(row[here > 0], skip_special_tokens=True)
                for row, here in zip(ids, mask, strict=True)
            ]
            prompts = tokenizer.batch_decode(inputs["prompt_ids"])
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
                "group": [prompts.index(prompt) for prompt in prompts],
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
