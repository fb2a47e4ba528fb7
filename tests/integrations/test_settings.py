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
    names = [
        name
        for what in ("updates", "learning rate", "clip", "entropy bonus")
        for name in SETTINGS["verl"][what].split(", ")
    ]
    sampling, *others = SETTINGS["verl"]["sampling"].split(", ")
    names += [sampling, *(sampling.rpartition(".")[0] + other for other in others)]
    names += ["data.train_batch_size"]
    for name in names:
        assert OmegaConf.select(config, name, throw_on_missing=False, default="none such") != "none such", (
            name
        )
