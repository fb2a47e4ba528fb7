"""`compile_loss`: one pass over the tokens, few compilations, and the gradient of the loss that is not compiled."""

import shutil
import time
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

from bandpo import KL, Band, Batch, Method, Packed, Rows, compile_loss, policy_loss
from bandpo.core.methods import METHODS
from bandpo.core.objectives import DualClip
from bandpo.core.schedules import ClipRateController, Linear, TrainingState
from bandpo.core.text import as_method

pytestmark = pytest.mark.slow

inductor = pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler's CPU backend needs g++")


def batch(rows=8, columns=24, seed=0):
    random = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, columns, generator=random) - 0.01
    logp = (old + 0.3 * torch.randn(rows, columns, generator=random)).clamp(max=-1e-3)
    mask = (torch.rand(rows, columns, generator=random) > 0.2).float()
    return logp, old, torch.randn(rows, generator=random), mask


def gradient(loss, tensors, **settings):
    logp, *rest = tensors
    leaf = logp.clone().requires_grad_()
    outputs = loss(leaf, *rest, **settings)
    outputs.loss.backward()
    return leaf.grad, outputs


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["GRPO", "BandPO", "GSPO", "FIPO", "VESPO", "CISPO"])
def test_it_is_the_same_loss(name):
    compiled = compile_loss(METHODS[name].method(), backend="eager")
    entropy = torch.ones(8, 24)

    def plain_loss(*tensors):
        return as_method(f"{name}()").loss(Batch.read(*tensors, entropy=entropy))

    expected = gradient(plain_loss, batch())
    torch.testing.assert_close(gradient(compiled, batch(), entropy=entropy), expected)


NUMBERS = {
    "a controller": Method(Band(KL(), ClipRateController(target=0.01, start=0.05))),
    "a schedule": Method(Band(KL(), Linear(0.05, 0.01))),
    "a schedule of an objective": Method(Band(KL(), 0.05), DualClip(Linear(10.0, 3.0))),
    "both": Method(Band(KL(), ClipRateController(target=0.01, start=0.05)), DualClip(Linear(10.0, 3.0))),
}


@pytest.mark.parametrize(
    "case",
    [
        "a schedule",
        "both",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("a controller", "a schedule of an objective")
        ),
    ],
)
def test_numbers_that_change_with_each_step_compile_at_most_twice(case):
    method = NUMBERS[case]
    graphs = CompileCounterWithBackend("eager")
    compiled = compile_loss(method, backend=graphs)
    controller_state: dict[str, float] = {}
    values = []
    for step in range(50):
        state = TrainingState(progress=step / 50, controller_state=controller_state)
        tensors = batch(seed=step)
        outputs = compiled(*tensors, state=state)
        torch.testing.assert_close(outputs, policy_loss(*tensors, method=method, state=state))
        values.append(float(outputs.metrics["clip_high"]))
        controller_state = method.update_controllers(controller_state, outputs.metrics)
    assert len(set(values)) > 20
    assert graphs.frame_count <= 2


def test_methods_of_a_process_share_no_limit_of_compilations():
    # By default the limit is 8 compilations.
    with torch._dynamo.config.patch(cache_size_limit=3):
        for name in [*METHODS][:4]:
            compiled = compile_loss(f"{name}()", backend="eager", dynamic=True)
            for rows in (4, 8):
                tensors = batch(rows)
                entropy = torch.ones(rows, 24)
                expected = as_method(f"{name}()").loss(Batch.read(*tensors, entropy=entropy)).loss
                torch.testing.assert_close(compiled(*tensors, entropy=entropy).loss, expected)


def test_a_number_that_is_not_known_is_refused():
    compiled = compile_loss(NUMBERS["a schedule"], backend="eager")
    with pytest.raises(ValueError, match=r"TrainingState\(progress=...\)"):
        compiled(*batch())


def test_arguments_of_torch_compile():
    with pytest.raises(TypeError, match="method must be"):
        compile_loss(3)
    with pytest.raises(RuntimeError, match="no_such_backend"):
        compile_loss(backend="no_such_backend")(*batch())


def test_packed_batches():
    logp, old, advantages, _ = batch()
    ends = torch.arange(9) * 24
    packed = (logp.view(1, -1), old.view(1, -1), advantages)
    compiled = compile_loss("GSPO()", backend="eager")
    expected = policy_loss(logp, old, advantages, method="GSPO()")
    torch.testing.assert_close(compiled(*packed, layout=Packed(cu_seqlens=ends)), expected)


def bytes_per_token(name, shape):
    """Bytes that the compiled loss reads and writes for each token, forward and backward, by the compiler's count."""
    from torch._inductor import config, metrics

    metrics.reset()
    tensors = batch(*shape)
    torch._logging.set_logs(inductor_metrics=True)
    try:
        with config.patch(force_disable_caches=True):
            result, _ = gradient(compile_loss(f"{name}()"), tensors)
    finally:
        torch._logging.set_logs()
    expected, _ = gradient(policy_loss, tensors, method=f"{name}()")
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-8)
    return metrics.num_bytes_accessed / tensors[0].numel()


@inductor
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("BandPO", 44.5),
        *(
            pytest.param(name, most, marks=pytest.mark.exhaustive)
            for name, most in {"GRPO": 24.5, "DAPO": 24.5, "BandAbove": 44.5}.items()
        ),
    ],
)
def test_one_pass_each_way(name, most):
    """Three values read and one written forward, one read and one written backward.

    On a CPU the compiler stores what it uses several times and has an exponential, so the root for the value of a token
    beyond a bound of the KL divergence costs 20 bytes more. Compilation took minutes where the root had more steps.
    """
    begin = time.process_time()
    assert bytes_per_token(name, (64, 1024)) <= most
    assert time.process_time() - begin < 60  # 10 s on a CPU of 2026, without the C++ compiler


def paths_of(method):
    """Return the largest number of paths from a sum of the loss to its inputs, on a device that is not the CPU.

    A compiler that stores no intermediate tensor follows each of them.
    """
    tensors = [torch.empty(4, 64, device="meta") for _ in range(4)]
    derivatives = []

    def loss_of(*tensors):
        loss, metrics = as_method(method).loss(Batch.read(*tensors, layout=Rows()))
        return loss, derivatives[-1], *metrics.values()

    def keep(x, values, derivative):
        derivatives.append(derivative)
        return values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.compiler.is_compiling", lambda: True)
        patch.setattr("bandpo.core.methods.with_derivative", keep)
        functional = torch.func.functionalize(loss_of, remove="mutations_and_views")
        graph = make_fx(functional, tracing_mode="fake")(*tensors).graph
    paths = {}
    largest = 0
    for node in graph.nodes:
        paths[node] = max(1, sum(paths[x] for x in node.all_input_nodes))
        if "sum" in str(node.target):
            largest = max(largest, paths[node])
            paths[node] = 1  # the result of a sum is stored
    return largest


@pytest.mark.parametrize(
    ("method", "one_pass"),
    [
        *((f"Band({name}())", True) for name in ("KL", "TotalVariation", "PearsonChi2", "NeymanChi2")),
        ("BandPO()", True),
        ("TwoSided(Band(KL()), Band(KL()))", True),
        ("FIPO()", True),
        ("BandPO(JensenShannon())", False),
        ("Loosest(Band(ReverseKL()), FixedClip(0.2))", False),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of make_fx
def test_a_compiler_that_stores_nothing_has_little_to_do(method, one_pass):
    """With one more step of its root, or with all thresholds off, the loss took minutes to compile on a GPU."""
    chosen = as_method(method)
    assert chosen.clip.one_pass == one_pass
    assert (paths_of(method) < 30_000) == one_pass


def graph_inputs(loss, shapes):
    """Return the sizes and dtypes of the inputs of each graph that the calls compile."""
    graphs = []

    def backend(graph, inputs):
        values = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        graphs.append([(tuple(x.shape), x.dtype) for x in values if isinstance(x, torch.Tensor)])
        return graph.forward

    run = loss(backend)
    for shape in shapes:
        tensors = batch(*shape)
        torch.testing.assert_close(run(*tensors), policy_loss(*tensors, method="BandPO()", layout=Rows()))
    return graphs


def test_with_varying_sizes_only_tensors_of_the_batch_are_inputs():
    """Each number of the method was an input, and a tensor was built of it in each call."""
    loss = partial(compile_loss, "BandPO()", dynamic=True)
    shapes = [(3, 5), (4, 7), (6, 12)]
    (inputs,) = graph_inputs(lambda backend: partial(loss(backend=backend), layout=Rows()), shapes)
    # A size that is a variable is no tensor. Each number of the method would be one in float64.
    assert [dtype for _, dtype in inputs] == [torch.float32] * 4


def test_rows_of_many_tokens_are_summed_in_parts():
    loss = partial(compile_loss, "BandPO()")
    shapes = [(2, 7), (3, 2048), (3, 1500), (2, 4096), (4, 3000), (5, 9)]
    graphs = graph_inputs(lambda backend: partial(loss(backend=backend), layout=Rows()), shapes)
    assert len(graphs) <= 4  # the first shape, short rows, long rows, and those that are divided into parts
