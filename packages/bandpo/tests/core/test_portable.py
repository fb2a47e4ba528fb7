"""Tests of the decision that works in any array library, and of the tokens that others can test theirs with."""

import ast
import json
import random

import numpy as np
import pytest
import torch

import decision_vectors
from bandpo import Band, parse
from bandpo.core.divergences import Divergence
from bandpo.portable import outside
from pages import ROOT

FILE = json.loads((ROOT / "upstream/decisions.json").read_text(encoding="utf-8"))
CASES = FILE["cases"]
NAMES = [f"{case['divergence']} {case['radius']}" for case in CASES]
LIBRARIES = {"numpy": (np, np.asarray), "torch": (torch, torch.tensor)}


def tokens_of(case, library, dtype):
    xp, as_array = LIBRARIES[library]
    kind = getattr(xp, dtype)
    return xp, as_array(case["log_ratio"], dtype=kind), as_array(case["logp_old"], dtype=kind)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_stored_decisions(case, library, dtype):
    xp, log_ratio, logp_old = tokens_of(case, library, dtype)
    below, above = outside(xp, log_ratio, logp_old, case["radius"], case["divergence"], case["max_ratio"])
    assert below.tolist() == case["below"]
    assert above.tolist() == case["above"]
    assert 10 < sum(case["below"]) < len(case["below"]) - 10
    assert 10 < sum(case["above"]) < len(case["above"]) - 10


@pytest.mark.parametrize("case", CASES, ids=NAMES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_core_makes_the_stored_decisions(case, dtype):
    _, log_ratio, logp_old = tokens_of(case, "torch", dtype)
    band = Band(parse(f"{case['divergence']}()", Divergence), case["radius"], case["max_ratio"])
    mask = band.clip_mask(log_ratio, logp_old)
    assert mask.clipped_low.tolist() == case["below"]
    assert mask.clipped_high.tolist() == case["above"]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_many_tokens_against_the_core(case):
    random = torch.Generator().manual_seed(3)
    rare = -torch.empty(50_000).exponential_(0.3, generator=random)
    common = -(torch.rand(50_000, generator=random) ** 8)
    old = torch.cat([rare, common]).double().clamp(-600.0, -1e-12)
    new = old + 3 * torch.randn(old.shape, generator=random) * torch.rand(old.shape, generator=random)
    log_ratio = new.clamp(max=-1e-12) - old
    mask = Band(parse(f"{case['divergence']}()", Divergence), case["radius"]).clip_mask(log_ratio, old)
    below, above = outside(np, log_ratio.numpy(), old.numpy(), case["radius"], case["divergence"])
    assert (mask.clipped_low.numpy() != below).sum() + (mask.clipped_high.numpy() != above).sum() == 0


def test_edges_of_the_simplex():
    """A token of probability 1, one that takes all probability, and one that cannot be sampled."""
    old = np.log(np.array([1.0, 0.5, 0.5], dtype=np.float32))
    log_ratio = np.array([0.0, np.log(2.0), 0.7], dtype=np.float32)
    with np.errstate(all="raise", under="ignore"):
        for name in ("KL", "ReverseKL", "TotalVariation", "PearsonChi2"):
            below, above = outside(np, log_ratio, old, 0.05, name)
            assert below.tolist() == [False, False, False]
            assert above.tolist() == [False, True, True]
        masked = outside(np, np.array([0.0, 3.0]), np.array([-np.inf, -1e30]), 0.05)
    assert [mask.tolist() for mask in masked] == [[False, False], [False, True]]


def test_a_radius_per_token():
    case = CASES[0]
    xp, log_ratio, logp_old = tokens_of(case, "numpy", "float64")
    _, above = outside(xp, log_ratio, logp_old, np.where(log_ratio > 1, 1e6, 0.05), max_ratio=1e30)
    assert not above[log_ratio > 1].any()
    assert above[log_ratio <= 1].any()


def test_an_unknown_divergence_is_refused():
    with pytest.raises(ValueError, match=r"divergence must be KL, .* got 'kl3'; for others use bandpo.Band"):
        outside(np, np.zeros(1), np.zeros(1), 0.05, "kl3")


def test_the_file_can_be_copied():
    """It imports nothing but the standard library."""
    source = (ROOT / "packages/bandpo/src/bandpo/portable.py").read_text(encoding="utf-8")
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", None) or node.names[0].name for node in imports}
    assert names == {"__future__", "math", "typing"}


def test_the_stored_tokens_are_those_of_the_script():
    for case in CASES:
        index = random.Random(0).sample(range(len(case["above"])), 5)
        made = decision_vectors.make_case(case["divergence"], case["radius"], max(index) + 1)
        for column in ("log_ratio", "logp_old", "below", "above"):
            assert [made[column][k] for k in index] == [case[column][k] for k in index]
    assert FILE["about"] == decision_vectors.ABOUT
