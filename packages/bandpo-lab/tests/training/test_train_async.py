"""`bandpo-lab train --async`: TRL's asynchronous trainer, rehearsed on a CPU."""

import pickle
import sys

import pytest
import torch
import yaml

from helpers.frameworks import needs

needs("trl", oldest="1.16.0")

from transformers import AutoModelForCausalLM

from bandpo_lab.errors import InvalidValue, RunProblem
from bandpo_lab.tasks import multiplication
from bandpo_lab.training.arguments import parse_arguments, reward_functions
from bandpo_lab.training.async_run import check_gpu, check_settings
from bandpo_lab.training.train import run_training
from rlvet.records.record import read_record

pytestmark = [
    pytest.mark.filterwarnings("ignore:no-signal"),
    pytest.mark.filterwarnings("ignore:reward-flat"),
]
SMALL = ["--per_device_train_batch_size=8", "--num_generations=4", "--max_steps=6", "--logging_steps=1"]
SMALL += ["--max_completion_length=8", "--train_prompts=32", "--eval_prompts=2", "--eval_samples=4"]
REHEARSAL = ["--async", "--rehearse", "--method=BandAbove()", "--watched=off"]


def rehearsal(folder, *more):
    return parse_arguments([*REHEARSAL, *SMALL, f"--output_dir={folder}", *more])


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """A finished rehearsal of six updates."""
    folder = tmp_path_factory.mktemp("async") / "run"
    return run_training(rehearsal(folder, f"--record={folder}/tokens"))


def test_a_rehearsal_trains_on_data_of_old_weights(rehearsed):
    """Batches are of the weights of two versions ago, and three at their update."""
    rows = rehearsed.history()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    # TRL counts at the request, which is before the update on the batch before it.
    assert [row["sample/staleness_max"] for row in rows] == [0, 1, 2, 2, 2, 2]
    losses = list(read_record(rehearsed.path / "tokens"))
    assert [{*loss.lag[loss.mask].tolist()} for loss in losses] == [{0}, {1}, {2}, {3}, {3}, {3}]
    # Only the first batch is of the weights that are trained.
    spread = [abs(loss.log_ratio[loss.mask]).max() for loss in losses]
    assert spread[0] < 1e-4 < min(spread[1:])


def test_a_rehearsal_leaves_what_a_training_leaves(rehearsed):
    scores = rehearsed.evaluations
    assert scores.keys() == {"before", "after"}
    before = AutoModelForCausalLM.from_pretrained(multiplication.base_model_path()).state_dict()
    after = AutoModelForCausalLM.from_pretrained(rehearsed.model).state_dict()
    assert after.keys() == before.keys()
    assert not any(torch.equal(after[name], before[name]) for name in before)
    assert "<title>rlvet report" in rehearsed.report.read_text()
    config = yaml.safe_load((rehearsed.path / "config.yaml").read_text())["arguments"]
    assert (config["async"], config["rehearse"], config["lag"]) == (True, True, 2)


@pytest.mark.slow
def test_the_config_of_a_rehearsal_makes_it_again(rehearsed, tmp_path):
    config = str(rehearsed.path / "config.yaml")
    again = run_training(parse_arguments(["--config", config, f"--output_dir={tmp_path / 'again'}"]))
    assert again.evaluations == rehearsed.evaluations
    weights = AutoModelForCausalLM.from_pretrained(rehearsed.model).state_dict()
    for name, weight in AutoModelForCausalLM.from_pretrained(again.model).state_dict().items():
        assert torch.equal(weight, weights[name]), name
    # A second call with --resume finds it finished.
    stamp = again.metrics.stat().st_mtime_ns
    run_training(parse_arguments(["--config", config, f"--output_dir={tmp_path / 'again'}", "--resume"]))
    assert again.metrics.stat().st_mtime_ns == stamp


@pytest.mark.slow
def test_the_evaluation_is_that_of_the_other_trainer(rehearsed, tmp_path):
    """Under the attention with which TRL's asynchronous trainer trains, the model could not generate."""
    options = ["--steps_per_generation=2", "--num_iterations=1", "--save_strategy=no", "--watched=off"]
    folder = run_training(parse_arguments([*SMALL, *options, f"--output_dir={tmp_path / 'run'}"]))
    assert folder.evaluations["before"] == rehearsed.evaluations["before"]


@pytest.mark.slow
def test_conversations_and_several_rewards(tmp_path, monkeypatch):
    """What TRL's own worker accepts: prompts that are conversations, and rewards that are added."""
    (tmp_path / "chat.py").write_text(
        "from bandpo_lab.tasks import multiplication\n"
        "def load(row):\n"
        "    return {'prompt': [{'role': 'user', 'content': row['prompt']}]}\n"
        "def right(completions, answer, **_):\n"
        "    texts = [completion[0]['content'] for completion in completions]\n"
        "    return multiplication.reward(texts, answer)\n"
        "def short(completions, **_):\n"
        "    return [len(completion[0]['content']) / 8 for completion in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    import chat

    multiplication.dataset("train", 32).map(chat.load).to_parquet(tmp_path / "data" / "train.parquet")
    options = [
        f"--dataset_name={tmp_path / 'data'}",
        "--reward_funcs",
        "chat.right",
        "chat.short",
        "--eval_prompts=0",
    ]
    options += [
        "--model_name_or_path=multiplication",
        "--learning_rate=1e-3",
        "--temperature=1",
        "--report_to=none",
    ]
    folder = run_training(rehearsal(tmp_path / "run", *options))
    rewards = [row["reward"] for row in folder.history()]
    assert len(rewards) == 6
    assert all(0 < reward <= 2 for reward in rewards)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num_iterations=2"], "num_iterations: TRL's asynchronous trainer has no such setting"),
        (
            ["--lag=5"],
            "max_staleness=4: TRL drops samples that are more versions old, as all are .* with lag=5",
        ),
        (["--lag=-1"], "lag must be at least 0"),
        (["--max_steps=0"], "max_steps must be at least 1"),
        (["--weight_sync_steps=0"], "weight_sync_steps must be at least 1"),
        (["--top_p=0.9"], "sample with top_p=1.0"),
        (["--max_stalenes=4"], "unknown option --max_stalenes; did you mean max_staleness?"),
    ],
)
def test_settings_that_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        rehearsal(tmp_path / "run", *options)


def test_settings_of_the_asynchronous_trainer_need_the_option():
    with pytest.raises(
        InvalidValue, match="max_staleness is a setting of TRL's asynchronous trainer: add --async"
    ):
        parse_arguments(["--max_staleness=4"])
    with pytest.raises(InvalidValue, match="lag=4: with vLLM, the age of the data is what it is"):
        parse_arguments(["--async", "--lag=4"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--reward_model_name_or_path=x", "reward functions only"),
        ("--load_in_4bit", "no quantized weights"),
        ("--attn_implementation=sdpa", "its own attention"),
        ("--eval_strategy=steps", "eval_every is that of bandpo-lab"),
    ],
)
def test_settings_of_the_script_that_the_trainer_has_not(option, message, tmp_path):
    with pytest.raises(InvalidValue, match=message):
        check_settings(rehearsal(tmp_path / "run", option), multiplication.dataset("train", 1))


def test_without_a_rehearsal_a_gpu_and_conversations_are_needed(tmp_path):
    arguments = parse_arguments(["--async", *SMALL, f"--output_dir={tmp_path / 'run'}"])
    with pytest.raises(RunProblem, match="add --rehearse to train on this CPU"):
        check_gpu(arguments.training)
    with pytest.raises(
        InvalidValue, match=r"the prompts are texts, such as '.*', and TRL's .* conversations only"
    ):
        check_settings(arguments, multiplication.dataset("train", 1))
    check_gpu(rehearsal(tmp_path / "run").training)


def test_reward_functions_can_be_sent_to_another_process():
    """TRL's worker calls them in a process of its own."""
    (reward,) = reward_functions(parse_arguments([*REHEARSAL, *SMALL]).run)
    copy = pickle.loads(pickle.dumps(reward))  # noqa: S301
    assert copy(completions=["|6"], answer=["6"]) == [1.0]
    assert reward.__name__ == "reward"
