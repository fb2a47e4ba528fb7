"""The log-probabilities that the ratio refers to, by the code of each framework that is here."""

import importlib.util
import os
import subprocess
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from integrations.anchors import ANCHORS, PAGE, table
from omegaconf import OmegaConf

from bandpo.integrations import describe_anchor

pytestmark = pytest.mark.filterwarnings(
    "ignore:Ray state API:DeprecationWarning", "ignore:.*engine is not available"
)
"""Ray's and verl's own, at the import of verl's trainers."""


def root_of(row) -> Path:
    """Return the folder of a framework's code in the version of a row; skip the test if it is not here."""
    stated = row.framework.split()[-1]
    if row.clone:
        folder = Path(os.environ.get("BANDPO_CLONES", "unset")) / row.clone
        if not folder.is_dir():
            pytest.skip(f"needs a clone called {row.clone} in $BANDPO_CLONES")
        commit = subprocess.run(
            ["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout
        if not commit.startswith(stated):
            pytest.skip(f"needs {row.clone} at {stated}")
        return folder
    spec = importlib.util.find_spec(row.package)
    if spec is None or spec.origin is None:
        pytest.skip(f"needs {row.package}")
    distribution = {"swift": "ms-swift"}.get(row.package, row.package)
    if version(distribution) != stated:
        pytest.skip(f"needs {row.package} {stated}")
    return Path(spec.origin).parents[1]


@pytest.mark.parametrize("row", ANCHORS, ids=lambda row: f"{row.framework}, {row.mode}")
def test_the_line_of_the_framework_is_there(row):
    lines = (root_of(row) / row.file).read_text().splitlines()
    assert row.code in lines[row.line - 1]


def test_the_page_has_the_table():
    assert "\n".join(table()) in PAGE.read_text()


def test_the_lint_of_configurations_says_it_in_the_same_words():
    from rlvet.lint.topics import ASYNCHRONOUS_ANCHOR

    line = describe_anchor(False, "the default", asynchronous=True, fix="set it")
    said = line[line.index("Training is asynchronous") : line.index(" For ratios that")]
    assert said in ASYNCHRONOUS_ANCHOR.keywords["effect"]


class Weights:
    """The workers of verl with numbers in place of weights; each update adds 1."""

    def __init__(self):
        self.current = 0
        self.saved = {}
        self.computed = []

    def save_model_to_cpu(self, name):
        self.saved[name] = self.current

    def restore_model_from_cpu(self, name):
        self.current = self.saved[name]

    def clear_cpu_model(self, name):
        del self.saved[name]


@pytest.mark.parametrize(
    ("module", "name", "steps"),
    [
        ("verl.trainer.ppo.v1.trainer_separate_async", "PPOTrainerSeparateAsync", (0, 1, 2)),
        ("verl.experimental.fully_async_policy.fully_async_trainer", "FullyAsyncTrainer", (1, 2, 3)),
    ],
)
def test_without_the_samplers_verl_computes_them_with_the_weights_of_the_last_sync(
    module, name, steps, monkeypatch
):
    pytest.importorskip("verl")
    cls = getattr(importlib.import_module(module), name)
    weights = Weights()

    def compute(trainer, *_):
        weights.computed.append(weights.current)
        return None, None

    # An actor of Ray has its class in its metadata.
    cls = getattr(getattr(cls, "__ray_metadata__", None), "modified_class", cls)
    base = [base for base in cls.__mro__ if "_compute_old_log_prob" in vars(base)][-1]
    monkeypatch.setattr(base, "_compute_old_log_prob", compute)
    trainer = object.__new__(cls)
    trainer.config = OmegaConf.create({"algorithm": {"rollout_correction": {"bypass_mode": False}}})
    trainer.actor_rollout_wg = weights
    arguments = (None, {}) if name == "PPOTrainerSeparateAsync" else (None,)
    for step in steps:
        trainer.local_trigger_step = step
        trainer._compute_old_log_prob(*arguments)
        weights.current += 1
    # Three updates after a sync, all around the weights of the sync; the updates themselves are kept.
    assert weights.computed == [0, 0, 0]
    assert weights.current == 3


def test_with_bypass_mode_verls_old_log_probabilities_are_the_samplers(monkeypatch):
    pytest.importorskip("verl")
    from verl.trainer.ppo.v1 import trainer_base
    from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

    written = {}
    monkeypatch.setattr(trainer_base.tq, "kv_batch_get", lambda **_: {"rollout_log_probs": "the sampler's"})
    monkeypatch.setattr(trainer_base.tq, "kv_batch_put", lambda fields, **_: written.update(fields))
    for cls in (PPOTrainerColocateAsync, PPOTrainerSeparateAsync):
        trainer = object.__new__(cls)
        trainer.config = OmegaConf.create({"algorithm": {"rollout_correction": {"bypass_mode": True}}})
        written.clear()
        trainer._compute_old_log_prob(SimpleNamespace(keys=[], partition_id="train"), {})
        assert written == {"old_log_probs": "the sampler's"}


@pytest.mark.parametrize("bypass", [True, False])
def test_verls_experimental_trainers_follow_the_same_setting(bypass, monkeypatch):
    pytest.importorskip("verl")
    import torch
    from verl import DataProto
    from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer

    ones = torch.ones(2, 3)
    batch = DataProto.from_dict(
        {"rollout_log_probs": -ones, "response_mask": ones, "responses": ones.long(), "attention_mask": ones}
    )
    computed = DataProto.from_dict({"old_log_probs": -2 * ones, "entropys": ones})
    trainer = object.__new__(SeparateRayPPOTrainer)
    trainer.config = OmegaConf.create(
        {
            "algorithm": {"rollout_correction": {"bypass_mode": bypass}},
            "actor_rollout_ref": {
                "actor": {"policy_loss": {}, "loss_agg_mode": "token-mean", "loss_scale_factor": None},
                "rollout": {"calculate_log_probs": True},
            },
        }
    )
    trainer.metrics, trainer.timing_raw = {}, {}
    monkeypatch.setattr(SeparateRayPPOTrainer, "_compute_old_log_prob", lambda *_: (computed, 0.0))
    result = trainer._fit_compute_log_prob(batch)
    assert torch.equal(result.batch["old_log_probs"], -ones if bypass else -2 * ones)
