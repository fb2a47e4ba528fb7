"""The configuration that a run saved: what is in it, and what its version does not have."""

import json

import pytest

from rlvet import open_run
from rlvet.lint.checks import without_defaults
from rlvet.runs.configs import configuration_of, newest_configuration
from rlvet.runs.configuration import Setting, Unresolved
from rlvet.runs.limits import MOST_NODES


def test_an_object_of_the_program_is_saved_and_not_read():
    saved = configuration_of("trl", {"epsilon": {}, "generation_kwargs": {}})
    configuration = without_defaults(saved)
    assert isinstance(configuration.settings["epsilon"].value, Unresolved)
    assert "generation_kwargs" not in configuration.settings
    assert not {"epsilon", "generation_kwargs"} & set(configuration.absent)


def test_a_saved_configuration_has_every_setting_with_its_line(tmp_path):
    (tmp_path / "config.yaml").write_text("epsilon: 0.2\nbeta: 1e-3\nimportance_sampling_level: ${level}\n")
    configuration = newest_configuration(tmp_path).configuration
    assert configuration.settings == {
        "epsilon": Setting("epsilon", 0.2, 1),
        "beta": Setting("beta", 0.001, 2),
        "importance_sampling_level": Setting(
            "importance_sampling_level", Unresolved("the interpolation ${level}"), 3
        ),
    }
    # That of the default is left out, and settings that the file lacks are of a later version.
    checked = without_defaults(configuration)
    assert list(checked.settings) == ["beta", "importance_sampling_level"]
    assert "loss_type" in checked.absent


def test_the_file_of_prime_rls_trainer_has_names_without_a_prefix(tmp_path):
    (tmp_path / "trainer.toml").write_text('[loss]\ntype = "ipo"\nkl_tau = 0.1\nipo_threshold = 0.2\n')
    configuration = newest_configuration(tmp_path).configuration
    assert configuration.settings["trainer.loss.kl_tau"] == Setting("trainer.loss.kl_tau", 0.1, 3)
    assert configuration.incomplete == "the file of the orchestrator"


@pytest.mark.parametrize("written", [{}, {"use_peft": False}, {"use_peft": "no"}])
def test_an_adapter_beside_the_arguments_of_trl_is_a_setting(written, tmp_path):
    settings = {"epsilon": 0.2, "importance_sampling_level": "token", "model_name_or_path": None, **written}
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "base_model_name_or_path": "Qwen/Qwen3-8B"}')
    configuration = newest_configuration(tmp_path).configuration
    assert configuration.settings["use_peft"].value is True
    assert configuration.settings["model_name_or_path"].value == "Qwen/Qwen3-8B"


def test_more_settings_than_a_configuration_has_are_not_read(tmp_path):
    settings = {f"setting{number}": number for number in range(MOST_NODES)}
    (tmp_path / "trainer.json").write_text(json.dumps({"loss": {"type": "ipo", "kl_tau": 0.1}, **settings}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.5}\n')
    run = open_run(tmp_path)
    assert run.rows[0]["reward"] == 0.5
    assert run.configuration is None
    assert run.unread == (
        "trainer.json was not read: it has more than 65,536 settings, and is no configuration",
    )
