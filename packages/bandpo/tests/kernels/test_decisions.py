"""Band's decision in JAX, and in the Triton code of docs/frameworks.md, on the stored tokens."""

import importlib.util
import json
from functools import partial

import numpy as np
import pytest
import torch

from bandpo.portable import outside
from pages import ROOT, blocks

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
jax = pytest.importorskip("jax")
pytestmark = [
    # The interpreter computes both sides of a condition with numpy.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:numpy"),
]

CASES = json.loads((ROOT / "upstream/decisions.json").read_text(encoding="utf-8"))["cases"]
NAMES = [f"{case['divergence']} {case['radius']}" for case in CASES]


def masks_of(case):
    return [np.array(case[side]) for side in ("below", "above")]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_jax_makes_the_stored_decisions(case, dtype):
    with jax.enable_x64(dtype == "float64"):
        tokens = [jax.numpy.array(case[name], dtype=dtype) for name in ("log_ratio", "logp_old")]
        decide = partial(outside, jax.numpy, radius=case["radius"], divergence=case["divergence"])
        eager, compiled = decide(*tokens), jax.jit(decide)(*tokens)
    assert tokens[0].dtype == dtype
    for found in (eager, compiled):
        for mask, wanted in zip(found, masks_of(case), strict=True):
            assert (np.asarray(mask) == wanted).all()


KERNEL = """

@triton.jit
def kernel(log_ratio, logp_old, below, above, count, radius, log_cap, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    used = i < count
    low, high = outside(tl.load(log_ratio + i, used, 0.0), tl.load(logp_old + i, used, -1.0), radius, log_cap)
    tl.store(below + i, low, used)
    tl.store(above + i, high, used)
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """A kernel that calls the function of the page."""
    (block,) = (block for block in blocks(ROOT / "docs/frameworks.md", "python") if block.title == "band.py")
    file = tmp_path_factory.mktemp("own") / "band.py"
    file.write_text(block.text + KERNEL, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("band_of_the_page", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


OF_KL = [index for index, case in enumerate(CASES) if case["divergence"] == "KL"]


@pytest.mark.parametrize("index", OF_KL)
def test_the_triton_code_of_the_page_makes_the_stored_decisions(index, kernel):
    case = CASES[index]
    tokens = [torch.tensor(case[name], dtype=torch.float32) for name in ("log_ratio", "logp_old")]
    count = len(tokens[0])
    found = [torch.zeros(count, dtype=torch.bool) for _ in range(2)]
    kernel[(1,)](*tokens, *found, count, case["radius"], float(np.log(case["max_ratio"])), BLOCK=256)
    for mask, wanted in zip(found, masks_of(case), strict=True):
        assert (mask.numpy() == wanted).all()
