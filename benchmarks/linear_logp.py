"""Peak memory and time of `bandpo.linear_logp` against full logits and the fused heads of Liger, TRL and verl.

    python benchmarks/linear_logp.py [--tokens 4096] [--vocabulary 152000] [--width 896] [--threads 1 2]

Each variant is one forward and backward pass in a separate process. Memory is the growth of the peak resident set
during the pass: it includes the gradients of inputs and head, but not these themselves. Time is processor time.
Packages that are not installed are left out.
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from bandpo import linear_logp, policy_loss
from bandpo.core.errors import BandWarning
from measuring import time_of

SEQUENCES = 8
WITH_KERNELS = "linear_logp, kernels=True"
Loss = Callable[..., Tensor]


def textbook(hidden: Tensor, head: Tensor, ids: Tensor, **batch: Tensor) -> Tensor:
    logp = (hidden @ head.T).float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    return policy_loss(logp, **batch).loss


def fused(hidden: Tensor, head: Tensor, ids: Tensor, **batch: Tensor) -> Tensor:
    return policy_loss(linear_logp(hidden, head, ids).logp, **batch).loss


def with_kernels(hidden: Tensor, head: Tensor, ids: Tensor, **batch: Tensor) -> Tensor:
    """Compute the loss with the kernels in Triton; raise `BandWarning` as an error if they do not run."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", BandWarning)
        logp = linear_logp(hidden, head, ids, kernels=True).logp
    return policy_loss(logp, **batch).loss


def mostly_masked(hidden: Tensor, head: Tensor, ids: Tensor, **batch: Tensor) -> Tensor:
    """Compute the loss with 70 % of each sequence masked, as if 70 % of the groups had advantages of 0."""
    mask = torch.arange(ids.shape[1], device=ids.device) < 0.3 * ids.shape[1]
    return fused(hidden, head, ids, **batch, mask=mask.expand_as(ids))


def liger(compiled: bool) -> Loss:
    """Return Liger's loss, which supports only its own clip. ``compiled=True`` is its default."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss_fn = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="bnpo", compiled=compiled)

    def loss(hidden: Tensor, head: Tensor, ids: Tensor, **batch: Tensor) -> Tensor:
        mask, old = torch.ones_like(batch["logp_old"]), batch["logp_old"]
        return loss_fn(hidden, head, ids, mask, batch["advantages"], old_per_token_logps=old)[0]

    return loss


def trl_head(hidden: Tensor, head: Tensor, ids: Tensor, **batch: Tensor) -> Tensor:
    """Compute the loss with the head of TRL 1.16 and its chunk size."""
    from trl.kernels import ChunkedLogProbFunction

    outputs = ChunkedLogProbFunction.apply(
        hidden.flatten(0, 1), head, None, ids.flatten(), 1.0, 32768, None, 1.0, ()
    )
    return policy_loss(outputs[0].view(ids.shape), **batch).loss


def verl_head(hidden: Tensor, head: Tensor, ids: Tensor, **batch: Tensor) -> Tensor:
    """Compute the loss with the Triton kernels of verl's ``use_fused_kernels``."""
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    return policy_loss(linear_cross_entropy(hidden, head, ids, 1.0, "none")[0].view(ids.shape), **batch).loss


def variants(compiled: bool, device: str = "cpu") -> dict[str, Loss]:
    """Return the losses of the installed packages by name."""
    losses: dict[str, Loss] = {
        "full logits": textbook,
        "linear_logp": fused,
        "linear_logp, 70 % dead": mostly_masked,
    }
    if device == "cuda":
        losses[WITH_KERNELS] = with_kernels
    if find_spec("liger_kernel"):
        losses["Liger"] = liger(compiled)
    if find_spec("trl") and find_spec("trl.kernels"):
        losses["TRL"] = trl_head
    if find_spec("verl") and device == "cuda":
        losses["verl"] = verl_head
    return losses


def one_pass(
    loss_fn: Loss, vocabulary: int, tokens: int, width: int, device: str, dtype: torch.dtype
) -> Callable[[], tuple[float, float]]:
    """Create random inputs, and return a function that runs forward and backward on them.

    The function returns the loss and the norm of the gradient by ``hidden``.
    """
    torch.manual_seed(0)
    shape = (SEQUENCES, tokens // SEQUENCES)
    options = {"device": device, "dtype": dtype}
    hidden = torch.randn(*shape, width, **options).requires_grad_()
    head = torch.randn(vocabulary, width, **options).div_(width**0.5).requires_grad_()
    ids = torch.randint(vocabulary, shape, device=device)
    batch = {
        # Close to the log-probabilities of the random head, so that some ratios lie inside the bounds and some outside.
        "logp_old": -math.log(vocabulary) - torch.rand(shape, device=device),
        "advantages": torch.randn(SEQUENCES, device=device),
    }

    def run() -> tuple[float, float]:
        hidden.grad = None
        head.grad = None
        loss = loss_fn(hidden, head, ids, **batch)
        loss.backward()
        assert hidden.grad is not None
        return loss.item(), hidden.grad.float().norm().item()

    return run


def measure(options: argparse.Namespace) -> None:
    """Measure one variant, and print the growth of memory, the time, the loss and the norm of its gradient."""
    torch.set_num_threads(options.threads[0])
    loss_fn = variants(compiled=False)[options.variant]
    dtype = getattr(torch, options.dtype[0])
    one_pass(loss_fn, 100, SEQUENCES, 64, "cpu", dtype)()  # loads libraries and thread pools
    run = one_pass(loss_fn, options.vocabulary, options.tokens, options.width, "cpu", dtype)
    outcome = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = time_of(lambda: outcome.append(run()), "cpu")
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    ((loss, gradient),) = outcome
    print(
        f"{options.dtype[0]:9} {options.threads[0]} {options.variant:24} {growth:8.0f} MiB {seconds:7.1f} s  "
        f"loss {loss:.5f}  |grad| {gradient:.5f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--variant", help="this one alone, in this process")
    options = parser.parse_args()
    if options.variant:
        measure(options)
        return
    for dtype in options.dtype:
        for threads in options.threads:
            for variant in variants(compiled=False):
                sizes = [f"--{n}={getattr(options, n)}" for n in ("tokens", "vocabulary", "width")]
                arguments = [f"--dtype={dtype}", f"--threads={threads}", f"--variant={variant}", *sizes]
                subprocess.run([sys.executable, __file__, *arguments], check=True)


if __name__ == "__main__":
    main()
