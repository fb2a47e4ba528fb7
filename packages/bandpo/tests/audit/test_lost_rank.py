"""Two processes that train with FSDP2 on gloo, of which one is killed or stopped in the middle of a step.

The other ends with the error of torch's exchange, as soon as the killed one's connection is closed or the group's
timeout is over. The record has each step before, on both ranks, and the training resumes from its checkpoint.
"""

import multiprocessing
import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from bandpo import Batch, Rows
from bandpo.audit import Recorder
from bandpo.core.schedules import TrainingState
from bandpo.core.text import as_method
from helpers.ports import free_port
from rlvet.cli.app import app
from rlvet.records.record import read_record

STEPS = 4
LOST_AT = 2
"""The step, of 0 to 3, in which rank 1 is lost."""
TIMEOUT = 6
"""The timeout of the group in seconds."""
METHODS = {
    "BandAbove()": "in FSDP2's backward pass",
    "M2PO()": "in the exchange of tokens of a method of a whole update",
}
"""The methods, and where rank 0 waits for the other."""


def loss_of(method, model, step, rank, recorder):
    """Return the loss of a rank's part of a step, whose tokens are recorded before it."""
    random = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(0, 16, (4, 9), generator=random)
    advantages = torch.randn(4, 1, generator=random).expand(4, 8)
    logits = model(tokens[:, :-1]).log_softmax(-1)
    logp = logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    batch = Batch.read(
        logp,
        logp.detach(),
        advantages,
        torch.ones(4, 8),
        layout=Rows(),
        state=TrainingState(processes=dist.group.WORLD),
    )
    recorder.add(batch, step=step)
    recorder.flush()
    return lambda: as_method(method).loss(batch, aggregation="token-mean").loss


def train(rank, folder, method, port, how, errors):
    """Train on one rank, from its newest checkpoint; send a signal to rank 1 in the middle of a step.

    Args:
        rank: The rank.
        folder: The folder of the record and the checkpoints.
        method: The method.
        port: The port of the group.
        how: The signal, or None for an undisturbed training.
        errors: The file for the output on stderr.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT if how else 60),
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = sorted(folder.glob(f"rank-{rank}-step-*.pt"))
    if saved:
        shards = torch.load(saved[-1])
        with torch.no_grad():
            for parameter, shard in zip(model.parameters(), shards, strict=True):
                parameter.to_local().copy_(shard)
    with Recorder(folder / "tokens", method=method) as recorder:
        for step in range(len(saved), STEPS):
            loss = loss_of(method, model, step, rank, recorder)
            if how and rank == 1 and step == LOST_AT:
                os.kill(os.getpid(), how)
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()
            unfinished = folder / f"unfinished-{rank}"
            torch.save([parameter.to_local().detach() for parameter in model.parameters()], unfinished)
            unfinished.rename(folder / f"rank-{rank}-step-{step}.pt")
    # While Python shuts down, gloo's threads abort now and then (pytorch/pytorch#179291).
    dist.barrier()
    os._exit(0)


def start(folder, method, how=None):
    """Start both ranks, and return their processes."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["torch.distributed.fsdp", "bandpo", "rlvet"])
    port = free_port()
    ranks = [
        forks.Process(target=train, args=(rank, folder, method, port, how, folder / f"errors-{rank}.txt"))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    return ranks


def end(ranks, seconds=120):
    """Wait for processes, and return their exit statuses; kill those that do not end in time."""
    deadline = time.monotonic() + seconds
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    statuses = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    return statuses


def steps_of(folder):
    """Return the recorded steps of each rank."""
    steps = {}
    for batch in read_record(folder / "tokens"):
        steps.setdefault(Path(batch.location.partition(",")[0]).name[:12], []).append(batch.step)
    return steps


@pytest.mark.skipif(sys.platform != "linux", reason="the processes are forks")
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, marks=pytest.mark.exhaustive),
    ],
    ids=["killed", "stopped"],
)
@pytest.mark.parametrize("method", METHODS)
def test_a_lost_rank_ends_the_other_and_the_training_resumes(method, how, tmp_path):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    folder.mkdir()
    whole.mkdir()
    ranks = start(folder, method, how)
    (status,) = end(ranks[:1])
    end(ranks[1:], seconds=0)
    words = (folder / "errors-0.txt").read_text()
    assert status == 1, words
    said = (
        r"Connection (closed|reset) by peer"
        if how == signal.SIGKILL
        else f"Timed out waiting {1000 * TIMEOUT}ms"
    )
    assert re.search(said, words), words

    before = {"tokens-00000": [0, 1, 2], "tokens-00001": [0, 1, 2]}
    assert steps_of(folder) == before
    diagnosed = CliRunner().invoke(app, ["diagnose", str(folder / "tokens")])
    assert diagnosed.exit_code == 0, diagnosed.output
    assert "looked at all 192 tokens of 3 batches" in diagnosed.output

    assert end(start(folder, method)) == [0, 0], (folder / "errors-0.txt").read_text()
    assert end(start(whole, method)) == [0, 0], (whole / "errors-0.txt").read_text()
    assert steps_of(folder) == steps_of(whole) == {rank: [0, 1, 2, 3] for rank in before}
    for rank in range(2):
        name = f"rank-{rank}-step-{STEPS - 1}.pt"
        resumed, undisturbed = torch.load(folder / name), torch.load(whole / name)
        assert all(torch.equal(one, other) for one, other in zip(resumed, undisturbed, strict=True))
