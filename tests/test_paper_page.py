"""What docs/paper.md says of its figures, its names and the paper's numbers."""

import re

import pytest
import torch

from bandpo import DAPO, DCPO, BandAbove, BandPO, ClipRule, parse
from pages import ROOT

PAGE = " ".join((ROOT / "docs/paper.md").read_text(encoding="utf-8").split())
RULES = {"BandPO": BandPO().clip, "DAPO": DAPO().clip, "DCPO": DCPO(), "BandAbove": BandAbove().clip}


def bounds(name: str, p: torch.Tensor | float):
    """Return the lowest and the highest new probability of a token that a rule allows."""
    p = torch.as_tensor(p, dtype=torch.float64)
    found = RULES[name].bounds(p.log())
    return p * found.lower, p * found.upper


def test_the_caption_of_figure_1_has_what_the_rules_allow():
    caption = re.search(
        r"may gain (\S+) under BandPO, (\S+) under DCPO and (\S+) under DAPO\. "
        r"Above (\S+) DAPO's upper bound and above (\S+) DCPO's",
        PAGE,
    )
    *gains, beyond_dapo, beyond_dcpo = caption.groups()
    for name, said in zip(("BandPO", "DCPO", "DAPO"), gains, strict=True):
        assert f"{bounds(name, 0.08)[1].item() - 0.08:.2g}" == said
    p = torch.linspace(0.0005, 0.9995, 1000, dtype=torch.float64)
    for name, said in (("DAPO", beyond_dapo), ("DCPO", beyond_dcpo)):
        above = bounds(name, p)[1] > 1
        assert p[above].min().item() == pytest.approx(float(said), abs=0.006)
        assert above.equal(p >= p[above].min())
    assert bounds("BandPO", p)[1].max() <= 1


def test_the_caption_of_figure_2_has_what_the_rules_allow():
    dapo, band = re.search(r"from (\S+ to \S+) under DAPO, and from (\S+ to \S+) under BandPO", PAGE).groups()
    for name, said in (("DAPO", dapo), ("BandPO", band)):
        lower, upper = bounds(name, 0.08)
        assert f"{lower.item():.3f} to {upper.item():.3f}" == said
    p = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    torch.testing.assert_close(bounds("BandAbove", p)[1], bounds("BandPO", p)[1])
    torch.testing.assert_close(bounds("BandAbove", p)[0], 0.8 * p)


@pytest.mark.parametrize(
    ("authors", "meaning"),
    [
        ("bandkl", "Band(KL(), 0.05, max_ratio=10)"),
        ("dcpodac", "DCPO(0.16, 0.2, max_ratio=10)"),
        ("bandkl005_relax", "Loosest(Band(KL(), 0.05, max_ratio=10), FixedClip(0.2, 0.28))"),
    ],
)
def test_the_authors_names_mean_the_rules(authors, meaning):
    assert f"`{authors}`" in PAGE
    assert parse(authors, ClipRule) == parse(meaning, ClipRule)


def test_the_papers_numbers_are_those_beside_ours():
    beside = (
        (ROOT / "docs/when.md").read_text(encoding="utf-8").split("## The paper's numbers beside these")[1]
    )
    row = re.search(r"at least ([\d.]+) points higher, pass@32 up to ([\d.]+) %", PAGE)
    entropy = re.search(r"it ends near ([\d.]+), and near ([\d.]+) with GRPO", PAGE)
    for number in (*row.groups(), *entropy.groups()):
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]*\d)", beside), number
