"""The defaults of all settings of TRL and verl, which `rlvet diff` fills in.

`python packages/bandpo/tests/integrations/framework_defaults.py` writes packages/rlvet/src/rlvet/data/defaults.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[4] / "packages/rlvet/src/rlvet/data/defaults.json"

LEFT_OUT = (
    "profiler",
    "turbo_config",
    "qat",
    "critic.",
    "transfer_queue",
    "teacher_models",
    "reward_model.rollout",
)
"""Parts of the names of verl's settings that are left out: those of the profiler and of other models."""


def trl_defaults() -> dict[str, Any]:
    """Return the defaults of `GRPOConfig`."""
    from trl import GRPOConfig

    defaults = {}
    for setting in fields(GRPOConfig):
        value = setting.default_factory() if setting.default_factory is not MISSING else setting.default
        defaults[setting.name] = getattr(value, "value", value)
    return {name: value for name, value in defaults.items() if _is_json(value)}


def verl_defaults() -> dict[str, Any]:
    """Return the defaults of verl's ppo_trainer.yaml, by dotted names."""
    import verl
    import yaml

    file = Path(verl.__path__[0]) / "trainer/config/_generated_ppo_trainer.yaml"
    defaults: dict[str, Any] = {}
    pending: list[tuple[str, Any]] = [("", yaml.safe_load(file.read_text()))]
    while pending:
        prefix, value = pending.pop()
        if isinstance(value, Mapping) and value:
            pending += [(f"{prefix}.{key}" if prefix else key, item) for key, item in value.items()]
        elif not prefix.endswith("_target_") and not any(part in prefix for part in LEFT_OUT):
            # PyYAML reads 1.0e-06 as a number, and 1e-6 as a text.
            defaults[prefix] = value
    return defaults


def _is_json(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | list | dict | None)


def table() -> dict[str, Any]:
    """Return the table of defaults, with the versions that they are of."""
    import trl
    import verl

    return {
        "trl": {"version": trl.__version__, "defaults": dict(sorted(trl_defaults().items()))},
        "verl": {"version": verl.__version__, "defaults": dict(sorted(verl_defaults().items()))},
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(table(), indent=1) + "\n")
