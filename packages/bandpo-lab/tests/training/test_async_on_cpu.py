"""The stand-ins with which TRL's asynchronous trainer trains on a CPU."""

import pytest
import torch

from helpers.frameworks import needs

needs("trl", oldest="1.16.0")

from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

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
        "lag": 1,
        "num_generations": 4,
        "prompts": 2,
        "max_new_tokens": 8,
        "temperature": 0.8,
    } | settings
    return OldSampler(load(), AutoTokenizer.from_pretrained(PATH), rows, multiplication.reward, **settings)


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


def test_rewards_and_advantages_are_of_groups():
    sampler = make_sampler(num_generations=8, max_new_tokens=40)
    publish(sampler, (1,))
    samples = [sampler.get() for _ in range(16)]
    for group in (samples[:8], samples[8:]):
        rewards = torch.tensor([sample.metrics["reward"] for sample in group])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        torch.testing.assert_close(torch.tensor([sample.advantage for sample in group]), expected)
    assert sampler.rewards == [pytest.approx(sum(sample.metrics["reward"] for sample in samples) / 16)]


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
