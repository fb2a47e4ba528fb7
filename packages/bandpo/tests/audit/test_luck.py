import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from bandpo import Batch, FixedClip, Packed
from bandpo.audit import Audit, Recorder
from bandpo.core.schedules import TrainingState
from bandpo.replay.record import replay_record


def luck(logp_old, advantages, group, mask=None, layout=None):
    audit = Audit.from_batch(
        Batch.read(logp_old, logp_old, advantages, mask, state=TrainingState(group=group), layout=layout),
        method=FixedClip(0.2),
        counterfactuals={},
    )
    return audit.metrics().get("luck")


def centred(reward, group):
    """GRPO's advantages."""
    advantages = torch.empty_like(reward)
    for prompt in group.unique():
        of_prompt = group == prompt
        scores = reward[of_prompt]
        advantages[of_prompt] = (scores - scores.mean()) / (scores.std() + 1e-4)
    return advantages


def test_numbers_worked_by_hand():
    """Prompt 7: one of four wins, so it is hard. Prompt 3: one of two wins, so it is not."""
    group = torch.tensor([7, 3, 7, 7, 3, 7])
    advantages = torch.tensor([1.5, 9.0, -0.5, -0.5, -9.0, -0.5])
    p = torch.tensor([[0.5, 0.05, 0.2], *[[0.9, 0.9, 0.9]] * 5])
    mask = torch.tensor([[1, 1, 1], *[[1, 1, 0]] * 5])
    assert luck(p.log(), advantages, group, mask) == pytest.approx(2 / 3)
    mask[0, 2] = 0
    assert luck(p.log(), advantages, group, mask) == pytest.approx(1 / 2)


def test_undefined_without_groups_and_without_hard_ones():
    p = torch.full((4, 1), 0.5)
    even = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert luck(p.log(), even, None) is None
    assert luck(p.log(), even, torch.zeros(4, dtype=torch.long)) is None


def test_a_group_that_is_all_winners_or_all_losers_says_nothing():
    p = torch.full((4, 1), 0.5)
    group = torch.tensor([0, 0, 1, 1])
    assert luck(p.log(), torch.tensor([1.0, 2.0, -1.0, -0.1]), group) is None


@given(st.integers(0, 10_000), st.integers(2, 6), st.integers(2, 16))
def test_agrees_with_a_loop_over_groups_with_rewards(seed, prompts, answers):
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(prompts * answers, generator=generator)
    group = torch.arange(prompts).repeat_interleave(answers)[order] * 10 - 17
    chance = torch.rand(prompts, generator=generator) ** 2
    reward = (torch.rand(len(group), generator=generator) < chance[(group + 17) // 10]).double()
    p = torch.rand(len(group), 5, generator=generator, dtype=torch.double) ** 2
    hard = common = 0.0
    advantages = centred(reward, group)
    for prompt in group.unique():
        of_prompt = group == prompt
        if 0 < reward[of_prompt].mean() <= 0.25:
            for k in torch.nonzero(of_prompt & (reward > 0)).flatten():
                hard += 5 * advantages[k].item()
                common += advantages[k].item() * int((p[k] >= 0.1).sum())
    expected = pytest.approx(common / hard) if hard else None
    assert luck(p.log(), advantages, group) == expected


def test_parts_of_groups_agree_with_whole_ones():
    """With micro-batches of shuffled sequences, as in TRL, a part of a group with both kinds has the group's share."""
    generator = torch.Generator().manual_seed(5)
    group = torch.arange(16).repeat_interleave(16)
    reward = (torch.rand(256, generator=generator) < torch.tensor([0.1, 0.9])[group % 2]).double()
    p = torch.rand(256, 8, generator=generator, dtype=torch.double) ** 2
    advantages = centred(reward, group)
    whole = luck(p.log(), advantages, group)
    order = torch.randperm(256, generator=generator)
    parts = [
        Audit.from_batch(
            Batch.read(p[k].log(), p[k].log(), advantages[k], state=TrainingState(group=group[k])),
            method=FixedClip(0.2),
            counterfactuals={},
        )
        for k in order.split(32)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    hard = total.sums["hard_advantages"][0] / 8
    winners = advantages[(advantages > 0) & (group % 2 == 0)].sum()
    assert hard <= winners + 1e-9
    assert total.metrics()["luck"] == pytest.approx(whole, abs=0.1)


def test_packed_rows_are_as_padded_ones():
    group = torch.tensor([0, 0, 0, 0, 1, 1])
    advantages = torch.tensor([1.5, -0.5, -0.5, -0.5, 1.0, -1.0])
    p = torch.tensor([[0.5, 0.05], *[[0.9, 0.2]] * 5])
    packed = luck(p.view(1, 12).log(), advantages, group, layout=Packed(cu_seqlens=torch.arange(0, 13, 2)))
    assert packed == luck(p.log(), advantages, group) == 0.5


def test_a_record_with_groups_has_it(tmp_path):
    pytest.importorskip("pyarrow")
    logp_old = torch.tensor([[0.5, 0.05], *[[0.9, 0.9]] * 3]).log()
    with Recorder(tmp_path, method="FixedClip(0.2)") as recorder:
        recorder.add(
            logp=logp_old,
            logp_old=logp_old,
            advantages=torch.tensor([1.5, -0.5, -0.5, -0.5]),
            group=torch.zeros(4, dtype=torch.long),
            step=1,
        )
    metrics = replay_record(tmp_path).audits["the run"].metrics()
    assert metrics["luck"] == pytest.approx(0.5)
    assert not math.isnan(metrics["clip_high"])
