"""Settings of any type and value in a configuration end in no traceback."""

import copy
import json
import math

import pytest

from rlvet import diagnose
from rlvet.lint.checks import lint_run
from selection import mostly_slow

ROWS = "".join(
    json.dumps({"step": step, "reward": 0.1 * step, "entropy": 1.0, "kl": 0.1}) + "\n"
    for step in range(1, 30)
)
ACTOR = {
    "clip_ratio": 0.2,
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.28,
    "clip_ratio_c": 3.0,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "ppo_mini_batch_size": 8,
    "ppo_epochs": 1,
    "policy_loss": {"loss_mode": "geo_mean"},
}
FILES = {
    "config.yaml": [
        {"loss_type": "dapo", "importance_sampling_level": "token", "epsilon": 0.2, "epsilon_high": 0.28, "delta": 2.0,
         "num_iterations": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 4, "learning_rate": 1e-6},
        {"actor_rollout_ref": {"actor": ACTOR, "rollout": {"n": 8}}, "data": {"train_batch_size": 16}},
        {"trainer": {"algorithm": {"policy_loss_type": "regular", "eps_clip_low": 0.2, "eps_clip_high": 0.2,
                                   "sapo": {"tau_pos": 1.0}, "cispo": {}, "dppo": {}, "kl_cov": {}}}},
        {"loss_fn": {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28, "ratio_clip_c": None}},
    ],
    "trainer.json": [{"loss": {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "kl_tau": 1e-3}}],
}  # fmt: skip
"""Configurations of each framework, by the names of their files."""

VALUES = (
    "vanilla",
    ["vanilla"],
    [],
    {},
    {"a": 1},
    None,
    True,
    10**400,
    -(10**400),
    1e308,
    math.nan,
    math.inf,
    -1,
    0,
)


def changed(config, value):
    """Yield copies of a configuration of which one setting or group of settings has another value."""
    for key in config:
        yield {**config, key: value}
        if isinstance(config[key], dict):
            for inner in changed(config[key], value):
                yield {**config, key: inner}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("value", mostly_slow(VALUES, 2), ids=repr)
@pytest.mark.parametrize("name", FILES)
def test_a_setting_of_another_type_is_no_error(name, value, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(ROWS)
    for config in FILES[name]:
        for variant in changed(copy.deepcopy(config), value):
            (tmp_path / name).write_text(json.dumps(variant))
            diagnosis = diagnose(tmp_path)
            str(diagnosis)
            diagnosis.as_json()
            lint_run(tmp_path)
