"""The gradient of an update is the same for every split among processes and micro-batches, padded or packed."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from bandpo import Batch, Packed, Rows
from bandpo.core.aggregation import canonical_aggregation
from bandpo.core.methods import METHODS
from bandpo.core.schedules import TrainingState
from bandpo.core.text import as_method
from processes import run_on_processes

ROWS, COLUMNS = 12, 10
EMPTY = (4, 5, 6, 7)
"""The sequences without a counted token."""
SEEDS = (0, 1)
ACTING = {
    "M2PO": "M2PO(0.01)",
    "KLCov": "KLCov(share=0.05)",
    "ClipCov": "ClipCov(share=0.05, min_covariance=0.01)",
}
"""Methods with settings under which they act on a small batch."""
COMBINATIONS = (
    "Method(TwoSided(FixedClip(0.2), SecondMoment(0.01)))",
    "Method(SecondMoment(0.02), level='sequence')",
    "Method(SecondMoment(0.01), CovariancePenalty(share=0.05))",
    "Method(BalancedBounds(), DualClip(3.0, CovarianceMask(share=0.1, min_covariance=0.01)))",
)
TEXTS = [ACTING.get(name, f"{name}()") for name in METHODS] + list(COMBINATIONS)


class Split(NamedTuple):
    """A split of the sequences among processes, each with its micro-batches."""

    name: str
    processes: tuple[tuple[tuple[int, int], ...], ...]
    """The first sequence and the one after the last of each micro-batch of each process."""


SPLITS = {
    1: [
        Split("micro-batches", (((0, 3), (3, 6), (6, 9), (9, 12)),)),
        Split("unequal micro-batches, one without a counted token", (((0, 1), (1, 4), (4, 8), (8, 12)),)),
    ],
    2: [
        Split("equal", (((0, 6),), ((6, 12),))),
        Split("unequal, with micro-batches", (((0, 1), (1, 4)), ((4, 8), (8, 11), (11, 12)))),
    ],
    3: [
        Split("equal", (((0, 4),), ((4, 8),), ((8, 12),))),
        Split("unequal, with micro-batches", (((0, 2),), ((2, 3), (3, 4)), ((4, 8), (8, 9), (9, 12)))),
        Split("one process without a counted token", (((0, 4),), ((4, 8),), ((8, 11), (11, 12)))),
    ],
}


def tensors(seed):
    """Return the log-probabilities, old ones, advantages, importance weights and mask of an update."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    logp_old = -3 * torch.rand(ROWS, COLUMNS, generator=random, dtype=torch.float64) - 0.05
    # The processes differ in their drift.
    drift = torch.linspace(0.05, 0.6, ROWS, dtype=torch.float64)[:, None]
    logp = (logp_old + drift * normal(ROWS, COLUMNS)).clamp(max=-1e-3)
    advantages = normal(ROWS)
    weights = (0.2 * normal(ROWS, COLUMNS)).exp()
    lengths = torch.randint(1, COLUMNS + 1, (ROWS, 1), generator=random)
    lengths[list(EMPTY)] = 0
    mask = (torch.arange(COLUMNS) < lengths).double()
    return logp, logp_old, advantages, weights, mask


def gradient(text, seed, parts, *, packed=False, processes=None, own_tokens_only=False):
    """Return the gradient of an update's sequences, (sequences, tokens), from one loss for each part.

    Args:
        text: The method.
        seed: The seed of the update.
        parts: The first sequence and the one after the last of each part.
        packed: True to pack the sequences of each part into one row.
        processes: The group of processes.
        own_tokens_only: True to give the method no group.
    """
    logp, logp_old, advantages, weights, mask = tensors(seed)
    method = as_method(text)
    average = canonical_aggregation(method.aggregation or "token-mean")
    normalizer = {"token-mean": mask.sum(), "sum": None, "seq-mean-token-sum-norm": COLUMNS}.get(
        average, mask.any(1).sum()
    )
    result = torch.zeros_like(logp)
    for first, last in parts:
        rows = slice(first, last)
        leaf = logp[rows].clone().requires_grad_()
        given = (leaf, logp_old[rows], advantages[rows, None].expand(-1, COLUMNS), mask[rows])
        layout = Rows()
        weight = weights[rows]
        if packed:
            given = tuple(x.reshape(1, -1) for x in given)
            weight = weight.reshape(1, -1)
            layout = Packed(cu_seqlens=torch.arange(0, (last - first) * COLUMNS + 1, COLUMNS))
        state = TrainingState(processes=None if own_tokens_only else processes)
        batch = Batch.read(*given, layout=layout, weights=weight, state=state)
        loss = method.loss(batch, aggregation=average, normalizer=normalizer).loss
        result[rows] = torch.autograd.grad(loss, leaf)[0]
    return result


def parts_of(text, parts):
    """Return the parts of one process; all in one for a method that needs all of an update at once."""
    return ((parts[0][0], parts[-1][1]),) if as_method(text).whole_batch else parts


def of_this_process(folder):
    """Write the gradients of this process's part of each split; called in each process."""
    torch.distributed.init_process_group("gloo")
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    group = torch.distributed.group.WORLD
    results = {}
    for split in SPLITS[count]:
        for text in TEXTS:
            for seed in SEEDS:
                parts = parts_of(text, split.processes[rank])
                packed = (rank + seed) % 2 == 1
                found = gradient(text, seed, parts, packed=packed, processes=group)
                results[f"{split.name}/{text}/{seed}"] = found.tolist()
    Path(folder, f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")


SCRIPT = "import sys; from test_any_split import of_this_process; of_this_process(sys.argv[1])"


def difference(text, seed, found):
    """Return the largest difference from the gradient of the whole update on one process, relative to its largest."""
    expected = gradient(text, seed, [(0, ROWS)])
    assert expected.abs().max() > 0
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("text", TEXTS)
def test_micro_batches_have_the_gradient_of_the_update(text):
    for split in SPLITS[1]:
        for seed in SEEDS:
            for packed in (False, True):
                parts = parts_of(text, split.processes[0])
                found = gradient(text, seed, parts, packed=packed)
                assert difference(text, seed, found) < 1e-12, (split.name, seed, packed)


@pytest.mark.slow  # processes import torch
@pytest.mark.parametrize("count", [2, 3])
def test_processes_have_the_gradient_of_the_update(count, tmp_path):
    run_on_processes(SCRIPT, tmp_path, count=count, preload=("torch.distributed", "bandpo"))
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(count)]
    differences = {}
    for split in SPLITS[count]:
        for text in TEXTS:
            for seed in SEEDS:
                name = f"{split.name}/{text}/{seed}"
                found = sum(torch.tensor(results[name], dtype=torch.float64) for results in ranks)
                differences[name] = difference(text, seed, found)
    assert max(differences.values()) < 1e-12, {
        name: value for name, value in differences.items() if not value < 1e-12
    }


@pytest.mark.parametrize("text", [text for text in TEXTS if as_method(text).whole_batch])
def test_the_updates_tell_a_whole_batch_from_its_parts(text):
    """Otherwise the tests above would pass without a gather."""
    alone = [gradient(text, seed, parts) for seed in SEEDS for parts in [((0, 4), (4, 8), (8, 12))]]
    assert max(difference(text, seed, found) for seed, found in zip(SEEDS, alone, strict=True)) > 1e-3


def test_a_tie_is_broken_in_the_order_of_the_tokens():
    """All products are equal, and a share of half of the tokens has the penalty: the first half."""
    logp = torch.full((2, 2), -1.0, dtype=torch.float64)
    batch = Batch.read(logp, logp - 0.1, torch.ones(2), layout=Rows())
    tokens = batch.tokens(as_method("KLCov()").clip)
    bias = as_method("Method(Unclipped(), CovariancePenalty(share=0.5))").objective.bias(tokens)
    assert bias.tolist() == [[-1.0, -1.0], [0.0, 0.0]]
