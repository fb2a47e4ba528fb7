import math
import subprocess
import sys

import pytest
import torch

from bandpo import (
    KL,
    Band,
    ClipRule,
    DualClip,
    FDivergence,
    FixedClip,
    Linear,
    Masked,
    PearsonChi2,
    SequenceMask,
    TotalVariation,
    Unclipped,
    as_text,
    parse_divergence,
    parse_objective,
    parse_rule,
)

RULES = [
    Band(),
    Band(TotalVariation(), 0.2, math.inf),
    Band(PearsonChi2(), 1e-3),
    FixedClip(0.2, math.inf),
    Unclipped(),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_repr_reads_back(rule):
    assert parse_rule(repr(rule)) == rule


def test_short_forms():
    assert parse_rule(" Band ") == Band()
    assert parse_rule("Band(KL, 0.1)") == Band(KL(), 0.1)
    assert parse_divergence("TotalVariation") == TotalVariation()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Bnd(KL)", "unknown name 'Bnd'; did you mean Band?"),
        ("Band(kl)", "unknown name 'kl'; did you mean KL?"),
        ("Band(KL(), -1)", "radius must be a finite number above 0, got -1"),
        ("Band(KL(), rad=1)", "unexpected keyword argument 'rad'"),
        ("Band(KL()", "cannot be read; write a clip rule"),
        ("KL()", "is not a clip rule"),
        ("", "cannot be read; write a clip rule"),
        ("Band(**{})", "in 'Band"),
        ("__import__('os').system('true')", "cannot read"),
        ("Band(KL(), 'x')", "cannot read"),
        ("[1, 2]", "cannot read"),
        ("Band(os.system)", "os.system derives from none of ClipRule, Divergence, Objective, Method, Radius"),
        ("Band(no_such_module.KL)", "cannot import KL from no_such_module: No module named"),
        ("Band(math.KL)", "module 'math' has no attribute 'KL'"),
        ("Band(KL().f)", "cannot read"),
        ("KL()(1)", "cannot read"),
    ],
)
def test_refuses_with_the_part_at_fault(text, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace("?", r"\?").replace("*", r"\*")):
        parse_rule(text)


def test_a_class_of_ones_own_by_its_import_path(tmp_path, monkeypatch):
    (tmp_path / "mine_for_notation.py").write_text("from bandpo import KL\n\n\nclass Wider(KL):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    rule = parse_rule("Band(mine_for_notation.Wider(), 0.1)")
    assert type(rule.divergence).__name__ == "Wider"
    assert parse_divergence("mine_for_notation.Wider") == rule.divergence
    assert parse_rule(repr(rule)) == rule  # once imported, the bare name will do
    assert as_text(rule) == "Band(divergence=mine_for_notation.Wider(), radius=0.1, max_ratio=10.0)"
    read = f"from bandpo import parse_rule; print(parse_rule({as_text(rule)!r}))"
    fresh = subprocess.run([sys.executable, "-c", read], cwd=tmp_path, capture_output=True, text=True)
    assert fresh.stdout.strip() == "Band(divergence=Wider(), radius=0.1, max_ratio=10.0)"


def test_a_class_of_ones_own_does_not_take_the_name_of_ours():
    class KL(TotalVariation):
        pass

    assert parse_rule("Band(KL(), 0.05)") == Band()
    with pytest.raises(
        ValueError, match="no other process can import it; move it to the top level of a module"
    ):
        as_text(Band(KL(), 0.1))


def test_what_has_no_text():
    with pytest.raises(ValueError, match="Tensor has no text form"):
        as_text(Band(radius=torch.tensor([0.1])))
    with pytest.raises(ValueError, match="function has no text form"):
        as_text(Band(FDivergence(f=lambda u: (u - 1) ** 2)))


@pytest.mark.parametrize(
    "value", [*RULES, Masked(math.inf, True), SequenceMask(0.5, DualClip(2.0)), Linear(0.1, 0.2)]
)
def test_as_text_reads_back(value):
    text = as_text(value)
    if isinstance(value, Linear):
        assert parse_rule(f"Band(KL(), {text})").radius == value
    else:
        assert (parse_rule if isinstance(value, ClipRule) else parse_objective)(text) == value
