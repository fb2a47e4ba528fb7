"""The fixture `files_of_settings_are_merged_once` against hydra itself, in a process of its own."""

import json
import subprocess
import sys

import pytest

from helpers.frameworks import needs
from pages import ROOT

RECIPES = ROOT / "packages/bandpo-lab/src/bandpo_lab/recipes"
CASES = [
    ["+paper/model=qwen2.5-3b-instruct", "+paper/rule=band-kl", "+paper=recommended"],
    ["+paper/model=qwen2.5-3b-instruct", "+paper/rule=grpo", "+paper=recommended"],
    # Values, a new setting, and one that is deleted.
    [
        "+paper/rule=band-tv",
        "+paper=recommended",
        "trainer.total_epochs=3",
        "+trainer.mine=1",
        "~trainer.logger",
    ],
    # The same setting as before with another value, and another engine, whose files verl chooses.
    ["+paper/rule=band-tv", "+paper=recommended", "trainer.total_epochs=4", "model_engine=megatron"],
]
COMPOSE = """
import json, pathlib, sys
from omegaconf import OmegaConf
from bandpo_lab.rehearsal.shrink import compose

folder, cases = json.loads(sys.argv[1])
recipes = pathlib.Path(folder)
print(json.dumps([OmegaConf.to_yaml(compose(case, recipes, "ppo_trainer"), resolve=False) for case in cases]))
"""


@pytest.mark.slow
def test_kept_compositions_are_those_of_hydra():
    needs("verl")
    from omegaconf import OmegaConf

    from bandpo_lab.rehearsal.shrink import compose

    arguments = json.dumps([str(RECIPES), CASES])
    process = subprocess.run(
        [sys.executable, "-c", COMPOSE, arguments], capture_output=True, text=True, check=True, cwd=ROOT
    )
    by_hydra = json.loads(process.stdout.splitlines()[-1])
    assert len(set(by_hydra)) == len(CASES)
    # The first round fills what is kept, the second uses it.
    for _ in range(2):
        kept = [OmegaConf.to_yaml(compose(case, RECIPES, "ppo_trainer"), resolve=False) for case in CASES]
        assert kept == by_hydra
