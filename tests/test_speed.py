"""What makes the core cheap on any device: one graph, no value read, no recompilation, no spare buffers."""

import re
import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from bandpo import (
    DCPO,
    KL,
    Band,
    ClippedWeight,
    FixedClip,
    JensenShannon,
    Masked,
    TotalVariation,
    policy_loss,
    ratio_bounds,
)

SETTINGS = [
    {"clip": Band(KL(), 0.05)},
    {"clip": Band(JensenShannon(), 0.0125), "dual_clip": 3.0},
    {"clip": FixedClip(0.2, 0.28), "aggregation": "seq-mean-token-mean"},
    {"clip": DCPO(), "level": "sequence"},
    {"clip": Band(KL(), 0.05), "objective": ClippedWeight()},
    {"clip": Band(TotalVariation(), 0.15), "objective": Masked()},
]


def batch(rows=3, columns=5, device="cpu"):
    logp_old = -torch.rand(rows, columns, device=device) * 6 - 0.01
    logp = logp_old + 0.3 * torch.randn(rows, columns, device=device)
    return logp.clamp(max=-1e-4), logp_old, torch.randn(rows, device=device), torch.ones_like(logp)


def step(settings):
    def run(logp, *rest):
        outputs = policy_loss(logp, *rest, **settings)
        return outputs.loss, outputs.metrics

    return run


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_no_value_is_read_on_an_accelerator(settings):
    """Meta tensors hold no values: what would synchronise on a real accelerator raises on this one."""
    logp, *rest = batch(device="meta")
    loss, metrics = step(settings)(logp.requires_grad_(), *rest)
    loss.backward()
    assert all(x.device.type == "meta" for x in (loss, logp.grad, *metrics.values()))
    assert settings["clip"].bounds(rest[0]).log_upper.device.type == "meta"
    with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta"):
        loss.item()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_no_synchronisation_on_cuda(settings):
    logp, *rest = batch(device="cuda")
    step(settings)(logp.requires_grad_(), *rest)  # lazy initialisation may synchronise
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(settings)(logp, *rest)[0].backward()
        settings["clip"].bounds(rest[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_one_graph_for_all_batch_shapes(settings):
    """Compiled for the first shape, once more with symbolic ones for the second, and never again."""
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(step(settings), backend=graphs, fullgraph=True)
    for rows, columns in ((3, 5), (4, 7), (8, 16), (5, 33), (16, 9), (31, 2)):
        logp, *rest = batch(rows, columns)
        loss, metrics = compiled(logp.requires_grad_(), *rest)
        expected = policy_loss(logp, *rest, **settings)
        torch.testing.assert_close((loss, metrics), (expected.loss, expected.metrics))
    assert graphs.frame_count <= 2


def test_one_graph_of_bounds_for_all_shapes():
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda x: ratio_bounds(x, KL(), 0.05), backend=graphs, fullgraph=True)
    for shape in ((5,), (9,), (33,), (128,)):
        logp = -torch.rand(shape) * 6
        torch.testing.assert_close(compiled(logp).log_upper, ratio_bounds(logp, KL(), 0.05).log_upper)
    assert graphs.frame_count <= 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler's CPU backend needs g++")
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize(("settings", "most"), list(zip(SETTINGS[:3], (3, 5, 1), strict=True)), ids=str)
def test_fused_into_one_kernel_each_way(settings, most):
    """One kernel each way; of forward's few buffers of the tokens' size one becomes the gradient."""
    torch._dynamo.reset()
    logp, *rest = batch(64, 48)

    def both_ways():
        leaf = logp.clone().requires_grad_()
        compiled(leaf, *rest).backward()
        return leaf.grad

    compiled = torch.compile(lambda *tensors: policy_loss(*tensors, **settings).loss, fullgraph=True)
    gradient, (forward, backward) = run_and_get_code(both_ways)
    kernel, token_sized = r"^        (?:cpp|triton)_\w+\(", r"empty_strided_\w+\(\(64, 48\)"
    assert [len(re.findall(kernel, code, re.MULTILINE)) for code in (forward, backward)] == [1, 1]
    assert len(re.findall(token_sized, forward)) <= most
    assert not re.search(token_sized, backward)
    leaf = logp.clone().requires_grad_()
    policy_loss(leaf, *rest, **settings).loss.backward()
    torch.testing.assert_close(gradient, leaf.grad)
