"""Peak memory of the Liger adapter's chunked loss against the dense loss, at a large vocabulary, on the CPU.

    python benchmarks/liger_memory.py [vocabulary] [tokens]

Each variant is one forward and backward pass in a process of its own; memory is the growth of that process's peak
resident set over what it was before the pass, so inputs and lm_head are not counted, their gradients are.
"""

from __future__ import annotations

import math
import resource
import subprocess
import sys
from collections.abc import Callable

import torch
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from torch import Tensor

from bandpo import Band, policy_loss
from bandpo.integrations.liger import BandFusedLinearGRPOLoss
from measuring import time_of

SEQUENCES = 8
SETTINGS = {"beta": 0.0, "use_ref_model": False, "loss_type": "bnpo"}


def dense(hidden: Tensor, head: Tensor, ids: Tensor, **batch: Tensor) -> Tensor:
    logp = (hidden @ head.T).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    return policy_loss(logp, batch["logp_old"], batch["advantages"], batch["mask"], clip=Band()).loss


def chunked(loss_fn: Callable, hidden: Tensor, head: Tensor, ids: Tensor, **batch: Tensor) -> Tensor:
    return loss_fn(
        hidden, head, ids, batch["mask"], batch["advantages"], old_per_token_logps=batch["logp_old"]
    )[0]


def variants(compiled: bool) -> dict[str, Callable[..., Tensor]]:
    """Losses by name; ``compiled`` is Liger's own setting (its default is True)."""
    band = BandFusedLinearGRPOLoss(Band(), compiled=compiled, **SETTINGS)
    stock = LigerFusedLinearGRPOLoss(compiled=compiled, epsilon_low=0.2, epsilon_high=0.2, **SETTINGS)
    return {
        "Band, dense": dense,
        "Band, chunked": lambda *tensors, **batch: chunked(band, *tensors, **batch),
        "Liger's own clip, chunked": lambda *tensors, **batch: chunked(stock, *tensors, **batch),
    }


def one_pass(
    loss_fn: Callable, vocabulary: int, tokens: int, hidden_size: int, device: str, dtype: torch.dtype
):
    """A function that does forward and backward and returns the loss and the gradient's norm; inputs are made here."""
    torch.manual_seed(0)
    shape = (SEQUENCES, tokens // SEQUENCES)
    options = {"device": device, "dtype": dtype}
    hidden = torch.randn(*shape, hidden_size, **options).requires_grad_()
    head = (torch.randn(vocabulary, hidden_size, **options) / hidden_size**0.5).requires_grad_()
    ids = torch.randint(vocabulary, shape, device=device)
    batch = {
        # About those of the random head, so that some ratios lie inside the bounds and some do not.
        "logp_old": -math.log(vocabulary) - torch.rand(shape, device=device),
        "advantages": torch.randn(SEQUENCES, device=device),
        "mask": torch.ones(shape, device=device),
    }

    def run() -> tuple[float, float]:
        hidden.grad = head.grad = None
        loss = loss_fn(hidden, head, ids, **batch)
        loss.backward()
        assert hidden.grad is not None
        return loss.item(), hidden.grad.float().norm().item()

    return run


def measure(variant: str, vocabulary: int, tokens: int) -> None:
    """Print MiB of growth, seconds, the loss and its gradient's norm."""
    torch.set_num_threads(1)
    loss_fn = variants(compiled=False)[variant]
    one_pass(loss_fn, 100, SEQUENCES, 64, "cpu", torch.float32)()  # loads libraries and thread pools
    run, outcome = one_pass(loss_fn, vocabulary, tokens, 64, "cpu", torch.float32), []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = time_of(lambda: outcome.append(run()), "cpu")
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    ((loss, gradient),) = outcome
    print(f"{variant:26} {growth:8.0f} MiB {seconds:6.1f} s  loss {loss:.5f}  |grad| {gradient:.5f}")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        sizes = [*sys.argv[1:], *("152000", "1024")[len(sys.argv) - 1 :]]
        for variant in variants(compiled=False):
            subprocess.run([sys.executable, __file__, variant, *sizes], check=True)
