import math
import warnings

import pytest
import torch

from bandpo.audit.online import EVERY, BandWarning, Watch


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
            watch.look(**given)
        for row in rows:
            watch(row)
    assert all(w.category is BandWarning for w in caught)
    return [str(w.message) for w in caught]


def test_a_fault_is_told_once_with_the_framework_s_own_setting():
    (text,) = said(Watch("verl", every=2), [batch(k, temperature=0.7) for k in range(6)])
    assert text.startswith("temperature: the trainer is at 1.4")
    assert "actor_rollout_ref.rollout.temperature" in text
    assert said(Watch(every=2), [batch(k) for k in range(40)]) == []


def test_what_is_looked_at():
    """Every so-many-th batch, before its first update."""
    sick = batch(3, shift=1)
    assert said(Watch(every=2), [sick, sick | {"generation": 4, "update": 1}]) == []
    (text,) = said(Watch(every=3), [sick])
    assert text.startswith("shift: logp_old is +1 tokens")
    before = {name: x for name, x in batch(0, temperature=0.7).items() if name != "logp"}  # before any loss
    assert said(Watch(), [before])[0].startswith("temperature")


def test_a_packed_batch_is_checked_as_the_padded_one():
    sick = batch(0, temperature=0.7)
    ends = torch.arange(65) * 14
    packed = {name: x.reshape(1, -1) if getattr(x, "ndim", 0) == 2 else x for name, x in sick.items()}
    assert said(Watch(), [packed | {"cu_seqlens": ends}]) == said(Watch(), [sick])


def test_a_run_can_be_stopped():
    sick = batch(0)
    sick["logp"][3, 5] = math.nan
    with pytest.raises(RuntimeError, match="nan: 1 of 64 sequences"):
        Watch(how="stop").look(**sick)
    with pytest.raises(ValueError, match="how must be 'warn' or 'stop', got 'scream'"):
        Watch(how="scream")


def test_the_course_of_the_log():
    falls = [
        {"actor/entropy": 1.2 * 0.9**k, "critic/score/mean": 0.1 + 0.01 * (k % 2)} for k in range(4 * EVERY)
    ]
    texts = said(Watch("verl"), rows=falls)
    # A plateau is no fault, and no warning.
    assert [text.partition(":")[0] for text in texts] == ["entropy-collapse"]
    learns = [{"entropy": 1.2 * 0.9**k, "reward": 0.02 * k} for k in range(4 * EVERY)]
    assert said(Watch(), rows=learns) == []
