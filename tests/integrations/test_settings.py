"""The settings that verdicts name, looked up in the frameworks that are installed."""

import pytest

from bandpo.audit.settings import SETTINGS


def test_trl_s_settings_are_called_so():
    trl = pytest.importorskip("trl")
    for what in ("updates", "learning rate", "clip", "entropy bonus", "sampling"):
        for name in SETTINGS["trl"][what].split(", "):
            assert hasattr(trl.GRPOConfig, name), name


def test_verl_s_settings_are_called_so():
    hydra = pytest.importorskip("hydra")
    from omegaconf import OmegaConf

    pytest.importorskip("verl")
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer")
    said = [SETTINGS["verl"][what] for what in ("updates", "learning rate", "clip", "entropy bonus")]
    sampling, *others = SETTINGS["verl"]["sampling"].split(", ")
    names = [*", ".join(said).split(", "), "data.train_batch_size", sampling]
    names += [sampling.rpartition(".")[0] + other for other in others]
    absent = [name for name in names if OmegaConf.select(config, name, default="none such") == "none such"]
    assert absent == []
