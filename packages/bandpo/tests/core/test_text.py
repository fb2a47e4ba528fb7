import math
import subprocess
import sys

import pytest
import torch

import bandpo
from bandpo import (
    DCPO,
    KL,
    Band,
    ClipRule,
    Divergence,
    FDivergence,
    FixedClip,
    Loosest,
    Method,
    TotalVariation,
    TwoSided,
    Unclipped,
    parse,
)
from bandpo.core import text as text_module
from bandpo.core.divergences import PearsonChi2
from bandpo.core.objectives import DropOutside, DualClip, Objective, SequenceMask
from bandpo.core.schedules import Linear, Radius
from bandpo.core.text import as_method, as_text

RULES = [
    Band(),
    Band(TotalVariation(), 0.2, math.inf),
    Band(PearsonChi2(), 1e-3),
    FixedClip(0.2, math.inf),
    Unclipped(),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_repr_reads_back(rule):
    assert parse(repr(rule), ClipRule) == rule


def test_short_forms():
    assert parse(" Band ", ClipRule) == Band()
    assert parse("Band(KL, 0.1)", ClipRule) == Band(KL(), 0.1)
    assert parse("TotalVariation", Divergence) == TotalVariation()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Bnd(KL)", "unknown name 'Bnd'; did you mean Band?"),
        ("Band(kl)", "unknown name 'kl'; did you mean KL?"),
        ("Band(KL(), -1)", "radius must be a finite number above 0, got -1"),
        (
            "Band(KL(), raduis=1)",
            "Band has no argument 'raduis'; did you mean radius?; it takes divergence, radius",
        ),
        ("DAPO(hihg=0.28)", "DAPO has no argument 'hihg'; did you mean high?; it takes low, high"),
        ("Band(KL(x=1), 0.1)", "KL has no argument 'x'; it takes no arguments"),
        (
            "bandkl(raduis=1)",
            "bandkl has no argument 'raduis'; did you mean radius?; it takes radius, max_ratio",
        ),
        ("bndkl", "unknown name 'bndkl'; did you mean bandkl?"),
        ("bandkl5", "unknown name 'bandkl5'; did you mean bandkl?"),
        (
            "bandtv05",
            "did you mean bandtv? Three digits are its radius without the point, as in bandtv005, which is",
        ),
        ("bandch2", "as in bandchi2005, which is bandchi2"),
        ("Band(KL()", "cannot be read; write a clip rule"),
        ("KL()", "is not a clip rule"),
        ("", "cannot be read; write a clip rule"),
        ("Band(**{})", "in 'Band"),
        ("__import__('os').system('true')", "cannot read"),
        ("Band(KL(), 'x')", "radius must be a finite number above 0, got 'x'"),
        ("[1, 2]", "cannot read"),
        (
            "Band(os.system)",
            "os.system derives from none of ClipRule, Divergence, Objective, Method, Radius, and",
        ),
        ("Band(no_such_module.KL)", "cannot import KL from no_such_module: No module named"),
        ("Band(math.KL)", "module 'math' has no attribute 'KL'"),
        ("Band(KL().f)", "cannot read"),
        ("KL()(1)", "cannot read"),
    ],
)
def test_refuses_with_the_part_at_fault(text, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace("?", r"\?").replace("*", r"\*")):
        parse(text, ClipRule)


def test_a_class_of_ones_own_by_its_import_path(tmp_path, monkeypatch):
    (tmp_path / "mine_for_notation.py").write_text("from bandpo import KL\n\n\nclass Wider(KL):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    rule = parse("Band(mine_for_notation.Wider(), 0.1)", ClipRule)
    assert type(rule.divergence).__name__ == "Wider"
    assert parse("mine_for_notation.Wider", Divergence) == rule.divergence
    assert parse(repr(rule), ClipRule) == rule  # once imported, the bare name will do
    assert as_text(rule) == "Band(divergence=mine_for_notation.Wider(), radius=0.1, max_ratio=10.0)"


@pytest.mark.slow  # a process imports torch
def test_the_text_of_a_class_of_ones_own_is_read_by_another_process(tmp_path):
    (tmp_path / "mine_for_notation.py").write_text("from bandpo import KL\n\n\nclass Wider(KL):\n    pass\n")
    text = "Band(divergence=mine_for_notation.Wider(), radius=0.1, max_ratio=10.0)"
    read = f"from bandpo import ClipRule, parse; print(parse({text!r}, ClipRule))"
    fresh = subprocess.run([sys.executable, "-c", read], cwd=tmp_path, capture_output=True, text=True)
    assert fresh.stdout.strip() == "Band(divergence=Wider(), radius=0.1, max_ratio=10.0)"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("bandkl", Band(KL(), 0.05, 10.0)),
        ("bandtv", Band(TotalVariation(), 0.05, 10.0)),
        ("bandchi2", Band(PearsonChi2(), 0.05, 10.0)),
        ("bandkl005", Band(KL(), 0.05, 10.0)),
        ("bandchi2010", Band(PearsonChi2(), 0.1, 10.0)),
        ("bandkl(0.03, max_ratio=5)", Band(KL(), 0.03, 5)),
        ("bandkl005_relax", Loosest(Band(KL(), 0.05, 10.0), FixedClip(0.2, 0.28))),
        ("dcpodac", DCPO(0.16, 0.2, max_ratio=10.0)),
        ("dcpodac(high=0.3)", DCPO(0.16, 0.3, max_ratio=10.0)),
        ("TwoSided(FixedClip(0.2), bandtv003)", TwoSided(FixedClip(0.2), Band(TotalVariation(), 0.03, 10.0))),
    ],
)
def test_names_of_the_authors_scripts(text, rule):
    assert parse(text, ClipRule) == rule
    assert parse(text, ClipRule, imports=False) == rule
    assert parse(text) == as_method(text) == Method(rule)


def test_a_text_of_somebody_else_s_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "evil_for_text.py").write_text("open('ran', 'w')\nfrom bandpo import Method\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for text in (
        "evil_for_text.X()",
        "Band(evil_for_text.X(), 0.1)",
        "Method(FixedClip(0.2), evil_for_text.X())",
    ):
        with pytest.raises(ValueError, match="X would have to be imported"):
            parse(text, imports=False)
    assert not (tmp_path / "ran").exists()


def test_a_method_of_ones_own_is_a_function(tmp_path, monkeypatch):
    (tmp_path / "mine_for_methods.py").write_text(
        "from bandpo import FixedClip, Method\nfrom bandpo.core.objectives import DropOutside\n\n\n"
        "def gentle(low: float = 0.1) -> Method:\n    return Method(FixedClip(low), DropOutside())\n\n\n"
        "def other(low):\n    return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert parse("mine_for_methods.gentle(0.3)") == Method(FixedClip(0.3), DropOutside())
    with pytest.raises(ValueError, match="is not a function annotated `-> Method`"):
        parse("mine_for_methods.other(0.3)")


def test_a_class_of_ones_own_does_not_take_the_name_of_ours():
    class KL(TotalVariation):
        pass

    assert parse("Band(KL(), 0.05)", ClipRule) == Band()
    with pytest.raises(ValueError, match="cannot be imported; move it out of the function"):
        as_text(Band(KL(), 0.1))


def test_a_class_of_a_notebook_is_read_back_as_it_was_last_defined(monkeypatch):
    for number in (1, 2):
        cell = type("InACell", (FixedClip,), {"__module__": "__main__", "number": number})
        monkeypatch.setattr(sys.modules["__main__"], "InACell", cell, raising=False)
        assert as_text(cell(0.3)) == "__main__.InACell(low=0.3, high=0.3)"
        assert parse("__main__.InACell(0.3)", ClipRule).number == number


def test_what_has_no_text():
    with pytest.raises(ValueError, match="Tensor has no text form"):
        as_text(Band(radius=torch.tensor([0.1])))
    with pytest.raises(ValueError, match="function has no text form"):
        as_text(Band(FDivergence(f=lambda u: (u - 1) ** 2)))


@pytest.mark.parametrize(
    "value", [*RULES, DropOutside(math.inf, True), SequenceMask(0.5, DualClip(2.0)), Linear(0.1, 0.2)]
)
def test_as_text_reads_back(value):
    text = as_text(value)
    if isinstance(value, Linear):
        assert parse(f"Band(KL(), {text})", ClipRule).radius == value
    else:
        assert parse(text, ClipRule if isinstance(value, ClipRule) else Objective) == value


@pytest.mark.parametrize("name", ["GRPO", "BandPO", "FixedClip", "Method"])
def test_a_method_that_is_not_called_is_named(name):
    with pytest.raises(TypeError, match=rf"method is {name} itself: write {name}\(\)"):
        as_method(getattr(bandpo, name))


ABSENT = (
    *(
        "NSR",
        "DISPO",
        "VACO",
        "OPMD",
        "WAPO",
        "REAL",
        "SAT",
        "GEPO",
        "SSPO",
        "TPO",
        "CPO",
        "TRPO",
        "SPPO",
        "MAPPO",
    ),
    *(
        "IPPO",
        "APPO",
        "GIPO",
        "KPO",
        "MinPRO",
        "LUSPO",
        "GTPO",
        "AGAPO",
        "RLOO",
        "DPO",
        "SimPO",
        "VAPO",
        "VCPO",
    ),
    *(
        "PPG",
        "CFPO",
        "ARPO",
        "SRPO",
        "GiGPO",
        "M3PO",
        "DeepSeekV3",
        "DeepSeekV4",
        "TokenGRPO",
        "MaxRL",
        "ScaleRL",
    ),
)
"""Names of the literature that are no methods here. Many differ from one that is by a letter."""


@pytest.mark.parametrize("name", ABSENT)
def test_a_published_name_is_never_answered_with_another_method(name):
    with pytest.raises(ValueError, match=rf"unknown name '{name}'") as error:
        parse(f"{name}()")
    assert "did you mean" not in str(error.value)
    assert "bandpo.core.methods.METHODS lists the methods" in str(error.value)
    assert "GRPO, " in str(error.value)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("grpo", "GRPO"), ("GRPOO", "GRPO"), ("GSPPO", "GSPO"), ("SAP", "SAPO"), ("SAP0", "SAPO"), ("DAOP", "DAPO"),
        ("CSIPO", "CISPO"), ("m2p0", "M2PO"), ("Ipo", "IPO"), ("Bnad", "Band"), ("BandAbov", "BandAbove"),
        ("bandabove", "BandAbove"), ("MinRL", "MiniRL"), ("Mini_RL", "MiniRL"), ("PrimeLR", "PrimeRL"),
        ("ClipConv", "ClipCov"), ("IcePopp", "IcePop"), ("TokenTOP", "TokenTOPR"), ("DeepSekV32", "DeepSeekV32"),
        ("FixdClip", "FixedClip"),
    ],
)  # fmt: skip
def test_a_slip_of_the_fingers_is_answered(typed, name):
    with pytest.raises(ValueError, match=rf"unknown name '{typed}'; did you mean {name}\?"):
        parse(f"{typed}()")


@pytest.mark.parametrize(
    ("text", "typed", "name"),
    [
        ("Band({}, 0.05)", "KLD", "KL"), ("Band({}, 0.05)", "KLdiv", "KL"), ("Band({}, 0.05)", "JS", "JensenShannon"),
        ("Band(divergence={})", "TotalVariatoin", "TotalVariation"), ("BandPO({})", "TV", "TotalVariation"),
        ("DPPO({}, 0.2)", "alpha", "AlphaDivergence"), ("Band(KL(), {}(0.05, 0.01))", "Linar", "Linear"),
        ("FixedClip(0.2, {}(0.2, 0.3))", "linear", "Linear"), ("TwoSided({}(0.2), Band())", "FixdClip", "FixedClip"),
        ("Method(Band(), {}())", "Surogate", "Surrogate"), ("Method(Band(), {}(3))", "dual_clip", "DualClip"),
        ("Method(clip={}())", "Unclip", "Unclipped"),
    ],
)  # fmt: skip
def test_a_name_is_answered_with_one_of_its_kind(text, typed, name):
    with pytest.raises(ValueError, match=rf"unknown name '{typed}'; did you mean {name}\?"):
        parse(text.format(typed))


@pytest.mark.parametrize(
    ("text", "kind", "first", "base"),
    [
        ("chi2", Divergence, {"NeymanChi2", "PearsonChi2"}, Divergence),
        ("Band(Wasserstein())", Method, set(), Divergence),
        ("Method(Band(), Xyz())", Method, set(), Objective),
        ("Method(XYZ())", Method, set(), ClipRule),
        ("Band(KL(), Xyz(1))", Method, set(), Radius),
    ],
)
def test_without_a_near_name_those_of_the_kind_are_listed_nearest_first(text, kind, first, base):
    with pytest.raises(ValueError, match="known are ") as error:
        parse(text, kind)
    names = str(error.value).partition("known are ")[2].partition(";")[0].split(", ")
    vocabulary = text_module._vocabulary(package_only=True)
    kinds = {
        name for name, value in vocabulary.items() if isinstance(value, type) and issubclass(value, base)
    }
    assert kinds <= {*names}
    assert all(issubclass(cls, base) for cls in map(vocabulary.get, names) if isinstance(cls, type))
    assert {*names[: len(first)]} == first
