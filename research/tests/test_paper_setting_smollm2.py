"""The paper's setting on one GPU, on tiny shapes: the model as transformers has it, the update as torch, the pieces."""

import json
import random

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra bandpo-lab[smollm2]")

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bandpo import policy_loss
from bandpo.core.text import as_method
from bandpo_lab.errors import InvalidValue
from bandpo_lab.evals.grading import grade
from bandpo_lab.tasks.sums import Sum, problems
from studies import paper_setting_smollm2
from studies.paper_setting import ARMS, CLIP, Cell, read_rows
from studies.paper_setting_smollm2 import (
    SMALLEST,
    STUDY,
    Sizes,
    Trainer,
    encode,
    reward,
    run_piece,
)
from studies.predictions import read_predictions
from studies.whole_llama import Llama, Sampler

CHARACTERS = [*"0123456789+?. ", *"Whatisnwerumblo"]
SIZES = Sizes(prompts=8, samples=8, updates=4, tokens=6, pool=40, held_out=3)
END = 0


def parity(text: str, answer: str = "") -> float:
    """A reward that differs between answers to a problem, also where none is right."""
    return float(sum(map(ord, text)) % 2)


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer of characters; letters that it does not know are one unknown token."""
    vocabulary = {name: index for index, name in enumerate(["</s>", "<unk>", *dict.fromkeys(CHARACTERS)])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="</s>",
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )


@pytest.fixture(scope="module")
def reference(tokenizer, tmp_path_factory):
    """A small model of transformers, and its folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        initializer_range=0.3,
        eos_token_id=END,
    )
    model = LlamaForCausalLM(config)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture
def trainer(reference, tokenizer):
    return Trainer(reference[1], SIZES, "cpu", torch.float32, tokenizer)


def test_logits_and_gradients_are_those_of_transformers(reference):
    model, folder = reference
    ours = Llama(folder)
    ids = torch.randint(1, 20, (3, 11), generator=torch.Generator().manual_seed(1))
    expected = model(ids).logits
    torch.testing.assert_close(ours.logits(ids), expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(ours.logits(ids, start=7), expected[:, 7:], atol=2e-5, rtol=2e-5)
    ours.logits(ids).log_softmax(-1)[..., 3].sum().backward()
    model.zero_grad()
    expected.log_softmax(-1)[..., 3].sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours.weights[name].grad, parameter.grad, atol=2e-4, rtol=2e-4)


def test_a_model_of_another_kind_is_refused(reference, tmp_path):
    content = json.loads((reference[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"tie_word_embeddings": False}))
    with pytest.raises(ValueError, match="not a Llama with tied embeddings"):
        Llama(tmp_path)


@pytest.mark.parametrize("prompt_length", [1, 5])
def test_sampled_tokens_are_those_of_the_distribution_of_transformers(reference, prompt_length):
    """Each token is the one at which the cumulative distribution of transformers first exceeds the chance."""
    model, folder = reference
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(1, 20, (3, prompt_length), generator=generator)
    chances = torch.rand(6, 9, generator=generator)
    sampled = Sampler(Llama(folder), 6, prompt_length, 9, END).sample(prompts, chances)
    ids = prompts.repeat_interleave(2, 0)
    ended = torch.zeros(6, dtype=torch.bool)
    for time in range(9):
        with torch.no_grad():
            logp = model(ids).logits[:, -1].double().log_softmax(-1)
        token = torch.searchsorted(logp.exp().cumsum(-1), chances[:, time, None].double())[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
        for row in range(6):
            assert sampled.mask[row, time] == (not ended[row])
            if not ended[row]:
                assert sampled.tokens[row, time] == token[row]
                assert float(sampled.entropy[row, time]) == pytest.approx(float(entropy[row]), abs=1e-4)
            else:
                assert sampled.entropy[row, time] == 0
        ended |= token == END
        ids = torch.cat([ids, token[:, None]], 1)


def test_a_second_call_forgets_the_first(reference):
    sampler = Sampler(Llama(reference[1]), 4, 5, 8, END)
    prompts = torch.randint(1, 20, (2, 2, 5), generator=torch.Generator().manual_seed(3))
    chances = torch.rand(2, 4, 8, generator=torch.Generator().manual_seed(4))
    first = sampler.sample(prompts[0], chances[0])
    sampler.sample(prompts[1], chances[1])
    again = sampler.sample(prompts[0], chances[0])
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.entropy, again.entropy)


def test_prompts_of_different_lengths_are_refused(tokenizer):
    with pytest.raises(InvalidValue, match="must have one length"):
        encode(tokenizer, [Sum(10, 11), Sum(10, 111)])


def test_the_reward_is_that_of_the_grading():
    rng = random.Random(0)
    forms = (
        "{}",
        "The answer is {}.",
        "{} is the sum.",
        "It is {}, I think.",
        "about {} or so",
        "**{}**",
        "none",
    )
    for problem in problems("train", 40):
        for form in forms:
            number = problem.answer if rng.random() < 0.5 else str(rng.randrange(20, 200))
            text = form.format(number)
            assert (
                reward(text, problem.answer) == grade(text, problem.answer, problem=problem.prompt).score
            ), text


def one_batch(trainer, method, rate=1e-3):
    """The weights and the metrics after one batch."""
    run = trainer.run(as_method(method), rate, seed=5, batches=1, say=lambda _: None)
    return {name: weight.detach().clone() for name, weight in trainer.model.weights.items()}, run


def test_the_updates_are_those_of_transformers_and_of_the_loss(reference, trainer, monkeypatch):
    """Four updates with transformers' class, bandpo's public loss and torch's AdamW give the same weights."""
    monkeypatch.setattr(paper_setting_smollm2, "reward", parity)
    method = "FixedClip(0.2)"
    weights, run = one_batch(trainer, method)
    assert run.log[0]["grad_norm"] > 0

    model = LlamaForCausalLM.from_pretrained(reference[1])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.999), weight_decay=0.01)
    numbers = torch.Generator().manual_seed(5)
    chosen = torch.randint(len(trainer.pool.problems), (8,), generator=numbers)
    chances = torch.rand(64, 6, generator=numbers)
    order = torch.randperm(64, generator=numbers)
    fresh = Trainer(reference[1], SIZES, "cpu", torch.float32, trainer.tokenizer)
    sampled = fresh.sampler.sample(fresh.pool.prompts[chosen], chances)
    prompts = fresh.pool.prompts[chosen].repeat_interleave(8, 0)
    rewards = torch.tensor(
        [
            parity(trainer.tokenizer.decode(ids[mask], skip_special_tokens=True))
            for ids, mask in zip(sampled.tokens, sampled.mask, strict=True)
        ]
    ).view(8, 8)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()

    def logp_of(rows):
        logits = model(torch.cat([prompts[rows], sampled.tokens[rows]], 1)).logits[
            :, prompts.shape[1] - 1 : -1
        ]
        return logits.log_softmax(-1).gather(-1, sampled.tokens[rows][..., None])[..., 0]

    with torch.no_grad():
        old = logp_of(torch.arange(64))
    for rows in order.chunk(4):
        optimizer.zero_grad()
        policy_loss(
            logp_of(rows), old[rows], advantages[rows], sampled.mask[rows], method=method, aggregation="grpo"
        ).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), atol=5e-5, rtol=1e-4)


def test_rules_of_a_seed_have_the_same_first_batch_and_each_run_begins_anew(trainer, monkeypatch):
    monkeypatch.setattr(paper_setting_smollm2, "reward", parity)
    clipped, of_clip = one_batch(trainer, "FixedClip(0.02)", 1e-2)
    free, of_none = one_batch(trainer, "Unclipped()", 1e-2)
    assert of_clip.log[0]["reward"] == of_none.log[0]["reward"]
    assert of_clip.log[0]["entropy"] == of_none.log[0]["entropy"]
    assert any(not torch.equal(clipped[name], free[name]) for name in clipped)
    again, _ = one_batch(trainer, "FixedClip(0.02)", 1e-2)
    assert all(torch.equal(clipped[name], again[name]) for name in clipped)


def test_held_out_problems_are_all_asked_the_same_number_of_times(trainer, monkeypatch):
    asked = []
    monkeypatch.setattr(paper_setting_smollm2, "reward", lambda text, answer: asked.append(answer) or 1.0)
    scores = trainer.evaluate()
    assert scores == {"pass@1": 1.0, "pass@8": 1.0, "pass@32": 1.0}
    held_out = {problem.answer for problem in trainer.held_out.problems}
    assert {*asked} == held_out
    assert len(asked) == 4 * 32  # two at a time, the last beside one that is not counted


@pytest.fixture
def study(monkeypatch):
    """A study of four short runs, with a reward that often differs."""
    monkeypatch.setattr(paper_setting_smollm2, "reward", parity)
    cells = [Cell("fresh", 0, 1, (1e-3,), 3, 1.0, range(300, 302), (CLIP, "BandPO"))]
    return paper_setting_smollm2.Study("A small one", cells, 0.1, SMALLEST, STUDY.predictions)


MEASURED = ("seconds", "seconds per batch", "of which sampling", "time")


def runs_of(file):
    """The rows by run, without what differs between two machines or moments."""
    return {
        key: {name: value for name, value in row.items() if name not in MEASURED}
        for key, row in read_rows(file).items()
    }


def test_a_piece_that_is_killed_goes_on_where_its_rows_end(trainer, study, tmp_path, monkeypatch):
    whole = tmp_path / "whole.jsonl"
    assert run_piece(whole, trainer, 5, study) == 4

    killed = tmp_path / "killed.jsonl"
    run = trainer.run
    calls = []

    def interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            trainer.model.weights["model.norm.weight"].detach().fill_(7.0)
            raise KeyboardInterrupt
        return run(*arguments, **options)

    monkeypatch.setattr(trainer, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_piece(killed, trainer, 5, study)
    with killed.open("a") as file:
        file.write('{"cell": "fresh", "arm": "Band')  # a write that was cut off
    monkeypatch.setattr(trainer, "run", run)
    assert run_piece(killed, trainer, 5, study) == 2
    assert runs_of(killed) == runs_of(whole)
    assert run_piece(killed, trainer, 5, study) == 0


def test_a_piece_ends_before_a_run_that_does_not_fit(trainer, study, tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(paper_setting_smollm2.time, "monotonic", lambda: clock[0])
    run = trainer.run

    def slow(*arguments, **options):
        clock[0] += 70.0
        return run(*arguments, **options)

    monkeypatch.setattr(trainer, "run", slow)
    file = tmp_path / "rows.jsonl"
    assert run_piece(file, trainer, 3, study) == 2  # of 180 s, the third would end at 210
    assert run_piece(file, trainer, 3, study) == 2
    rows = read_rows(file)
    assert len(rows) == 4
    for row in rows.values():
        assert row["commit"] is None or len(row["commit"]) >= 12
        assert row["machine"]
        assert row["torch"] == torch.__version__


def test_the_report_has_every_prediction_and_says_what_was_not_run(trainer, study, tmp_path):
    file = tmp_path / "rows.jsonl"
    run_piece(file, trainer, 5, study)
    text = paper_setting_smollm2.page(read_rows(file), STUDY)
    assert "0 of 12 seeds have all runs" in text
    predictions = read_predictions(STUDY.predictions)
    assert text.count("| not run | open |") == len(predictions)
    worlds = {f"{cell.name} at {rate:g}" for cell in STUDY.cells for rate in cell.rates}
    for prediction in predictions:
        assert prediction.world in worlds
        assert {prediction.arm, prediction.minus} <= {*ARMS}
        assert prediction.metric in SMALLEST


def test_without_a_gpu_the_command_says_so(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="sees no GPU"):
        paper_setting_smollm2.main([str(tmp_path / "rows.jsonl")])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_samples_what_the_host_samples(reference):
    prompts = torch.randint(1, 20, (2, 5), device="cuda")
    chances = torch.rand(4, 8, device="cuda")
    model = Llama(reference[1], "cuda")
    sampler = Sampler(model, 4, 5, 8, END)
    replayed = [sampler.sample(prompts, chances) for _ in range(2)]
    direct = Sampler(model, 4, 5, 8, END)
    direct._step = direct._choose
    expected = direct.sample(prompts, chances)
    for sampled in replayed:
        assert torch.equal(sampled.tokens, expected.tokens)
