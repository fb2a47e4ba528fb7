"""The settings that verdicts name, looked up in the frameworks that are installed."""

import pytest
import torch

from bandpo import FixedClip, Method
from bandpo.core.objectives import DualClip
from bandpo.replay.record import method_of
from helpers.frameworks import needs
from rlvet.runs.configs import read_configuration
from rlvet.runs.setup import SETTINGS, Setup


def test_trl_s_settings_are_called_so():
    needs("trl")
    import trl

    for what in ("updates", "learning rate", "clip", "entropy bonus", "sampling"):
        for name in SETTINGS["trl"][what].split(", "):
            assert hasattr(trl.GRPOConfig, name), name


def test_trl_s_own_arguments_are_read(tmp_path):
    needs("trl")
    import trl

    torch.save(trl.GRPOConfig("out", use_cpu=True, bf16=False), tmp_path / "training_args.bin")
    setup = read_configuration(tmp_path)
    assert setup == Setup("trl", setup.method, "token", 1, stale=False)
    assert method_of(setup) == Method(FixedClip(0.2))


def test_verl_s_settings_are_called_so(tmp_path):
    hydra = pytest.importorskip("hydra")
    from omegaconf import OmegaConf

    needs("verl")
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer")
    said = [SETTINGS["verl"][what] for what in ("updates", "learning rate", "clip", "entropy bonus")]
    sampling, *others = SETTINGS["verl"]["sampling"].split(", ")
    names = [*", ".join(said).split(", "), "data.train_batch_size", sampling]
    names += [sampling.rpartition(".")[0] + other for other in others]
    absent = [name for name in names if OmegaConf.select(config, name, default="none such") == "none such"]
    assert absent == []
    (tmp_path / ".hydra").mkdir()
    OmegaConf.save(config, tmp_path / ".hydra/config.yaml")
    setup = read_configuration(tmp_path)
    assert setup == Setup("verl", setup.method, None, 4)
    assert method_of(setup) == Method(FixedClip(0.2), DualClip(3.0))
