"""Configurations of OpenRLHF and prime-rl are compared with each other, and with those of TRL and verl."""

import json

import pytest

from rlvet.compare import diff
from rlvet.compare.configurations import COMPARED
from rlvet.compare.vocabulary import QUANTITIES, UPDATES
from rlvet.errors import InvalidValue

OPENRLHF = """python3 -m openrlhf.cli.train_ppo_ray \\
   --actor.model_name_or_path Qwen/Qwen2.5-7B \\
   --algo.advantage.estimator group_norm \\
   --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 1e-3 \\
   --actor.eps_clip_low_high 0.2 0.28 \\
   --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 256 \\
   --rollout.max_new_tokens 1024 --actor.adam.lr {rate}{more}
"""

VERL = """python3 -m verl.trainer.main_ppo \\
   actor_rollout_ref.model.path=Qwen/Qwen2.5-7B algorithm.adv_estimator=grpo \\
   actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=k3 \\
   actor_rollout_ref.actor.kl_loss_coef=1e-3 \\
   actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \\
   data.train_batch_size=128 actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
   data.max_response_length=1024 actor_rollout_ref.actor.optim.lr=1e-6
"""

PRIME = """max_steps = 100
[model]
name = "Qwen/Qwen3-4B"
[orchestrator]
batch_size = 512
group_size = {group}
[orchestrator.train.sampling]
temperature = 1.0
max_completion_tokens = 2048
[trainer.optim]
lr = 1e-6
"""


def compared(tmp_path, first, second, names=("a.sh", "b.sh")):
    paths = [tmp_path / name for name in names]
    for path, text in zip(paths, (first, second), strict=True):
        path.write_text(text)
    return diff(*paths)


def differences(difference):
    return {
        one["name"]: (one["a"]["value"], one["b"]["value"])
        for one in json.loads(json.dumps(difference.as_json()))["configurations"]["differences"]
    }


def test_two_scripts_of_openrlhf(tmp_path):
    first = OPENRLHF.format(rate="1e-6", more="")
    more = " --train.max_epochs 2 --algo.advantage.is_correction_enable"
    more += " --actor.policy_loss_type gspo --rollout.top_p 0.9"
    second = OPENRLHF.format(rate="5e-7", more=more)
    assert differences(compared(tmp_path, first, second)) == {
        "policy loss": ("clipped ratio of tokens", "clipped ratio of answers"),
        "average of the loss": ("mean over the tokens of an update", "mean over answers of their means"),
        "passes over a batch": ("1", "2"),
        "old policy": ("the trainer's own", "the engine's"),
        "learning rate": ("1e-06", "5e-07"),
        "top-p": ("none", "0.9"),
    }


def test_weights_of_openrlhf(tmp_path):
    first = OPENRLHF.format(rate="1e-6", more="")
    second = OPENRLHF.format(rate="1e-6", more=" --algo.advantage.is_correction_enable")
    weights = "of each token, at least 0.5, at most 5"
    assert differences(compared(tmp_path, first, second)) == {"importance weights": ("none", weights)}


def test_older_names_of_openrlhf_are_the_same_settings(tmp_path):
    older = OPENRLHF.format(rate="1e-6", more="").replace("actor.adam.lr", "actor_learning_rate")
    assert differences(compared(tmp_path, OPENRLHF.format(rate="1e-6", more=""), older)) == {}


def test_a_script_of_verl_and_one_of_openrlhf(tmp_path):
    """The quantities that both have are compared by their own names, and the defaults of each count."""
    found = differences(compared(tmp_path, VERL, OPENRLHF.format(rate="1e-6", more="")))
    same = (
        "policy loss",
        "clip below",
        "clip above",
        "baseline",
        "scale of the advantages",
        "KL coefficient",
    )
    assert not found.keys() & {
        *same,
        "KL estimator",
        "answers a batch",
        "answers an update",
        "longest answer",
        "model",
    }
    assert found["dual clip"] == ("3", "none")
    assert found["schedule"] == ("constant", "cosine to 0.1 of the rate")


def test_two_files_of_prime_rl(tmp_path):
    names = ("a.toml", "b.toml")
    second = PRIME.format(group=16) + 'type = "muon"\n[trainer.loss]\ndppo_mask_high = 0.3\n'
    found = differences(compared(tmp_path, PRIME.format(group=8), second, names))
    assert found == {
        "clip above": ("0.2", "0.3"),
        "optimizer": ("AdamW", "muon"),
        "betas of Adam": ("0.9 and 0.999", "none"),
        "answers to a prompt": ("8", "16"),
    }


def test_a_setting_that_is_not_set_is_not_known(tmp_path):
    text = OPENRLHF.format(rate="1e-6", more="").replace("--rollout.max_new_tokens 1024", "")
    difference = compared(tmp_path, text, OPENRLHF.format(rate="1e-6", more=""))
    undecided = difference.as_json()["configurations"]["undecided"]
    assert [one["name"] for one in undecided] == ["longest answer"]


@pytest.mark.parametrize("framework", COMPARED)
def test_quantities_are_those_of_the_vocabulary(framework):
    names = {quantity.name for quantity in QUANTITIES} | {UPDATES}
    assert COMPARED[framework].keys() <= names


def test_another_framework_is_named_with_those_that_are_compared(tmp_path):
    with pytest.raises(InvalidValue, match="compares TRL, verl, OpenRLHF, prime-rl"):
        compared(
            tmp_path, "python -m skyrl.train.entrypoints.main_base generator.n_samples_per_prompt=8\n", VERL
        )
