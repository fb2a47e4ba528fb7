import math
import warnings

import pytest
import torch

from bandpo.core.errors import BandWarning
from bandpo.core.layout import Packed
from bandpo.watch.run_watch import EVERY, FEWEST_BATCHES, RunWatch
from rlvet.runs import Setup


def batch(generation, temperature=1.0, shift=0):
    """64 sequences whose engine samples at a temperature, and whose old log-probabilities may be shifted."""
    g = torch.Generator().manual_seed(generation)
    logits = 2 * torch.randn(64, 12, 20, generator=g)
    engine, trainer = (logits / temperature).log_softmax(-1), logits.log_softmax(-1)
    ids = torch.multinomial(engine.exp().flatten(0, 1), 1, generator=g).view(64, 12, 1)
    logp = trainer.gather(2, ids).squeeze(2)
    return {
        "logp": torch.cat([torch.full((64, 2), math.nan), logp], 1),
        "logp_old": torch.cat([torch.zeros(64, 2), logp.roll(shift, 1)], 1),
        "logp_rollout": torch.cat([torch.zeros(64, 2), engine.gather(2, ids).squeeze(2) + 1e-4], 1),
        "entropy": torch.cat([torch.zeros(64, 2), -(trainer.exp() * trainer).sum(-1)], 1),
        "mask": torch.arange(14).expand(64, -1) > 1,
        "advantages": torch.randn(64, generator=g),
        "generation": generation,
    }


def said(watch, batches=(), rows=()):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for given in batches:
            watch.check_batch(**given)
        for row in rows:
            watch(row)
    assert all(w.category is BandWarning for w in caught)
    return [str(w.message) for w in caught]


def test_a_fault_is_told_once_with_the_framework_s_own_setting():
    (text,) = said(RunWatch(Setup("verl"), every=2), [batch(k, temperature=0.7) for k in range(6)])
    assert text.startswith("temperature: the trainer is at 1.4")
    assert "actor_rollout_ref.rollout.temperature" in text
    assert said(RunWatch(every=2), [batch(k) for k in range(40)]) == []


def test_what_is_looked_at():
    """Every so-many-th batch, before its first update."""
    sick = batch(3, shift=1)
    assert said(RunWatch(every=2), [sick, sick | {"generation": 4, "update": 1}]) == []
    (text,) = said(RunWatch(every=3), [sick])
    assert text.startswith("shift: logp_old is shifted by +1 tokens")
    before = {name: x for name, x in batch(0, temperature=0.7).items() if name != "logp"}  # before any loss
    assert said(RunWatch(), [before])[0].startswith("temperature")


def test_a_packed_batch_is_checked_as_the_padded_one():
    sick = batch(0, temperature=0.7)
    ends = torch.arange(65) * 14
    packed = {name: x.reshape(1, -1) if getattr(x, "ndim", 0) == 2 else x for name, x in sick.items()}
    assert said(RunWatch(), [packed | {"layout": Packed(cu_seqlens=ends)}]) == said(RunWatch(), [sick])


def test_a_run_can_be_stopped():
    sick = batch(0)
    sick["logp"][3, 5] = math.nan
    with pytest.raises(RuntimeError, match="nan: 1 of 64 sequences"):
        RunWatch(stop_on="fix").check_batch(**sick)
    with pytest.raises(ValueError, match="stop_on must be 'stop', 'fix' or None, got 'look'"):
        RunWatch(stop_on="look")
    for every in (0, 2.5, True):
        with pytest.raises(ValueError, match="every must be an integer of at least 1"):
            RunWatch(every=every)


def test_the_course_of_the_log():
    falls = [
        {"actor/entropy": 1.2 * 0.9**k, "critic/score/mean": 0.1 + 0.01 * (k % 2)} for k in range(4 * EVERY)
    ]
    texts = said(RunWatch(Setup("verl")), rows=falls)
    # A plateau is no fault, and no warning.
    assert [text.partition(":")[0] for text in texts] == ["entropy-collapse"]
    learns = [{"entropy": 1.2 * 0.9**k, "reward": 0.02 * k} for k in range(4 * EVERY)]
    assert said(RunWatch(), rows=learns) == []


def unrewarded(generation, sequences=8):
    """Return a batch of a hard task at the start of a run, in which every answer is wrong."""
    batch_of_64 = batch(generation)
    few = {name: x[:sequences] if isinstance(x, torch.Tensor) else x for name, x in batch_of_64.items()}
    return few | {"advantages": torch.zeros(sequences), "reward": torch.zeros(sequences)}


def test_a_few_batches_without_a_right_answer_are_no_fault():
    watch = RunWatch(every=1, stop_on="fix")
    assert said(watch, [unrewarded(k) for k in range(FEWEST_BATCHES - 1)]) == []
    with pytest.raises(RuntimeError, match="reward-flat"):
        watch.check_batch(**unrewarded(FEWEST_BATCHES))


def rows_of_a_hard_task(count):
    """Return the first log steps of TRL if no answer is right: no gradient, and a warm-up."""
    row = {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0, "entropy": 1.0}
    return [{"step": k, "learning_rate": 1e-11 * k, **row} for k in range(1, count + 1)]


@pytest.mark.filterwarnings("ignore::bandpo.core.errors.BandWarning")
def test_a_log_that_begins_without_a_right_answer_ends_no_run():
    """Neither for the reward, nor for the gradient and the warm-up, nor for groups without signal."""
    watch = RunWatch(every=1, stop_on="stop", flat_steps=63)

    def take(rows):
        for row in rows:
            watch(row)

    take(rows_of_a_hard_task(63))
    with pytest.raises(RuntimeError, match="reward-flat"):
        take(rows_of_a_hard_task(75)[63:])
    assert not watch.announced.keys() & {"no-step", "collapse"}
