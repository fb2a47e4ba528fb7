"""The explorer of the first page says of a token what the library does."""

import json
import re
import shutil

import pytest
import torch

from bandpo import DCPO, FixedClip, TotalVariation
from bandpo.core.methods import DPPO, BandAbove, BandPO
from browser import PAGE, needs_browser, opened
from pages import ROOT, extension

RULES = {
    "BandAbove": (BandAbove().clip, BandAbove(divergence=TotalVariation()).clip),
    "BandPO": (BandPO().clip, BandPO(divergence=TotalVariation()).clip),
    "DPPO": (DPPO().clip, DPPO(divergence=TotalVariation()).clip),
    "DCPO": (DCPO(),) * 2,
    "PPO, GRPO": (FixedClip(0.2),) * 2,
    "DAPO": (FixedClip(0.2, 0.28),) * 2,
}
TOKENS = [(0.08, 2.0), (0.002, 30.0), (0.6, 0.5), (0.95, 1.04)]
EACH = """
  const said = [];
  const [method, divergence] = document.querySelectorAll("#explorer select");
  const type = (name, x) => {
    const box = document.querySelector(`[aria-label=${name}]`);
    box.value = x; box.dispatchEvent(new Event("input"));
  };
  for (const { value } of method.options)
    for (const name of ["KL", "TotalVariation"]) {
      method.value = value; divergence.value = name; method.dispatchEvent(new Event("change"));
      for (const [p, ratio] of TOKENS) {
        type("p", p); type("ratio", ratio);
        const row = document.querySelectorAll("#explorer .verdict tr")[1];
        said.push([name, p, ratio, ...[...row.children].map((cell) => cell.textContent)]);
      }
    }
  document.body.textContent = JSON.stringify(said);
"""


@pytest.mark.slow
@needs_browser
def test_it_says_of_tokens_what_the_rules_do(tmp_path):
    page = extension("start_page").start_page((ROOT / "README.md").read_text())
    scripts = re.findall(r'<script src="explorer/(\S+?)"></script>', page)
    assert '<div id="explorer"></div>\n\n![' in page  # the picture after it gives way
    for name in (*scripts, "uPlot.css"):
        shutil.copy(next(f for f in (PAGE / name, ROOT / "docs/explorer" / name) if f.is_file()), tmp_path)
    file = tmp_path / "page.html"
    picture = '<p><img src="figures/allowed_change.png"></p>'
    loaded = "".join(f'<script src="{name}"></script>' for name in scripts)
    file.write_text(f'<meta charset="utf-8"><body><div id="explorer"></div>{picture}{loaded}')
    seen = opened(file, tmp_path)
    assert "img" not in [tag for tag, _ in seen.elements]
    assert [tag for tag, _ in seen.elements].count("canvas") == 2
    rows = json.loads(opened(file, tmp_path, EACH.replace("TOKENS", json.dumps(TOKENS))).text)
    assert len(rows) == 2 * len(RULES) * len(TOKENS)
    for divergence, p, ratio, method, interval, reach, winner, loser in rows:
        rule = RULES[method][divergence != "KL"]
        lower, upper = (x.item() for x in rule.bounds(torch.tensor([p], dtype=torch.float64).log()))
        assert [*map(float, interval.split(" … "))] == pytest.approx([lower, upper], rel=0.05, abs=1e-12)
        assert float(reach.split(" … ")[1]) == pytest.approx(min(1, p * upper), rel=0.006)
        assert winner == ("blocked by the upper bound" if ratio > upper else "kept")
        assert loser == ("blocked by the lower bound" if ratio < lower else "kept")
