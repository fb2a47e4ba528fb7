"""The loss methods of TRL's own trainers, on trainers that were not constructed: that needs a vLLM server, or a model
and a data set, none of which the loss looks at.
"""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from bandpo.testing import check_record
from contract import Contract, make_batch, written
from helpers.frameworks import needs

needs("trl")

from trl.experimental.async_grpo import AsyncGRPOTrainer

from bandpo_trl_experimental import BandAsyncGRPOConfig, BandAsyncGRPOTrainer
from pages import ASYNCHRONOUS, ROOT, framework_blocks

ACCELERATOR = SimpleNamespace(num_processes=1, reduce=lambda x, **_: x, gather=lambda x: x)
CPU = {"bf16": False, "use_cpu": True, "report_to": "none"}


def trainer(cls, low=0.2, high=0.2, **attributes):
    made = object.__new__(cls)
    made.__dict__ |= {
        "epsilon_low": low,
        "epsilon_high": high,
        "accelerator": ACCELERATOR,
        "_metrics": {"train": defaultdict(list)},
        "current_gradient_accumulation_steps": 1,
        **attributes,
    }
    return made


class TestAsyncGRPO(Contract):
    def call(self, made, batch):
        """Two rows of tokens packed to their mask, as TRL's collator lays them out."""
        counted = batch.mask.bool()
        tokens = int(counted.sum())
        total, zeros = torch.tensor([tokens]), torch.zeros_like(batch.mask).long()
        inputs = {
            "attention_mask": counted.long(),
            **dict.fromkeys(("input_ids", "position_ids", "shift_labels"), zeros),
            "token_index": (zeros - 1).masked_scatter(counted, torch.arange(tokens)),
            "shift_labels": torch.arange(counted.numel()).view(counted.shape),
            "old_log_probs": batch.logp_old,
            "advantages": batch.advantages[:, None].expand_as(batch.mask),
            "segment_id": torch.arange(len(batch.mask))[:, None].expand_as(batch.mask),
            **dict.fromkeys(("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k"), torch.zeros(1)),
            "tree_max_seqlens": torch.ones(1, 2),
            **dict.fromkeys(("global_n_tokens", "global_n_forward_tokens", "mean_seq_len"), total),
        }
        sums = ("forward_tokens", "trained_tokens", "seq_len_weighted", "samples", "forward_s")
        made.__dict__ |= {f"_step_{name}": 0.0 for name in sums} | {"aux_loss_enabled": False}
        logp = batch.logp[counted]
        return made.compute_loss(lambda **_: SimpleNamespace(log_probs=logp, entropy=-logp), inputs)

    def made(self, clip, folder=None):
        args = SimpleNamespace(method=clip, record=folder, temperature=0.9)
        return trainer(BandAsyncGRPOTrainer, args=args, state=SimpleNamespace(global_step=4))

    def ours(self, batch, clip):
        return self.call(self.made(clip), batch)

    def recorded(self, batch, folder):
        return self.call(self.made("DAPO()", folder), batch)

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
        return self.call(trainer(AsyncGRPOTrainer, low, high), batch)

    test_sequence_level_ratios_are_refused = None  # this trainer has token ratios alone

    def test_the_epsilons_are_put_back(self):
        made = self.made("Band(KL(), 0.05)")
        self.call(made, make_batch())
        assert (made.epsilon_low, made.epsilon_high) == (0.2, 0.2)
        assert made._metrics["train"]["clip_ratio/region_mean"][0] > 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epsilon": 0.1}, r"epsilon=0.1 would have no effect"),
        ({"method": "Bnd()"}, "method: .*did you mean Band"),
        ({"method": "SAPO()"}, r"^method: 'SAPO\(\)' is SigmoidGate"),
    ],
)
def test_refuses_what_cannot_work(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        BandAsyncGRPOConfig(str(tmp_path), **CPU, **settings)


def test_the_rule_is_text_in_the_config(tmp_path):
    made = BandAsyncGRPOConfig(str(tmp_path), method="FixedClip(0.2)", **CPU)
    assert made.method == "FixedClip(low=0.2, high=0.2)"
    for again in ({"method": made.method}, {"method": "GRPO()"}):
        assert BandAsyncGRPOConfig(str(tmp_path), **again, **CPU).method == made.method
    assert math.isclose(made.epsilon, 0.2)


def test_the_documented_names():
    names = {}
    exec(framework_blocks(ASYNCHRONOUS, ROOT / "docs/trl.md")[0], names)
    assert names["BandAsyncGRPOTrainer"] is BandAsyncGRPOTrainer
