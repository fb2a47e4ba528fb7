"""A training with TRL where rlvet is not installed."""

from importlib.util import find_spec

import pytest

from helpers.frameworks import needs
from helpers.without_rlvet import INSTALL, run_without_rlvet

needs("trl")

TRAIN = """
from bandpo.integrations.trl import BandGRPOConfig, BandGRPOTrainer
from datasets import load_from_disk
settings = {"max_steps": 1, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4}
settings |= {"steps_per_generation": 2, "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
for watched in ("off", "warn", "stop"):
    print(f"with {watched}", file=sys.stderr)
    trainer = BandGRPOTrainer(
        model=sys.argv[2],
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=BandGRPOConfig(sys.argv[1], watched=watched, **settings),
        train_dataset=load_from_disk(sys.argv[3]),
    )
    trainer.train()
"""
"""A step of training on a CPU with each value of ``watched``; the last raises an error."""


@pytest.mark.skipif(find_spec("bandpo_lab") is None, reason="its model is bandpo-lab's")
def test_a_training_with_trl_names_what_is_missing_in_one_line(tmp_path):
    from bandpo_lab.tasks import multiplication

    # The lab needs rlvet itself, so the process that trains takes its model and data as files.
    multiplication.dataset("train", 8).save_to_disk(tmp_path / "data")
    arguments = (tmp_path / "run", multiplication.base_model_path(), tmp_path / "data")
    _, errors = run_without_rlvet(TRAIN, *arguments, status=1)
    off, _, rest = errors.partition("with warn\n")
    warn, _, stop = rest.partition("with stop\n")
    missing = f"bandpo: the run is not checked while it trains, as rlvet is missing: {INSTALL}"
    assert [[line for line in part.splitlines() if "rlvet" in line] for part in (off, warn)] == [
        [],
        [missing],
    ]
    assert (
        stop.splitlines()[-1] == f"bandpo.core.errors.MissingPackage: watched='stop' needs rlvet: {INSTALL}"
    )
