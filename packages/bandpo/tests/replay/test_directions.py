"""The cosine of a method's gradient with the run's, and its effective sample size, against gradients of the losses."""

import math

import pytest
import torch

pytest.importorskip("rlvet")

from bandpo import Batch, parse
from bandpo.audit import Recorder
from bandpo.replay.directions import COSINE, EFFECTIVE
from bandpo.replay.record import RUN, replay_record

pytest.importorskip("pyarrow")


def losses(count=3):
    """Batches with padding, losers, and answers without an advantage."""
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        logp_old = -torch.rand(12, 10, generator=generator) * 5 - 0.05
        logp = (logp_old + 0.4 * torch.randn(12, 10, generator=generator)).clamp(max=-1e-3)
        advantages = torch.randn(12, generator=generator) * (torch.rand(12, generator=generator) > 0.3)
        mask = torch.arange(10) < torch.randint(1, 11, (12, 1), generator=generator)
        yield {"logp": logp, "logp_old": logp_old, "advantages": advantages, "mask": mask}


def gradient(text, tensors):
    """The gradient of the sum of a loss with respect to log-probabilities, by torch."""
    leaf = tensors["logp"].clone().requires_grad_()
    parse(text).loss(Batch.read(**{**tensors, "logp": leaf}), aggregation=torch.sum).loss.backward()
    return leaf.grad.double().flatten()


@pytest.mark.parametrize("run", ["FixedClip(0.2)", "BandAbove()", "GSPO(0.01, 0.02)"])
def test_the_cosine_is_that_of_the_gradients_of_the_losses(run, tmp_path):
    others = {"clip": "PPO()", "wide": "DAPO()", "soft": "SAPO()", "CISPO": "CISPO()"}
    with Recorder(tmp_path, method=run) as recorder:
        for step, tensors in enumerate(losses()):
            recorder.add(**tensors, step=step)
    replay = replay_record(tmp_path, others)
    reference = torch.cat([gradient(run, tensors) for tensors in losses()])
    for name, text in {RUN: run, **others}.items():
        found = torch.cat([gradient(text, tensors) for tensors in losses()])
        cosine = float(found @ reference / (found.norm() * reference.norm()))
        assert replay.directions[name][COSINE] == pytest.approx(cosine, abs=1e-5), name
        assert replay.metrics()[name][COSINE] == replay.directions[name][COSINE]
    assert replay.directions[RUN][COSINE] == pytest.approx(1)
    assert min(figures[COSINE] for figures in replay.directions.values()) < 0.98


def test_the_effective_sample_size_counts_dropped_tokens(tmp_path):
    """Of four tokens with an advantage one is dropped, and the weights of the others are their ratios."""
    logp_old = torch.tensor([[0.2, 0.2, 0.2, 0.2], [0.5, 0.5, 0.5, 0.5]]).log()
    ratio = torch.tensor([[1.0, 1.1, 1.1, 3.0], [1.0, 1.5, 1.0, 1.0]])
    with Recorder(tmp_path, method="FixedClip(0.2)") as recorder:
        recorder.add(logp=logp_old + ratio.log(), logp_old=logp_old, advantages=torch.tensor([1.0, 0.0]))
    directions = replay_record(tmp_path, {"no clip": "Unclipped()"}).directions
    for name, weights in {RUN: [1.0, 1.1, 1.1, 0.0], "no clip": [1.0, 1.1, 1.1, 3.0]}.items():
        expected = sum(weights) ** 2 / (4 * sum(w * w for w in weights))
        assert directions[name][EFFECTIVE] == pytest.approx(expected, rel=1e-5)
    dot = 1 + 2 * 1.21
    assert directions["no clip"][COSINE] == pytest.approx(math.sqrt(dot / (dot + 9)), rel=1e-5)


def test_without_a_gradient_there_is_no_direction(tmp_path):
    old = torch.full((1, 3), -1.0)
    with Recorder(tmp_path, method="FixedClip(0.2)") as recorder:
        recorder.add(logp=old + 0.5, logp_old=old, advantages=torch.ones(1))
    replay = replay_record(tmp_path, {"no clip": "Unclipped()"})
    assert replay.directions[RUN] == {}
    assert COSINE not in replay.directions["no clip"]
    assert replay.directions["no clip"][EFFECTIVE] == pytest.approx(1)
