"""The study with a real vocabulary, on a tiny model: its loop against transformers, its terms, and its page."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import byte_model
from bandpo_lab.study.jobs import JobResult
from studies import smollm2, smollm2_report
from studies.predictions import read_predictions
from studies.smollm2 import (
    ARMS,
    CLIP,
    LENGTH,
    PARTS,
    Policy,
    Run,
    rewarded,
    runs,
    train,
    update,
    with_rewards,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_model.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def policy(folder, monkeypatch):
    policy = Policy(folder, top_layers=2)
    monkeypatch.setattr(smollm2, "policy", lambda: policy)
    return policy


def numbers(seed=0):
    return torch.Generator().manual_seed(seed)


def whole_logp(folder, policy, prompts, tokens):
    whole = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.cat([policy.prompts[prompts], tokens], 1)
    every = whole(ids).logits[:, policy.prompt_length - 1 : -1].log_softmax(-1)
    entropy = -(every.exp() * every).sum(-1)
    return every.gather(-1, tokens[..., None])[..., 0], entropy


def test_both_parts_together_are_the_whole_model(folder, policy):
    prompts = torch.tensor([0, 3, 3, 15])
    batch = policy.generate(prompts, numbers())
    logp, entropy = whole_logp(folder, policy, prompts, batch.tokens)
    torch.testing.assert_close(batch.logp, logp, atol=1e-5, rtol=0)
    torch.testing.assert_close(batch.entropy, entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(policy.logp(batch.hidden, batch.tokens), logp, atol=1e-5, rtol=0)
    assert batch.tokens.shape == (4, LENGTH)
    assert not torch.equal(batch.tokens[1], batch.tokens[2])


def test_a_second_batch_is_not_changed_by_the_first(policy):
    first = policy.generate(torch.tensor([1, 2]), numbers())
    policy.generate(torch.tensor([2, 2, 5]), numbers(1))
    again = policy.generate(torch.tensor([1, 2]), numbers())
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.logp, again.logp)


def test_samples_have_the_probabilities_of_the_model(policy):
    batch = policy.generate(torch.zeros(2000, dtype=torch.int64), numbers())
    counts = Counter(batch.tokens[:, 0].tolist())
    for token, count in counts.most_common(3):
        p = float(batch.logp[batch.tokens[:, 0] == token, 0][0].exp())
        assert count / 2000 == pytest.approx(p, abs=4 * (p * (1 - p) / 2000) ** 0.5)


def test_an_update_moves_the_last_layers_alone_by_the_gradient_of_the_clip(folder, policy):
    prompts = torch.tensor([0, 0, 4, 4])
    batch = with_rewards(policy.generate(prompts, numbers()), torch.tensor([1.0, 0.0, 0.0, 1.0]), 2)
    # The old policy was another: some ratios are beyond the bounds.
    batch = batch._replace(logp=batch.logp + torch.linspace(-0.6, 0.6, LENGTH))
    frozen = [weight.clone() for weight in policy.trunk.parameters()]
    rate = 0.1
    optimizer = torch.optim.SGD(policy.parameters, rate)
    before = [weight.detach().clone() for weight in policy.parameters]
    effect = update(policy, optimizer, batch, CLIP)

    policy_before = Policy(folder, top_layers=2)
    logp = policy_before.logp(batch.hidden, batch.tokens)
    ratio = (logp - batch.logp).exp()
    advantages = batch.advantages[:, None]
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    gradients = torch.autograd.grad(loss, policy_before.parameters)
    scale = min(1.0, 1.0 / float(torch.stack([g.norm() for g in gradients]).norm()))
    for start, weight, gradient in zip(before, policy.parameters, gradients, strict=True):
        torch.testing.assert_close(weight, start - rate * scale * gradient, atol=1e-5, rtol=0)
    assert all(torch.equal(a, b) for a, b in zip(frozen, policy.trunk.parameters(), strict=True))

    ratio = ratio.detach()
    blocked = (ratio > 1.2) & (advantages > 0)
    mass = ratio * advantages.abs()
    assert effect["blocked"] == pytest.approx(float((mass * blocked).sum()), rel=1e-4)
    assert effect["above"] == pytest.approx(float((mass * (advantages > 0)).sum()), rel=1e-4)
    assert 0 < effect["blocked"] < effect["above"]
    policy.reset()
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters, strict=True))


def test_rewards_are_for_words_or_for_luck():
    words = ["eye", None] * 500
    body = replace(PARTS[0], luck=0.0)
    assert rewarded(body, words, numbers()).tolist() == [1.0, 0.0] * 500
    lucky = rewarded(replace(body, luck=0.1), words, numbers())
    assert (lucky[::2] == 1).all()
    assert float(lucky[1::2].mean()) == pytest.approx(0.1, abs=0.04)
    coin = rewarded(replace(body, reward="coin", luck=0.5), words, numbers())
    assert float(coin[::2].mean()) == pytest.approx(float(coin[1::2].mean()), abs=0.1)


def test_a_run_learns_what_is_rewarded_and_is_the_same_again(policy, monkeypatch):
    # The random model writes no words: any text with one of these letters counts.
    monkeypatch.setattr(smollm2, "word_of", lambda text: "eye" if set(text) & set("abcdefgh") else None)
    part = replace(PARTS[0], batches=14, lag=1, luck=0.0)
    run = Run(part.name, "BandAbove", 0.01, 3)
    row = train(part, run)
    right = np.array(row["right"])
    assert right[-5:].mean() > right[:2].mean() + 0.2
    assert row["end"] == pytest.approx(right[-5:].mean(), abs=0.2)
    assert row["kl from base"] > 0
    assert row["blocked"][0] is None
    assert None not in row["blocked"][1:4]
    again = train(part, run)
    assert {**row, "seconds": 0} == {**again, "seconds": 0}
    other = train(part, run._replace(arm="clip 0.2"))
    assert other["right"][:2] == row["right"][:2]  # the same draws, until the first update
    assert other["right"] != row["right"]


def test_runs_are_in_the_order_of_seeds_and_every_arm_is_known():
    every = list(runs())
    assert len({run for _, run in every}) == len(every)
    assert [run.seed for _, run in every] == sorted(run.seed for _, run in every)
    assert {arm for part in PARTS for arm in part.arms} == ARMS.keys()
    assert all("clip 0.2" in part.arms for part in PARTS)


def made_up(generator, part, run):
    """A row of a study in which BandAbove is .2 better than the others, and Band has a nat less of entropy."""
    gain = 0.2 * (run.arm == "BandAbove")
    noise = generator.normal(0, 0.02, 4)
    return run._asdict() | {
        "end": 0.5 + gain + noise[0],
        smollm2_report.PASS: 0.9,
        "words": 5.0,
        "end entropy": 2.0 - (run.arm == "Band") + noise[1],
        "kl from base": 1.0,
        "right": [0.3 + gain + noise[2]] * 4,
        "blocked": [None, 0.1],
        "blocked below": [None, 0.1],
        "movement": [None, 0.1],
        "luck": [None, 0.5 + noise[3]],
    }


def test_the_page_says_what_made_up_runs_have(tmp_path):
    generator = np.random.default_rng(0)
    file = tmp_path / "runs.jsonl"
    rows = [made_up(generator, part, run) for part, run in runs() if run.seed < 6]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    smollm2_report.main([str(file), str(tmp_path / "report.md")])
    text = (tmp_path / "report.md").read_text()
    assert f"{len(rows)} of {len(list(runs()))} runs have ended" in text
    by_name = {world.name: world for world in smollm2_report.worlds_of(smollm2.read_runs(file))}
    gain = by_name["stale"].difference("BandAbove", smollm2_report.BEST_CONSTANT)
    assert gain.low > 0.1
    assert gain.low < 0.2 < gain.high + 0.02
    entropy = by_name["stale, coin, 0.001"].difference("Band", "BandAbove", "end entropy")
    assert entropy.high < -0.9


def test_every_prediction_is_of_a_world_and_an_arm_that_the_study_has(tmp_path):
    rows = {run: made_up(np.random.default_rng(0), part, run) for part, run in runs() if run.seed < 2}
    worlds = {world.name: world for world in smollm2_report.worlds_of(rows)}
    for prediction in read_predictions(smollm2_report.PREDICTIONS):
        arms = {*worlds[prediction.world].part.arms, smollm2_report.BEST_CONSTANT}
        assert {prediction.arm, prediction.minus} <= arms
        assert prediction.metric in smollm2_report.SMALLEST


def test_a_study_goes_on_where_its_file_ends(policy, tmp_path, monkeypatch, capsys):
    part = replace(PARTS[0], batches=2, lag=0, arms=["clip 0.2", "Band"], rates=[1e-3], seeds=[0])
    monkeypatch.setattr(smollm2, "PARTS", (part,))
    monkeypatch.setattr(smollm2, "runs", lambda parts=(part,): runs(parts))
    monkeypatch.setattr(smollm2, "smollm2_path", lambda: None)
    calls = []

    def here(todo, processes, preload):
        for place, call in enumerate(todo):
            calls.append(call)
            yield place, JobResult(code=0, seconds=1.0, value=call())

    monkeypatch.setattr(smollm2, "run_in_processes", here)
    file = tmp_path / "runs.jsonl"
    smollm2.main([str(file)])
    whole = file.read_text()
    assert len(calls) == 2
    row = json.loads(whole.splitlines()[0])
    assert {"commit", "time", "machine", "seconds"} <= row.keys()
    file.write_text(whole.splitlines()[0] + "\n" + whole.splitlines()[1][:40])
    smollm2.main([str(file)])
    assert len(calls) == 3
    smollm2.main([str(file), "--count"])
    assert "stale: 2 of 2 runs" in capsys.readouterr().out
