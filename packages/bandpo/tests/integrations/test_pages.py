"""What README and the pages print for TRL and verl."""

import re
import shlex
from itertools import product

import pytest

from helpers.frameworks import needs
from pages import ROOT, blocks, check_python, python_blocks
from rlvet.checks.diagnosis import diagnose


@pytest.mark.parametrize(("page", "block"), python_blocks(of_frameworks=True))
def test_python(page, block, tmp_path, monkeypatch, capsys):
    needs("trl")
    executed = check_python(page, block, tmp_path, monkeypatch, capsys)
    if "BandGRPOConfig" in block:
        # A reader sees what a clip rule does: the ratios move, and the clip acts on some tokens.
        assert not [text for text in executed.warnings if "no clip rule can act" in text]
        log = executed.names["trainer"].state.log_history
        clipped = [row[name] for row in log for name in ("audit/clip_high", "audit/clip_low") if name in row]
        assert max(clipped) > 0
    if page.name == "README.md" and "trainer.train()" in block:  # it makes a log, which gets a verdict
        diagnosis = diagnose(tmp_path / "runs/example")
        assert "no verdict" not in str(diagnosis)
        assert diagnosis.healthy


def test_the_start_page_has_readmes_code_for_trl():
    [readme, start] = [
        [block.text for block in blocks(ROOT / page, "python") if "BandGRPOConfig" in block.text]
        for page in ("README.md", "docs/index.md")
    ]
    assert len(readme) == 1
    assert start == readme


def test_the_verl_overrides_compose():
    """The two overrides as README prints them, through hydra and into verl's own config object."""
    hydra = pytest.importorskip("hydra")
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    [block] = [b for b in blocks(ROOT / "README.md", "text") if "actor_rollout_ref" in b.text]
    overrides = shlex.split(block.text)
    assert len(overrides) == 2
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides)
    loss = omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)
    assert type(loss).__name__ == "BandPolicyLossConfig"
    assert (loss.loss_mode, loss.method) == ("band", "BandPO()")
    assert OmegaConf.is_config(config)


@pytest.mark.slow
def test_the_verl_page_composes():
    """Its one override, with each of those that may come second, through hydra and into verl's own config object."""
    hydra = pytest.importorskip("hydra")
    from verl.utils.config import omega_conf_to_dataclass

    page = (ROOT / "docs/verl.md").read_text()
    lines = re.findall(r'^    "?(\+?actor_rollout_ref\.actor\.policy_loss\.[^"#\n]*)"?', page, re.M)
    targets, named = [x for x in lines if x[0] != "+"], [x.strip() for x in lines if x[0] == "+"]
    assert (len(targets), len(named)) == (2, 7)
    for target, second in product(targets, named):
        name, _, text = second.rpartition("policy_loss.")[2].partition("=")
        if "Audited" in target and name == "method":
            continue
        with hydra.initialize_config_module("verl.trainer.config", version_base=None):
            config = hydra.compose("ppo_trainer", [target.strip(), second])
        loss = omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)
        assert type(loss).__name__ == target.strip().rpartition(".")[2]
        assert str(getattr(loss, name)).lower() == text.strip("'").lower()
