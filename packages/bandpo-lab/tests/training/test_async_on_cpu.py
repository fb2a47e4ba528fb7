"""The stand-ins with which TRL's asynchronous trainer trains on a CPU."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from helpers.frameworks import needs

needs("trl", oldest="1.16.0")

from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_rollout_worker

from bandpo_lab.errors import RunProblem
from bandpo_lab.tasks import multiplication
from bandpo_lab.training.async_on_cpu import DenseAttention, OldSampler, trl_on_a_cpu

PATH = str(multiplication.base_model_path())
ROWS = [{"prompt": "123*4=", "answer": "492"}, {"prompt": "12*4=", "answer": "48"}]


def attention_of_one(query, key, value, scale):
    """Compute the causal attention of one sequence, (time, heads, size), by its definition."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    after = torch.ones(len(query), len(key)).tril(len(key) - len(query)) == 0
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(after, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_the_attention_of_each_sequence_is_its_own(key_heads):
    generator = torch.Generator().manual_seed(0)
    queries, keys = (3, 1, 5), (3, 4, 7)
    query = torch.randn(sum(queries), 4, 8, generator=generator)
    key, value = torch.randn(2, sum(keys), key_heads, 8, generator=generator)
    ends = [torch.tensor([0, *sizes]).cumsum(0) for sizes in (queries, keys)]
    out = DenseAttention.flash_attn_varlen_func(
        query, key, value, *ends, max(queries), max(keys), softmax_scale=0.3, causal=True
    )
    parts = zip(query.split(queries), key.split(keys), value.split(keys), strict=True)
    expected = torch.cat([attention_of_one(*part, 0.3) for part in parts])
    torch.testing.assert_close(out, expected)


def test_a_window_is_refused():
    x = torch.zeros(2, 1, 4)
    ends = torch.tensor([0, 2])
    with pytest.raises(RunProblem, match="has no window"):
        DenseAttention.flash_attn_varlen_func(x, x, x, ends, ends, 2, 2, causal=True, window_size=(3, 0))


def load():
    return AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32).eval()


def make_sampler(rows=ROWS, **settings):
    settings = {
        "reward_funcs": multiplication.reward,
        "lag": 1,
        "num_generations": 4,
        "prompts": 2,
        "max_new_tokens": 8,
        "temperature": 0.8,
    } | settings
    return OldSampler(load(), AutoTokenizer.from_pretrained(PATH), rows, **settings)


def publish(sampler, versions):
    """Publish versions 1, 2, … of the weights, whose norm's weights are multiplied by the number."""
    models = {}
    for version in versions:
        model = load()
        with torch.no_grad():
            model.model.norm.weight.mul_(version)
        sampler.send_weights(iter(model.named_parameters()))
        sampler.update_model_version(version)
        models[version] = model
    return models


@torch.no_grad()
@pytest.mark.parametrize(("lag", "expected"), [(0, 3), (1, 2), (2, 1), (5, 1)])
def test_samples_are_of_the_weights_of_some_versions_ago(lag, expected):
    sampler = make_sampler(lag=lag)
    models = publish(sampler, (1, 2, 3))
    samples = [sampler.get() for _ in range(8)]
    assert {sample.model_version for sample in samples} == {expected}
    assert [sample.group_id for sample in samples] == [0] * 4 + [1] * 4
    for sample in samples:
        ids = torch.tensor(sample.input_ids)
        logp = (models[expected](ids[None]).logits[0, :-1] / 0.8).log_softmax(-1)
        of_tokens = logp.gather(1, ids[1:, None])[:, 0]
        is_sampled = torch.tensor(sample.completion_mask[1:]) == 1
        sampled = torch.tensor(sample.old_log_probs[1:])
        torch.testing.assert_close(of_tokens[is_sampled], sampled[is_sampled], rtol=1e-4, atol=1e-5)
        assert not sample.old_log_probs[sample.completion_mask == 0].any()
    assert sampler.qsize() == 0


def scores_of_trl(reward_funcs, rows, completions):
    """Return the advantages and rewards that TRL's own worker computes for the completions of prompts."""
    PartialState()  # its logger needs one
    names = [function.__name__ for function in reward_funcs]
    loop = SimpleNamespace(
        reward_funcs=reward_funcs,
        reward_func_names=names,
        _env_reward_types=[],
        _provides_rollout_reward=False,
    )
    sequence = SimpleNamespace(input_ids=[0], completion_mask=[1], old_log_probs=[0.0])
    scores = []
    for row, texts in zip(rows, completions, strict=True):
        group = SimpleNamespace(
            prompts=[row["prompt"]] * len(texts),
            completions=texts,
            completions_ids=[[0]] * len(texts),
            completions_sequences=[[sequence]] * len(texts),
            reward_kwargs={"answer": [row["answer"]] * len(texts)},
            tool_call_counts=[0],
            tool_failure_counts=[0],
            model_version=1,
            group_id=0,
        )
        samples = asyncio.run(async_rollout_worker._AsyncRolloutLoop._score_group(loop, group))
        scores += [(sample.advantage, sample.metrics["reward"]) for sample in samples]
    return scores


def length_or_none(completions, **_):
    """Score each other completion by its length."""
    return [len(text) / 40 if number % 2 else None for number, text in enumerate(completions)]


def right_or_none(completions, answer, **_):
    """Score three of four completions."""
    scores = multiplication.reward(completions, answer)
    return [score if number % 4 else None for number, score in enumerate(scores)]


@pytest.mark.parametrize("reward_funcs", [[multiplication.reward], [length_or_none, right_or_none]])
def test_rewards_and_advantages_are_those_of_trls_worker(reward_funcs):
    """Rewards are added; a completion that no function scores has no reward, and an advantage of 0."""
    sampler = make_sampler(num_generations=8, max_new_tokens=40, reward_funcs=reward_funcs)
    publish(sampler, (1,))
    samples = [sampler.get() for _ in range(16)]
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    texts = [
        tokenizer.decode(sample.input_ids[sample.completion_mask == 1], skip_special_tokens=True)
        for sample in samples
    ]
    expected = scores_of_trl(reward_funcs, ROWS, (texts[:8], texts[8:]))
    actual = [(sample.advantage, sample.metrics["reward"]) for sample in samples]
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=0, atol=0, equal_nan=True)
    rewards = torch.tensor(expected)[:, 1]
    assert sampler.rewards == [pytest.approx(rewards.nanmean().item())]
    if len(reward_funcs) == 2:
        assert rewards.isnan().sum() == 4


def test_rewards_without_a_number_are_refused():
    sampler = make_sampler(reward_funcs=lambda completions, **_: [None] * len(completions))
    publish(sampler, (1,))
    with pytest.raises(RunProblem, match="every reward of the weights of version 1 is NaN or None"):
        sampler.get()


def test_a_conversation_is_sampled_as_its_chat_template_writes_it():
    """Each id that the model declares as an end ends a completion."""
    given = []

    def reward(prompts, completions, **_):
        given.append((prompts[0], completions[0][0]["role"]))
        return [len(completion[0]["content"]) for completion in completions]

    prompt = [{"role": "user", "content": "12*4="}]
    samplers = [
        make_sampler([row], reward_funcs=of_row, prompts=1)
        for row, of_row in (
            ({"prompt": prompt}, reward),
            ({"prompt": "12*4="}, lambda completions, **_: [*map(len, completions)]),
        )
    ]
    for sampler in samplers:
        publish(sampler, (1,))
    pairs = zip(*[[sampler.get() for _ in range(4)] for sampler in samplers], strict=True)
    for sample, other in pairs:
        # The template of this task joins the contents.
        assert sample.input_ids.tolist() == other.input_ids.tolist()
    assert given == [(prompt, "assistant")]

    model = load()
    comma = AutoTokenizer.from_pretrained(PATH).convert_tokens_to_ids(";")
    model.generation_config.eos_token_id = [1, comma]
    sampler = OldSampler(
        model, AutoTokenizer.from_pretrained(PATH), ROWS, multiplication.reward, lag=0, num_generations=64
    )
    sampler.send_weights(iter(model.named_parameters()))
    sampler.update_model_version(1)
    ids = [sampler.get().input_ids.tolist() for _ in range(64)]
    assert any(of_one[-1] == comma for of_one in ids)
    assert not any(comma in of_one[:-1] for of_one in ids)


def test_weights_of_another_model_are_refused():
    sampler = make_sampler()
    sampler.send_weights(iter([("other.weight", torch.zeros(1))]))
    sampler.update_model_version(1)
    with pytest.raises(RunProblem, match=r"has no weights other\.weight"):
        sampler.get()


def trained_weights(folder):
    worker = make_sampler(multiplication.dataset("train", 16), temperature=1.0)
    args = AsyncGRPOConfig(
        str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=8,
        num_generations=4,
        token_budget=0,
        max_steps=3,
        learning_rate=1e-3,
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
    )
    with trl_on_a_cpu():
        trainer = AsyncGRPOTrainer(
            PATH,
            multiplication.reward,
            args,
            multiplication.dataset("train", 16),
            rollout_worker=worker,
            weight_transfer=worker,
        )
        trainer.train()
    staleness = [row["sample/staleness_max"] for row in trainer.state.log_history if "loss" in row]
    assert staleness == [0, 1, 1]
    return trainer.model.state_dict()


def test_a_training_is_the_same_each_time(tmp_path):
    weights, again = trained_weights(tmp_path / "a"), trained_weights(tmp_path / "b")
    assert all(torch.equal(weight, again[name]) for name, weight in weights.items())
    initial = load().state_dict()
    assert any(not torch.equal(weight, initial[name]) for name, weight in weights.items())
