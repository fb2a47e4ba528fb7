"""`bandpo_lab.toy.fast_loop`: against transformers' model, one pass, figures by hand, runs without an interruption."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from bandpo.core.schedules import TrainingState
from bandpo.core.text import as_method
from bandpo_lab.errors import RunProblem
from bandpo_lab.tasks import multiplication
from bandpo_lab.toy.fast_loop import (
    ALPHABET,
    EOS_ID,
    PAD_ID,
    TASKS,
    Network,
    Settings,
    Training,
    log_probabilities,
    read_run,
    sample,
    train,
    update,
)
from rlvet import diagnose

SMALL = {"batches": 4, "lag": 1, "prompts": 2, "samples": 4, "minibatches": 2, "held_out": 2}
METHOD = "FixedClip(0.2)"


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def network():
    return Network(multiplication.base_model_path())


@pytest.fixture(scope="module")
def batch(network):
    """Answers of two problems, of which a few have a scratchpad."""
    problems = multiplication.problems("train", 8)
    return sample(network, problems, 16, TASKS["multiplication"], generator(), generator())


def test_alphabet_and_network_are_those_of_transformers(network, batch):
    tokenizer = multiplication.tokenizer()
    assert [tokenizer.convert_tokens_to_ids(token) for token in ALPHABET[:-1]] == [*range(len(ALPHABET) - 1)]
    model = AutoModelForCausalLM.from_pretrained(multiplication.base_model_path())
    ids = torch.cat([batch.prompts, batch.tokens], 1)[:6]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        torch.testing.assert_close(network.logits(ids), expected, rtol=1e-4, atol=1e-4)
        cache = network.new_cache(*ids.shape)
        parts = [network.logits(ids[:, :5], cache)]
        parts += [network.logits(ids[:, [k]], cache, k) for k in range(5, ids.shape[1])]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)


def test_an_answer_ends_with_its_end_token_and_short_ones_are_computed_apart_with_the_same_result(
    network, batch
):
    lengths = batch.mask.sum(1).long()
    assert lengths.min() < 7 < lengths.max()
    for tokens, length in zip(batch.tokens, lengths, strict=True):
        ended = tokens[:length].tolist().count(EOS_ID)
        assert (ended, tokens[length - 1] == EOS_ID) == (1, True) or (ended, length) == (0, 40)
        assert (tokens[length:] == PAD_ID).all()
    logp, entropy = log_probabilities(network, batch)
    # What sampling recorded with a cache, and what one pass over all gives.
    torch.testing.assert_close(logp.detach(), batch.logp[:, : logp.shape[1]], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy, batch.entropy[:, : logp.shape[1]], rtol=1e-4, atol=1e-4)
    tokens = batch.tokens[:, : logp.shape[1]]
    logits = network.logits(torch.cat([batch.prompts, tokens], 1))[:, batch.prompts.shape[1] - 1 : -1]
    whole = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0] * batch.mask[:, : logp.shape[1]]
    torch.testing.assert_close(logp, whole, rtol=1e-4, atol=1e-4)


def test_tokens_are_sampled_with_the_probabilities_of_the_policy(network):
    [problem] = multiplication.problems("train", 1)
    drawn = sample(network, [problem], 4000, TASKS["random"], generator(), generator())
    prompt = torch.tensor([[ALPHABET.index(character) for character in problem.prompt]])
    chances = network.logits(prompt)[0, -1].softmax(-1).detach()
    counts = torch.bincount(drawn.tokens[:, 0], minlength=len(ALPHABET)) / 4000
    assert (counts - chances).abs().max() < 4 * math.sqrt(0.25 / 4000)
    assert abs(float(drawn.rewards.mean()) - 0.5) < 4 * math.sqrt(0.25 / 4000)


def test_rewards_and_advantages_by_hand(network, batch):
    problem = multiplication.Product(537, 6)
    answers = ["|3222", problem.scratchpad, "|3221", "3222"]
    assert TASKS["multiplication"](answers, [problem] * 4, generator()) == [1, 1, 0, 0]
    assert TASKS["mental"](answers, [problem] * 4, generator()) == [1, 0, 0, 0]
    first = TASKS["random"](["|3222"] * 64, [problem] * 64, generator())
    assert set(first) == {0, 1}
    assert first == TASKS["random"](["no"] * 64, [problem] * 64, generator())
    # A group of 16 with k right ones has the mean k/16 and the deviation √(k(16 − k)/(16·15)).
    for group in range(8):
        rewards = batch.rewards[batch.group == group]
        k = int(rewards.sum())
        deviation = math.sqrt(k * (16 - k) / 240)
        expected = (rewards - k / 16) / (deviation + 1e-4)
        torch.testing.assert_close(batch.advantages[batch.group == group], expected)


@pytest.mark.parametrize("method", ["FixedClip(0.2)", "Unclipped()", "GSPO()", "M2PO()"])
def test_methods_have_the_same_problems_random_numbers_and_first_samples(method):
    trainings = [Training(Settings(text, **SMALL | {"epochs": 2}), None) for text in (METHOD, method)]
    logs = [training.run(None).log for training in trainings]
    assert logs[0][0] == logs[1][0]
    assert torch.equal(trainings[0].numbers.get_state(), trainings[1].numbers.get_state())
    other = train(Settings(METHOD, **SMALL | {"seed": 1}), None)
    assert other.log[0] != logs[0][0]


def test_a_batch_is_trained_on_after_its_lag_in_every_epoch_and_minibatch():
    training = Training(Settings(METHOD, **SMALL | {"lag": 2, "epochs": 3}), None)
    before = {name: weight.detach().clone() for name, weight in training.network.weights.items()}
    lines = [training.train_batch(), training.train_batch()]
    assert training.updates == 0
    assert not any("grad_norm" in line for line in lines)
    assert all(torch.equal(weight, before[name]) for name, weight in training.network.weights.items())
    assert "grad_norm" in training.train_batch()
    assert training.updates == 6
    # The fourth batch is the first whose policy had been trained.
    training.train_batch()
    assert [int(batch.version[0]) for batch in training.waiting] == [0, 6]


def test_a_clip_blocks_what_no_clip_lets_through(network, batch):
    steps = {}
    for text in ("FixedClip(0.0, 0.0)", "Unclipped()"):
        policy = Network(multiplication.base_model_path())
        optimizer = torch.optim.SGD(policy.weights.values(), 1.0)
        # The policy that sampled gave every token less than half of the probability.
        old = batch._replace(logp=batch.logp - 1.0)
        result = update(policy, optimizer, old, as_method(text), TrainingState())
        steps[text] = result.audit.metrics()
    assert steps["FixedClip(0.0, 0.0)"]["clip_high"] > 0.05
    assert steps["Unclipped()"]["clip_high"] == 0


RESUMED = [
    {"task": "multiplication"},
    {"task": "random", "epochs": 2, "lag": 0, "eval_every": 2},
    {"method": "Band(KL(), ClipRateController(0.01, 0.05))", "lag": 2},
]


@pytest.mark.parametrize("changes", RESUMED)
def test_an_interrupted_run_goes_on_bit_for_bit_and_an_ended_one_is_read(tmp_path, changes):
    settings = Settings(**{"method": METHOD, **SMALL, "batches": 5, **changes})
    whole = Training(settings, None)
    expected = whole.run(None)

    class Interrupted(Exception):
        pass

    said = []

    def interrupt(line):
        said.append(line)
        if len(said) == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        train(settings, tmp_path, interrupt)
    assert not (tmp_path / "scores.json").exists()
    resumed = Training(settings, tmp_path)
    run = resumed.run(said.append)
    assert sum(line.startswith("batch") for line in said) == 5
    assert run.log == expected.log
    for name, weight in whole.network.weights.items():
        assert torch.equal(weight, resumed.network.weights[name])
    assert {k: v for k, v in run.scores.items() if k != "seconds"} == {
        k: v for k, v in expected.scores.items() if k != "seconds"
    }
    again = train(settings, tmp_path, lambda line: pytest.fail("an ended run was trained again"))
    assert (again.log, again.scores) == (run.log, run.scores)
    assert read_run(tmp_path) == again
    with pytest.raises(RunProblem, match=r"other settings: rate 0.0002, now 0.001; choose another folder"):
        train(Settings(**{**vars(settings), "rate": 1e-3}), tmp_path)


def test_rlvet_reads_the_log(tmp_path):
    train(Settings("FixedClip(0.01, 0.01)", batches=14, lag=1, prompts=4, held_out=2), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, 15)]
    assert max(line.get("audit/blocked_mass_below_0.1", 0) for line in lines) > 0.5
    assert "rare-tokens-blocked" in [finding.code for finding in diagnose(tmp_path).tested]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "chess"}, "task='chess': choose one of multiplication, mental, random"),
        ({"epochs": 0}, "epochs=0: choose at least 1"),
        ({"seed": -1}, "seed=-1: choose at least 0"),
        ({"lag": 4}, "lag=4 with batches=4: no batch would be trained on"),
        ({"samples": 1}, "samples=1: a group needs at least 2 answers"),
        ({"minibatches": 9}, "minibatches=9: choose at most 8"),
        ({"rate": 0.0}, "rate=0: choose a learning rate between 0 and 1"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Settings(METHOD, **SMALL | changes)


@pytest.mark.slow
def test_the_last_lines_say_what_the_rule_did_over_all_batches(tmp_path):
    """The share that the run's rule dropped is that of the log."""
    said = []
    settings = Settings(METHOD, **SMALL | {"lag": 2, "batches": 10, "samples": 16, "prompts": 24})
    run = train(settings, tmp_path / "one", said.append)
    audited = [line for line in run.log if line.get("audit/mass_positive_below_0.1")]
    count = sum(line["audit/tokens_positive_below_0.1"] for line in audited)
    mass = sum(line["audit/mass_positive_below_0.1"] for line in audited)
    dropped = sum(
        line["audit/blocked_mass_below_0.1"] * line["audit/mass_positive_below_0.1"] for line in audited
    )
    *progress, shares, details, more = said
    assert all(line.startswith("batch ") for line in progress)
    assert shares.startswith(f"of the gradient on your {count:.0f} rare winners (p < 0.1) Clip-Higher would")
    assert shares.endswith(f"clip 0.2 dropped {100 * dropped / mass:.0f} %")
    assert details.endswith("each batch served 2 updates, 2 batches after it was sampled")
    assert more == f"more: bandpo audit {tmp_path / 'one'}"
