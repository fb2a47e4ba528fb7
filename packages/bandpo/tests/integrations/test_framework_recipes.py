"""The recipe of docs/frameworks.md for CleanRL, executed as it is printed there."""

from types import SimpleNamespace

import torch

import bandpo
from contract import make_batch
from pages import ROOT, blocks


def test_cleanrls_two_lines():
    [block] = blocks(ROOT / "docs/frameworks.md", "diff")
    added, _, old, new = (line[1:].strip() for line in block.text.splitlines())
    batch = make_batch(15)
    advantages = batch.advantages[:, None].expand_as(batch.mask)
    ratio = (batch.logp - batch.logp_old).exp()
    names = {"torch": torch, "bandpo": bandpo, "ratio": ratio, "mb_advantages": advantages}
    names |= {"b_logprobs": batch.logp_old, "mb_inds": slice(None), "args": SimpleNamespace(clip_coef=0.2)}
    exec(f"{added}\n{new}\nours = pg_loss2\n{old}\nstock = pg_loss2", names)
    bounds = bandpo.Band(bandpo.KL(), 0.05).bounds(batch.logp_old)
    torch.testing.assert_close(names["ours"], -advantages * ratio.clamp(bounds.lower, bounds.upper))
    torch.testing.assert_close(names["stock"], -advantages * ratio.clamp(0.8, 1.2))
