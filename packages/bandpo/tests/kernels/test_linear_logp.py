"""The kernels of `linear_logp`, interpreted on the CPU, against full logits in float64."""

import math
import sys
from importlib.util import find_spec

import pytest
import torch

from bandpo import linear_logp
from bandpo.core import linear
from bandpo.core.errors import BandWarning
from bandpo.core.kernels import _trial

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

VOCABULARY = 4200
"""Three blocks of columns in one chunk."""


@pytest.fixture(autouse=True)
def no_verdicts():
    """Compare the kernels' first results anew in each test."""
    linear._trial.cache_clear()


def draw(dtype=torch.float32, tokens=4, vocabulary=VOCABULARY, width=9, seed=0):
    """Return hidden states, head, bias and ids."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (tokens, width), (vocabulary, width), (vocabulary,)
    tensors = [torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return *tensors, torch.randint(vocabulary, (tokens,), generator=generator)


def full(hidden, head, ids, bias=None, temperature=1.0, logit_softcap=None):
    """Return log-probabilities and entropies by the textbook."""
    logits = torch.nn.functional.linear(hidden, head, bias)
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    logps = torch.log_softmax(logits / temperature, -1)
    terms = torch.where(logps > -math.inf, logps.exp() * logps, 0.0)
    return logps.gather(-1, ids[:, None])[:, 0], -terms.sum(-1)


def results(scores, tensors, weights):
    """Return values and gradients of a weighted sum of log-probabilities and entropies."""
    logp, entropy = scores
    total = (logp * weights).sum()
    if entropy is not None:
        total = total + (entropy * weights.flip(0)).sum()
    values = [x.detach() for x in (logp, entropy) if x is not None]
    return [*values, *torch.autograd.grad(total, tensors)]


def worst_errors(dtype, entropy, chunk, with_bias, seed=0, tokens=4, vocabulary=VOCABULARY, **settings):
    """Return, for each result, the largest errors with and without kernels, and the largest magnitude."""
    hidden, head, bias, ids = draw(dtype, tokens, vocabulary, seed=seed)
    tensors = [hidden, head, bias] if with_bias else [hidden, head]
    weights = torch.linspace(-1.0, 1.5, tokens)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    scores = full(exact[0], exact[1], ids, *exact[2:], **settings)
    references = results(scores if entropy else (scores[0], None), exact, weights.double())
    both = []
    for kernels in (True, False):
        outputs = linear_logp(
            hidden,
            head,
            ids,
            bias=bias if with_bias else None,
            chunk=chunk,
            entropy=entropy,
            kernels=kernels,
            **settings,
        )
        both.append(results(outputs[:2], tensors, weights))
    names = ["logp", "entropy"][: 1 + entropy] + ["hidden", "head", "bias"][: len(tensors)]
    rows = {}
    for name, with_kernels, without, reference in zip(names, *both, references, strict=True):
        errors = [(x.double() - reference).abs().max().item() for x in (with_kernels, without)]
        rows[name] = (*errors, reference.abs().max().item())
    return rows


ROUNDING = {torch.float32: 2e-6, torch.float16: 2e-6, torch.bfloat16: 2**-7}
"""The error that gradients may have beside that without kernels, as a share of the largest.

The interpreter cuts digits off where it stores bfloat16, and a card rounds.
"""


def check_errors(dtype, *arguments, **settings):
    """Check that no result with kernels has more than 1.5 times the error of that without, but for rounding."""
    for name, (error, error_without, magnitude) in worst_errors(dtype, *arguments, **settings).items():
        rounding = 2e-6 if name in ("logp", "entropy") else ROUNDING[dtype]
        assert error <= 1.5 * error_without + rounding * max(magnitude, 1.0), name


SETTINGS = [{}, {"temperature": 0.7}, {"logit_softcap": 3.0}, {"logit_softcap": 30.0, "temperature": 1.3}]


@needs_triton
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(
    ("entropy", "with_bias", "chunk"), [(False, False, None), (True, True, 2049), (True, False, 997)]
)
def test_values_and_gradients_are_those_of_full_logits(entropy, with_bias, chunk, settings):
    check_errors(torch.float32, entropy, chunk, with_bias, **settings)


@needs_triton
def test_a_cap_far_above_the_logits_loses_no_digits():
    """There tanh is close to 0, where a formula with exp would lose them."""
    check_errors(torch.float32, True, 2049, False, logit_softcap=1e4)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("settings", [{}, {"logit_softcap": 3.0, "temperature": 1.3}], ids=str)
def test_half_precision_loses_no_more_than_without_kernels(settings, dtype):
    check_errors(dtype, True, 2049, True, **settings)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_other_sizes_and_settings(seed):
    generator = torch.Generator().manual_seed(seed)

    def choice(*options):
        return options[int(torch.randint(len(options), (), generator=generator))]

    vocabulary = choice(1, 2, 17, 2047, 2048, 2049, 4099)
    check_errors(
        choice(torch.float32, torch.bfloat16, torch.float16),
        choice(True, False),
        choice(None, 1 if vocabulary < 20 else 256, 1000, 2048, 5000),
        choice(True, False),
        seed,
        tokens=choice(1, 2, 5),
        vocabulary=vocabulary,
        temperature=choice(1.0, 0.3, 2.5),
        logit_softcap=choice(None, 0.5, 50.0),
    )


@needs_triton
@pytest.mark.parametrize("chunk", [1000, VOCABULARY])
def test_an_entry_that_the_bias_rules_out_has_no_part(chunk):
    hidden, head, bias, ids = draw()
    first = 2100  # the first block, and the first two chunks
    ids = ids % (VOCABULARY - first)
    ruled_out = bias.detach().masked_fill(torch.arange(VOCABULARY) < first, -math.inf)
    outputs = linear_logp(hidden, head, ids + first, bias=ruled_out, chunk=chunk, entropy=True, kernels=True)
    expected = full(hidden, head[first:], ids, bias.detach()[first:])
    weights = torch.ones(len(ids))
    pairs = [results(x[:2], [hidden, head], weights) for x in (outputs, expected)]
    torch.testing.assert_close(*pairs, rtol=1e-5, atol=1e-5)


@needs_triton
def test_ids_outside_of_the_columns_are_nowhere():
    from bandpo.core.kernels._linear_logp_kernels import LogitSettings, Statistics, gradient_by_products

    products = draw(tokens=5)[0] @ draw()[1].T
    products = products.detach().contiguous()
    ids = torch.tensor(
        [-1, VOCABULARY, -(2**40), 2**40, 6143]
    )  # the last is in the last block, and beyond it
    settings = LogitSettings(1.0, None)
    statistics = Statistics(5, VOCABULARY, VOCABULARY, settings, entropy=True, device=products.device)
    statistics.add(products, None, ids)
    logsumexp, mean_logit = statistics.combine()
    assert not statistics.id_logit.any()
    torch.testing.assert_close(logsumexp, products.logsumexp(1))
    probabilities = products.softmax(1)
    torch.testing.assert_close(mean_logit, (probabilities * products).sum(1), rtol=1e-5, atol=1e-5)
    gradient = gradient_by_products(
        products, None, ids, logsumexp, mean_logit, torch.ones(5), None, torch.float32, settings
    )
    torch.testing.assert_close(gradient, -probabilities, rtol=1e-5, atol=1e-7)


@needs_triton
def test_every_token_finds_its_id_in_its_chunk():
    hidden, head, _, _ = draw(tokens=9)
    ids = torch.tensor([0, 999, 1000, 1999, 2000, 2047, 2048, 4199, 3000])
    logp = linear_logp(hidden, head, ids, chunk=1000, kernels=True).logp
    torch.testing.assert_close(logp, full(hidden, head, ids)[0], rtol=1e-5, atol=1e-5)


@needs_triton
def test_tokens_without_a_gradient_are_not_computed(monkeypatch):
    from bandpo.core.kernels import _linear_logp_kernels as module

    hidden, head, _, ids = draw(tokens=6)
    logp = linear_logp(hidden, head, ids, kernels=True).logp
    shapes = []
    compute = module.gradient_by_products
    monkeypatch.setattr(module, "gradient_by_products", lambda *x: shapes.append(x[0].shape) or compute(*x))
    weights = torch.tensor([0.0, 1.0, 0.0, 0.0, -2.0, 0.0])
    gradient = torch.autograd.grad(logp, hidden, weights)[0]
    assert shapes == [(2, VOCABULARY)]
    assert (gradient != 0).any(-1).equal(weights != 0)


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
def test_what_is_not_finite_poisons_its_token_alone():
    hidden, head, _, ids = draw()
    expected = linear_logp(hidden, head, ids, entropy=True, kernels=True)
    broken = hidden.detach().clone()
    broken[1, 2], broken[3, 0] = math.nan, math.inf
    outputs = linear_logp(broken, head, ids, entropy=True, kernels=True)
    for values, finite in zip(outputs[:2], expected[:2], strict=True):
        assert values.isnan().tolist() == [False, True, False, True]
        torch.testing.assert_close(values[::2], finite[::2])


@needs_triton
def test_an_id_that_the_bias_rules_out_has_probability_0():
    hidden, head, bias, ids = draw()
    ruled_out = bias.detach().masked_fill(torch.arange(VOCABULARY) == ids[0], -math.inf)
    for kernels in (True, False):
        logp = linear_logp(hidden, head, ids, bias=ruled_out, kernels=kernels).logp
        assert (logp == -math.inf).tolist() == [True, False, False, False]


@needs_triton
def test_shapes_autocast_and_no_tokens():
    hidden, head, _, ids = draw(tokens=6)
    shaped = linear_logp(hidden.view(2, 3, -1), head, ids.view(2, 3), kernels=True).logp
    assert shaped.equal(linear_logp(hidden, head, ids, kernels=True).logp.view(2, 3))
    with torch.inference_mode(), torch.autocast("cpu"):
        logp = linear_logp(hidden, head, ids, kernels=True).logp
        expected = linear_logp(hidden, head, ids).logp
    torch.testing.assert_close(logp, expected, rtol=1e-5, atol=1e-5)
    assert linear_logp(hidden[:0], head, ids[:0], kernels=True).logp.shape == (0,)


@needs_triton
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_a_compiled_call_has_the_kernels(monkeypatch):
    from bandpo.core.kernels import _linear_logp_kernels as module

    calls = []
    add = module.Statistics.add
    monkeypatch.setattr(module.Statistics, "add", lambda *x: calls.append(1) or add(*x))
    hidden, head, _, ids = draw()
    compiled = torch.compile(lambda *x: linear_logp(*x, ids, kernels=True).logp * 1.0, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, head), full(hidden, head, ids)[0], rtol=1e-5, atol=1e-5)
    assert calls


@needs_triton
@pytest.mark.parametrize(
    ("settings", "dtype", "reason"),
    [
        ({"top": 4}, torch.float32, "the kernels do not compute top=4"),
        ({}, torch.float64, "hidden is torch.float64"),
    ],
    ids=str,
)
def test_what_is_outside_takes_todays_path(settings, dtype, reason):
    hidden, head, bias, ids = draw(dtype)
    expected = linear_logp(hidden, head, ids, bias=bias, entropy=True, **settings)
    with pytest.warns(BandWarning, match=rf"linear_logp\(…, kernels=True\) takes the path .*: {reason}"):
        outputs = linear_logp(hidden, head, ids, bias=bias, entropy=True, kernels=True, **settings)
    assert all(x is y is None or x.equal(y) for x, y in zip(outputs, expected, strict=True))
    linear_logp(hidden, head, ids, bias=bias, entropy=True, kernels=True, **settings)  # warns once


@pytest.mark.parametrize(
    ("interpreted", "installed", "reason"),
    [
        ("0", True, "kernels are for CUDA, and the tensors are on cpu"),
        ("1", False, "triton is not installed"),
    ],
)
def test_without_cuda_or_triton_the_results_are_todays(monkeypatch, interpreted, installed, reason):
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    if not installed:
        monkeypatch.delitem(sys.modules, "triton", raising=False)
        monkeypatch.setattr(_trial, "find_spec", lambda _: None)
    # Imported now, the kernels would be those of a process that interprets none.
    monkeypatch.setitem(sys.modules, "bandpo.core.kernels._linear_logp_kernels", None)
    hidden, head, _, ids = draw(tokens=300)  # a default chunk that the kernels would round
    expected = linear_logp(hidden, head, ids).logp
    with pytest.warns(BandWarning, match=reason):
        logp = linear_logp(hidden, head, ids, kernels=True).logp
    assert logp.equal(expected)


@needs_triton
@pytest.mark.parametrize("broken", ["forward", "backward"])
def test_kernels_that_differ_are_not_used(monkeypatch, broken):
    from bandpo.core.kernels import _linear_logp_kernels as module

    hidden, head, _, ids = draw()
    if broken == "forward":
        combine = module.Statistics.combine
        monkeypatch.setattr(module.Statistics, "combine", lambda self: [x * 1.001 for x in combine(self)])
        difference = "log-sum-exp differs by"
    else:
        compute = module.gradient_by_products
        monkeypatch.setattr(module, "gradient_by_products", lambda *x: compute(*x) * 1.01)
        difference = "gradient of hidden differs by"
    with pytest.warns(BandWarning, match=difference):
        logp = linear_logp(hidden, head, ids, kernels=True).logp
    assert logp.equal(linear_logp(hidden, head, ids).logp)


@needs_triton
def test_a_default_chunk_is_aligned(monkeypatch):
    from bandpo.core.kernels import _linear_logp_kernels as module

    widths = []
    add = module.Statistics.add
    monkeypatch.setattr(
        module.Statistics, "add", lambda self, x, *rest: widths.append(x.shape[1]) or add(self, x, *rest)
    )
    monkeypatch.setattr(linear, "SMALLEST_CHUNK", 2**12)
    hidden, head, _, ids = draw(tokens=7, vocabulary=3000)
    linear_logp(hidden, head, ids, kernels=True)
    assert widths == 2 * [
        1280,
        1280,
        440,
    ]  # 2 · (4096 // 7) = 1170 is no multiple of 256; the trial has all tokens
    assert module.BLOCK % linear.KERNEL_ALIGNMENT == 0


@needs_triton
def test_a_bias_may_have_strides():
    hidden, head, bias, ids = draw()
    strided = torch.stack([bias.detach(), torch.full_like(bias, math.nan)], 1)[:, 0]
    assert not strided.is_contiguous()
    logp = linear_logp(hidden, head, ids, bias=strided, kernels=True).logp
    torch.testing.assert_close(logp, full(hidden, head, ids, bias)[0], rtol=1e-5, atol=1e-5)
