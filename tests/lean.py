"""Checks of the cost of the loss that run on any device: graphs, synchronisation, CUDA graphs."""

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from bandpo import DCPO, KL, Band, FixedClip, Method, TotalVariation, policy_loss
from bandpo.core.divergences import JensenShannon
from bandpo.core.objectives import ClippedWeight, DropOutside, DualClip
from bandpo.core.text import as_method

SETTINGS = [
    {"method": Band(KL(), 0.05)},
    {"method": Method(Band(JensenShannon(), 0.0125), DualClip(3.0))},
    {"method": FixedClip(0.2, 0.28), "aggregation": "seq-mean-token-mean"},
    {"method": Method(DCPO(), level="sequence")},
    {"method": Method(Band(KL(), 0.05), ClippedWeight())},
    {"method": Method(Band(TotalVariation(), 0.15), DropOutside())},
]
SHAPES = ((3, 5), (4, 7), (8, 16), (5, 33), (16, 9), (31, 2))


def batch(rows=3, columns=5, device="cpu"):
    logp_old = -torch.rand(rows, columns, device=device) * 6 - 0.01
    logp = logp_old + 0.3 * torch.randn(rows, columns, device=device)
    return logp.clamp(max=-1e-4), logp_old, torch.randn(rows, device=device), torch.ones_like(logp)


def step(settings):
    def run(logp, *rest):
        outputs = policy_loss(logp, *rest, **settings)
        return outputs.loss, outputs.metrics

    return run


def graphs_over_shapes(settings, device="cpu"):
    """Count the compiled graphs of the loss for batches of six shapes; each is compared with the eager loss."""
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(step(settings), backend=graphs, fullgraph=True)
    for rows, columns in SHAPES:
        logp, *rest = batch(rows, columns, device)
        loss, metrics = compiled(logp.requires_grad_(), *rest)
        torch.testing.assert_close((loss, metrics), step(settings)(logp, *rest))
    return graphs.frame_count


def run_without_synchronisation(settings):
    """Loss, backward pass and bounds on CUDA; raises where one of them waits for the device."""
    logp, *rest = batch(device="cuda")
    step(settings)(logp.requires_grad_(), *rest)[0].backward()  # lazy initialisation may synchronise
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(settings)(logp, *rest)[0].backward()
        as_method(settings["method"]).clip.bounds(rest[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def replay_as_a_cuda_graph(settings):
    """Capture loss and gradient once, replay them on another batch, compare with eager ones."""
    held, other = batch(8, 128, "cuda"), batch(8, 128, "cuda")

    def gradient(logp, *rest):
        leaf = logp.detach().requires_grad_()
        loss, _ = step(settings)(leaf, *rest)
        return loss.detach(), *torch.autograd.grad(loss, leaf)

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # where torch wants the warm-up before a capture
        gradient(*held)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradient(*held)
    for mine, new in zip(held, other, strict=True):
        mine.copy_(new)
    graph.replay()
    torch.testing.assert_close(captured, gradient(*other))
