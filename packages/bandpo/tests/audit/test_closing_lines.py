"""The lines after training say the shares that the audit's metrics have."""

import pytest
import torch

from bandpo import Batch, FixedClip
from bandpo.audit import closing_lines
from bandpo.audit.closing_lines import FEWEST_RARE_WINNERS, describe_rare_winners
from bandpo.audit.metrics import Audit
from bandpo.core.text import as_method
from rlvet.runs import effect


def test_the_limit_and_the_format_are_those_of_reports():
    assert FEWEST_RARE_WINNERS == effect.FEWEST_RARE_WINNERS
    for share in (0.0, 1e-4, 0.0049, 0.005, 0.126, 0.995, 1.0):
        assert closing_lines.percent(share) == effect.percent(share)


AGE = "each batch served 4 updates"


def audit_of(method, seeds=(0, 1)):
    """The sum of the audits of batches with ratios far from 1."""
    audits = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        logp_old = -torch.rand(8, 64, generator=generator) * 7 - 0.01
        logp = (logp_old + 0.4 * torch.randn(8, 64, generator=generator)).clamp(max=-1e-3)
        advantages = torch.randn(8, generator=generator)
        audits.append(Audit.from_batch(Batch.read(logp, logp_old, advantages), method=method))
    return audits[0] + audits[1] if len(audits) == 2 else audits[0]


def percent(metrics, prefix):
    return f"{100 * metrics[f'{prefix}blocked_mass_below_0.1']:.0f} %"


@pytest.mark.parametrize(
    ("method", "name", "others"),
    [
        ("BandAbove()", "BandAbove", ["clip 0.2", "Clip-Higher"]),
        ("SAPO()", "SAPO", ["clip 0.2", "Clip-Higher"]),
        ("FixedClip(0.2)", "clip 0.2", ["Clip-Higher", "Band"]),
        ("FixedClip(0.2, 0.28)", "Clip-Higher", ["clip 0.2", "Band"]),
        ("Band()", "Band", ["clip 0.2", "Clip-Higher"]),
        ("Band(KL(), 0.001)", "Band", ["clip 0.2", "Clip-Higher"]),
    ],
)
def test_the_shares_are_those_of_the_metrics(method, name, others):
    audit = audit_of(method)
    metrics = audit.metrics()
    count = int(metrics["tokens_positive_below_0.1"])
    first, second = [percent(metrics, f"if/{other}/") for other in others]
    line, further = describe_rare_winners(audit, as_method(method), method.partition("(")[0], AGE)
    assert line == (
        f"of the gradient on your {count} rare winners (p < 0.1) {others[0]} would have dropped {first}, "
        f"{others[1]} {second}; {name} dropped {percent(metrics, '')}"
    )
    assert first != "0 %"
    assert further.endswith(f" · {AGE}")


def test_the_second_line_says_how_much_of_what_the_strictest_rule_drops_is_rare():
    """Thirty tokens each of the probabilities 0.05, 0.4 and 0.8, whose ratios are 2, 1.25 and 1.1."""
    p = torch.tensor([[0.05, 0.4, 0.8]]).expand(30, -1)
    ratio = torch.tensor([[2.0, 1.25, 1.1]])
    audit = Audit.from_batch(Batch.read((p * ratio).log(), p.log(), torch.ones(30)), method="BandAbove()")
    line, further = describe_rare_winners(audit, as_method("BandAbove()"), "mine")
    assert line == (
        "of the gradient on your 30 rare winners (p < 0.1) clip 0.2 would have dropped 100 %, Clip-Higher 100 %; "
        "mine dropped 0 %"
    )
    # Of 2 + 1.25 + 1.1 the rare ones have 46 %, and of 2 + 1.25 that clip 0.2 drops 62 %.
    assert further == (
        "rare winners had 46 % of all winners' gradient, and 62 % of the part that clip 0.2 would have dropped"
    )


@pytest.mark.parametrize("count", [1, 4, FEWEST_RARE_WINNERS - 1])
def test_of_few_tokens_nothing_is_said(count):
    logp_old = torch.full((count, 1), 0.05).log()
    audit = Audit.from_batch(Batch.read(logp_old + 1, logp_old, torch.ones(count)), method=FixedClip(0.2))
    [line] = describe_rare_winners(audit, as_method("FixedClip(0.2)"), "FixedClip(0.2)", AGE)
    number = "1 rare winner" if count == 1 else f"{count} rare winners"
    assert line == f"{number} (p < 0.1, A > 0): too few to say what the clip does to them"


@pytest.mark.parametrize("count", [1, 12, 29, 30])
def test_of_few_tokens_that_a_rule_drops_no_share_is_said(count):
    """Forty rare winners, of which the clip drops some, and common ones that no rule drops."""
    p = torch.tensor([[0.05, 0.5]]).expand(40, -1)
    ratio = torch.ones(40, 2)
    ratio[:count, 0] = 1.5
    audit = Audit.from_batch(Batch.read((p * ratio).log(), p.log(), torch.ones(40)), method="FixedClip(0.2)")
    line, further = describe_rare_winners(audit, as_method("FixedClip(0.2)"), "mine", AGE)
    assert "40 rare winners" in line
    assert (
        further == AGE
        if count < FEWEST_RARE_WINNERS
        else "100 % of the part that clip 0.2 dropped" in further
    )


def test_of_a_soft_rule_that_drops_a_part_of_many_tokens_the_share_is_said():
    p = torch.full((40, 2), 0.05)
    audit = Audit.from_batch(Batch.read((p * 1.1).log(), p.log(), torch.ones(40)), method="SAPO()")
    _, further = describe_rare_winners(audit, as_method("SAPO()"), "SAPO", AGE)
    assert "100 % of the part that SAPO dropped" in further


def test_where_every_ratio_is_one_no_rule_drops_anything():
    logp_old = torch.full((40, 1), 0.05).log()
    audit = Audit.from_batch(Batch.read(logp_old, logp_old, torch.ones(40)), method="BandAbove()")
    line, further = describe_rare_winners(audit, as_method("BandAbove()"), "BandAbove()", AGE)
    assert line.endswith("clip 0.2 would have dropped 0 %, Clip-Higher 0 %; BandAbove() dropped 0 %")
    assert further == AGE
