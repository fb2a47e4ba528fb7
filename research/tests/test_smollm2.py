"""The study with a real vocabulary, on a tiny model: its loop against transformers, its terms, and its page."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import byte_model
import when_tables
from bandpo import Rows
from bandpo_lab.errors import RunProblem
from bandpo_lab.study.jobs import JobResult
from reports import check_same_report
from studies import smollm2, smollm2_report
from studies.predictions import read_predictions
from studies.smollm2 import (
    ARMS,
    BODY,
    LENGTH,
    PARTS,
    Policies,
    RandomNumbers,
    Run,
    Trainer,
    groups_of_runs,
    rewarded,
    train,
    with_rewards,
    word_of,
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
def small_model(folder, monkeypatch):
    monkeypatch.setattr(smollm2, "smollm2_path", lambda: folder)


def chances(policies, rows, seed=0):
    return RandomNumbers([seed] * policies, "cpu").uniform(rows, LENGTH)


def whole_logp(folder, policies, prompts, tokens):
    """The log-probabilities and entropies of one policy's continuations under transformers' own model."""
    whole = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.cat([policies.prompts[prompts], tokens], 1)
    every = whole(ids).logits[:, policies.prompt_length - 1 : -1].log_softmax(-1)
    entropy = -(every.exp() * every).sum(-1)
    return every.gather(-1, tokens[..., None])[..., 0], entropy


def test_frozen_and_trained_layers_together_are_the_whole_model(folder):
    policies = Policies(folder, 2)
    prompts = torch.tensor([[0, 3, 3, 15], [1, 2, 0, 7]])
    batch = policies.generate(prompts, chances(2, 4))
    assert batch.tokens.shape == (2, 4, LENGTH)
    for index in range(2):
        logp, entropy = whole_logp(folder, policies, prompts[index], batch.tokens[index])
        torch.testing.assert_close(batch.logp[index], logp, atol=1e-5, rtol=0)
        torch.testing.assert_close(batch.entropy[index], entropy, atol=1e-5, rtol=0)
        current = policies.logp(batch.hidden, batch.tokens)[index]
        torch.testing.assert_close(current, logp, atol=1e-5, rtol=0)
    assert not torch.equal(batch.tokens[0, 1], batch.tokens[0, 2])


def test_a_second_batch_is_not_changed_by_the_first(folder):
    policies = Policies(folder, 1)
    first = policies.generate(torch.tensor([[1, 2]]), chances(1, 2))
    policies.generate(torch.tensor([[2, 2, 5]]), chances(1, 3, seed=1))
    again = policies.generate(torch.tensor([[1, 2]]), chances(1, 2))
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.logp, again.logp)


def test_samples_have_the_probabilities_of_the_model(folder):
    batch = Policies(folder, 1).generate(torch.zeros(1, 2000, dtype=torch.int64), chances(1, 2000))
    counts = Counter(batch.tokens[0, :, 0].tolist())
    for token, count in counts.most_common(3):
        p = float(batch.logp[0, batch.tokens[0, :, 0] == token, 0][0].exp())
        assert count / 2000 == pytest.approx(p, abs=4 * (p * (1 - p) / 2000) ** 0.5)


def test_policies_that_are_trained_together_are_those_that_transformers_and_torch_train_alone(folder):
    """Updates of two policies, against transformers' model, PPO's formula and torch's AdamW for each alone."""
    rate = 0.01
    arms = [ARMS["clip 0.2"], ARMS["clip [.8, 5]"]]
    bounds = [(0.8, 1.2), (0.8, 5.0)]
    policies = Policies(folder, 2)
    trainer = Trainer(policies, arms, rate)
    prompts = torch.tensor([[0, 0, 4, 4], [1, 1, 2, 2]])
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]])
    batch = with_rewards(policies.generate(prompts, chances(2, 4)), rewards, 2)
    # The policy that sampled was another: some ratios are beyond the bounds.
    batch = batch._replace(logp=batch.logp + torch.linspace(-0.6, 0.6, LENGTH))
    old, weights = trainer.old_logp(batch)
    assert torch.equal(old, batch.logp)
    effects = [trainer.update(batch, old, weights) for _ in range(3)]

    for index, (lower, upper) in enumerate(bounds):
        alone = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
        trained = [*alone.model.layers[2:].parameters(), alone.model.norm.weight]
        for parameter in trained:
            parameter.requires_grad_(True)
        optimizer = torch.optim.AdamW(trained, rate, weight_decay=0.0)
        ids = torch.cat([policies.prompts[prompts[index]], batch.tokens[index]], 1)
        advantages = batch.advantages[index][:, None]
        for update in range(3):
            every = alone(ids).logits[:, policies.prompt_length - 1 : -1].log_softmax(-1)
            logp = every.gather(-1, batch.tokens[index][..., None])[..., 0]
            ratio = (logp - batch.logp[index]).exp()
            loss = -torch.minimum(ratio * advantages, ratio.clamp(lower, upper) * advantages).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            ratio = ratio.detach()
            mass = ratio * advantages.abs()
            blocked = float((mass * (ratio > upper) * (advantages > 0)).sum())
            assert float(effects[update]["blocked"][index]) == pytest.approx(blocked, rel=1e-3, abs=1e-6)
            above = float((mass * (advantages > 0)).sum())
            assert float(effects[update]["above"][index]) == pytest.approx(above, rel=1e-3)
            of_sequence = ratio.prod(-1)
            size = float(of_sequence.sum() ** 2 / of_sequence.square().sum() / 4)
            assert float(effects[update]["sample size"][index]) == pytest.approx(size, rel=1e-3)
        by_name = dict(zip(map(id, trained), trained, strict=True))
        assert len(by_name) == len(policies.top.parameters)
        for stacked, parameter in zip(policies.top.parameters, trained, strict=True):
            torch.testing.assert_close(stacked[index], parameter, atol=2e-4, rtol=0)
    assert float(effects[2]["blocked"][0]) > 0


def test_a_gradient_that_is_not_finite_leaves_the_other_policies_alone(folder):
    policies = Policies(folder, 2)
    trainer = Trainer(policies, [ARMS["no bound"]] * 2, 0.01)
    batch = policies.generate(torch.tensor([[0, 1], [0, 1]]), chances(2, 2))
    batch = with_rewards(batch, torch.tensor([[1.0, 0.0], [1.0, 0.0]]), 2)
    before = [parameter.detach().clone() for parameter in policies.top.parameters]
    gradient = torch.ones_like(batch.logp)
    gradient[0, 0, 0] = math.nan
    policies.logp(batch.hidden, batch.tokens).backward(gradient)
    trainer._step(torch.ones(2))
    for start, parameter in zip(before, policies.top.parameters, strict=True):
        assert torch.equal(start[0], parameter[0])
        assert parameter.isfinite().all()
    assert any(
        not torch.equal(start[1], parameter[1])
        for start, parameter in zip(before, policies.top.parameters, strict=True)
    )


def test_recomputed_ratios_begin_at_one_and_weights_are_truncated(folder):
    names = ["clip 0.2", "recomputed", "recomputed, weighted"]
    policies = Policies(folder, 3)
    trainer = Trainer(policies, [ARMS[name] for name in names], 0.01)
    batch = policies.generate(torch.tensor([[0, 1, 2]] * 3), chances(3, 3))
    sampled = batch._replace(logp=batch.logp - torch.tensor([0.1, 0.3, 0.9, -0.2, 0.0, 0.0]))
    old, weights = trainer.old_logp(sampled)
    assert torch.equal(old[0], sampled.logp[0])
    torch.testing.assert_close(old[1:], batch.logp[1:], atol=1e-5, rtol=0)
    assert torch.equal(weights[:2], torch.ones(2, 3, LENGTH))
    expected = torch.tensor([0.1, 0.3, 0.9, -0.2, 0.0, 0.0]).exp().clamp(max=2.0).expand(3, LENGTH)
    torch.testing.assert_close(weights[2], expected, atol=1e-5, rtol=0)


def test_a_rate_by_sample_size_scales_the_step_of_that_arm_alone(folder):
    policies = Policies(folder, 2)
    trainer = Trainer(policies, [ARMS["clip [.8, 2]"], ARMS["rate by sample size"]], 0.01)
    parameters = policies.top.parameters
    before = [parameter.detach().clone() for parameter in parameters]
    # The same gradient for both policies. If each computed its own, the order of sums, and so Adam's step where a
    # gradient is 0 but for rounding, would depend on the number of threads.
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape[1:], generator=generator)
        parameter.grad = gradient.expand_as(parameter).clone()
    trainer._step(torch.tensor([0.25, 0.25]))
    for start, parameter in zip(before, parameters, strict=True):
        step = parameter.detach() - start
        assert step[0].abs().min() > 0
        torch.testing.assert_close(step[1], step[0] / 2, atol=1e-6, rtol=1e-3)


def test_a_veto_drops_what_follows_a_token_that_fell_in_a_loser():
    logp_old = torch.full((2, 4), 0.5).log()
    logp = torch.tensor([[0.5, 0.2, 0.5, 0.5]] * 2).log().requires_grad_()
    method = ARMS["veto of suffixes"].method
    loss, _ = smollm2.policy_loss(logp, logp_old, torch.tensor([-1.0, 1.0]), method=method, layout=Rows())
    loss.backward()
    assert (logp.grad[0] != 0).tolist() == [True, False, False, False]
    assert (logp.grad[1] != 0).all()


def test_rewards_are_for_words_or_for_luck():
    texts = [" my eye is", " the dog"] * 500
    numbers = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    body = replace(PARTS[0], luck=0.0)
    words, rewards = rewarded(body, texts, numbers)
    assert words == ["eye", None] * 500
    assert rewards.tolist() == [1.0, 0.0] * 500
    _, lucky = rewarded(replace(body, luck=0.1), texts, numbers)
    assert (lucky[::2] == 1).all()
    assert float(lucky[1::2].mean()) == pytest.approx(0.1, abs=0.04)
    _, by_word = rewarded(replace(body, luck=0.5, lucky_word="dog"), texts, numbers)
    assert (by_word[::2] == 1).all()
    assert float(by_word[1::2].mean()) == pytest.approx(0.5, abs=0.08)
    _, no_word = rewarded(replace(body, luck=0.5, lucky_word="cat"), texts, numbers)
    assert no_word[1::2].sum() == 0
    _, coin = rewarded(replace(body, reward="coin", luck=0.5), texts, numbers)
    assert float(coin[::2].mean()) == pytest.approx(float(coin[1::2].mean()), abs=0.1)


def test_texts_have_the_words_of_the_tokenizer(folder):
    policies = Policies(folder, 1)
    sentences = ["My eye, her Hand", "café elbow"]
    ids = [policies.tokenizer(sentence).input_ids for sentence in sentences]
    for sentence, tokens in zip(sentences, ids, strict=True):
        [[text]] = policies.texts(torch.tensor([[tokens]]))
        assert word_of(text) == word_of(sentence) in BODY


def test_a_run_learns_what_is_rewarded_and_is_the_same_again(small_model, monkeypatch):
    # The random model writes no words: any text with one of these letters counts.
    def word(text, words=BODY):
        return "eye" if set(text) & set("abcdefgh") else None

    monkeypatch.setattr(smollm2, "word_of", word)
    part = replace(PARTS[0], batches=14, lag=1, luck=0.0)
    group = [Run(part.name, "BandAbove", 0.01, 3), Run(part.name, "clip 0.2", 0.01, 3)]
    row, other = train(part, group, "cpu")
    right = np.array(row["right"])
    assert right[-5:].mean() > right[:2].mean() + 0.2
    assert row["end"] == pytest.approx(right[-5:].mean(), abs=0.2)
    assert row["kl from base"] > 0
    assert row["blocked"][0] is None
    assert None not in row["blocked"][1:4]
    again = train(part, group, "cpu")
    assert {**row, "seconds": 0} == {**again[0], "seconds": 0}
    assert other["right"][:2] == row["right"][:2]  # the same draws, until the first update
    assert other["right"] != row["right"]


@pytest.mark.parametrize("seeds_together", [1, 5])
def test_runs_are_in_the_order_of_seeds_and_every_arm_is_known(seeds_together):
    groups = list(groups_of_runs(seeds_together=seeds_together))
    every = [run for _, group in groups for run in group]
    assert len(set(every)) == len(every)
    blocks = [group[0].seed // seeds_together for _, group in groups]
    assert blocks == sorted(blocks)
    assert all(len({(run.part, run.rate) for run in group}) == 1 for _, group in groups)
    assert {arm for part in PARTS for arm in part.arms} == ARMS.keys()
    assert all("clip 0.2" in part.arms for part in PARTS)
    assert {run for _, group in groups_of_runs() for run in group} == set(every)


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
        "right": [0.3 + gain + noise[2]] * 6,
        "entropy": [2.0 - (run.arm == "Band")] * 6,
        "blocked": [None, 0.1],
        "blocked below": [None, 0.1],
        "movement": [None, 0.1],
        "sample size": [None, 0.9],
        "luck": [None, 0.5 + noise[3]],
    }


def test_the_page_says_what_made_up_runs_have(tmp_path):
    generator = np.random.default_rng(0)
    file = tmp_path / "runs.jsonl"
    rows = [
        made_up(generator, part, run) for part, group in groups_of_runs() for run in group if run.seed < 6
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    smollm2_report.main([str(file), str(tmp_path / "report.md")])
    text = (tmp_path / "report.md").read_text()
    assert f"{len(rows)} of {sum(len(group) for _, group in groups_of_runs())} runs have ended" in text
    by_name = {world.name: world for world in smollm2_report.worlds_of(smollm2.read_runs(file))}
    gain = by_name["stale"].difference("BandAbove", smollm2_report.BEST_CONSTANT)
    rates = len(by_name["stale"].rates)
    a_nat_less = f"-1.000 [-1.000, -1.000] ({6 * rates}, 6)"
    assert f"| Band | {a_nat_less} | {a_nat_less} | {a_nat_less} |" in text
    assert gain.low > 0.1
    assert gain.low < 0.2 < gain.high + 0.02
    entropy = by_name["stale, coin, 0.001"].difference("Band", "BandAbove", "end entropy")
    assert entropy.high < -0.9


def test_every_prediction_is_of_a_world_and_an_arm_that_the_study_has(tmp_path):
    rows = {
        run: made_up(np.random.default_rng(0), part, run)
        for part, group in groups_of_runs()
        for run in group
        if run.seed < 2
    }
    worlds = {world.name: world for world in smollm2_report.worlds_of(rows)}
    for prediction in read_predictions(smollm2_report.PREDICTIONS):
        arms = {*worlds[prediction.world].part.arms, smollm2_report.BEST_CONSTANT}
        assert {prediction.arm, prediction.minus} <= arms
        assert prediction.metric in smollm2_report.SMALLEST


def test_a_study_goes_on_where_its_file_ends(small_model, tmp_path, monkeypatch, capsys):
    part = replace(PARTS[0], batches=2, lag=0, arms=["clip 0.2", "Band"], rates=[1e-3], seeds=[0, 1])
    monkeypatch.setitem(smollm2.STUDIES, "bounds", (part,))
    trained = []

    def here(todo, processes, preload):
        for place, call in enumerate(todo):
            value = call()
            trained.extend((row["arm"], row["seed"]) for row in value)
            yield place, JobResult(code=0, seconds=1.0, value=value)

    monkeypatch.setattr(smollm2, "run_in_processes", here)
    file = tmp_path / "runs.jsonl"
    smollm2.main([str(file)])
    whole = file.read_text()
    assert trained == [("clip 0.2", 0), ("Band", 0), ("clip 0.2", 1), ("Band", 1)]
    row = json.loads(whole.splitlines()[0])
    assert {"commit", "time", "machine", "torch", "seconds"} <= row.keys()
    lines = whole.splitlines()
    file.write_text("\n".join(lines[:3]) + "\n" + lines[3][:40])
    trained.clear()
    smollm2.main([str(file)])
    assert trained == [("Band", 1)]
    smollm2.main([str(file), "--count"])
    assert "stale: 4 of 4 runs" in capsys.readouterr().out


def test_a_group_that_fails_leaves_the_rows_of_the_others(small_model, tmp_path, monkeypatch):
    part = replace(PARTS[0], batches=2, lag=0, arms=["clip 0.2"], rates=[1e-3], seeds=[0, 1, 2])
    monkeypatch.setitem(smollm2.STUDIES, "bounds", (part,))

    def second_fails(calls, processes, preload):
        for index, call in enumerate(calls):
            failed = index == 1
            yield index, JobResult(code=int(failed), seconds=1.0, value=None if failed else call())

    monkeypatch.setattr(smollm2, "run_in_processes", second_fails)
    file = tmp_path / "runs.jsonl"
    with pytest.raises(RunProblem, match=r"groups of runs failed: stale at 0\.001\. .*lower --processes"):
        smollm2.main([str(file)])
    assert [json.loads(line)["seed"] for line in file.read_text().splitlines()] == [0, 2]


def test_the_rows_of_new_seeds_are_the_runs_of_their_study():
    rows = smollm2.read_runs(Path(__file__).parents[2] / "research/results/smollm2/new-seeds.jsonl.gz")
    new_seeds = smollm2.NEW_SEEDS
    runs = [run for _, group in groups_of_runs([new_seeds]) for run in group]
    assert rows.keys() == {*runs}
    for earlier in PARTS:
        assert not {*new_seeds.seeds} & {*earlier.seeds}
    for row in rows.values():
        assert len(row["right"]) == len(row["entropy"]) == new_seeds.batches
        assert {"commit", "machine", "torch", "time"} <= row.keys()
    for prediction in read_predictions(when_tables.NEW_SEEDS_PREDICTIONS):
        assert (prediction.world, prediction.arm) == (new_seeds.name, "BandAbove")
        assert prediction.minus in new_seeds.arms


@pytest.mark.slow
def test_the_committed_report_is_of_the_committed_runs_and_docs_quote_it(tmp_path):
    root = Path(__file__).parents[2]
    runs = root / "research/results/smollm2/runs.jsonl.gz"
    smollm2_report.main([str(runs), str(tmp_path / "report.md")])
    report = (root / "research/reports/smollm2/report.md").read_text()
    check_same_report(report, (tmp_path / "report.md").read_text())
