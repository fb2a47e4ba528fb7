import pytest

pytest.importorskip("transformers")
import torch

import byte_model
from bandpo_lab.evals.generate import Sampling, TransformersSampler, prompt_ids, sample

PROMPTS = ["1+1=", "What is 7*8? Reply:"]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_model.tokenizer()


@pytest.fixture
def model():
    return byte_model.model()


def test_sample_repeats_by_seed_and_leaves_everything_as_it_was(model, tokenizer):
    model.train()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = sample(model, tokenizer, PROMPTS, 3, Sampling(6, seed=1))
    assert torch.equal(torch.rand(3), expected)
    assert model.training
    assert [len(row) for row in first] == [3, 3]
    assert sample(model, tokenizer, PROMPTS, 3, Sampling(6, seed=1)) == first
    assert sample(model, tokenizer, PROMPTS, 3, Sampling(6, seed=2)) != first
    assert len({text for row in first for text in row}) > 3


def test_missing_positions_are_what_the_whole_run_drew_each_by_its_own_seed(model, tokenizer):
    job = [PROMPTS[0]] * 5 + [PROMPTS[1]] * 5
    generator = TransformersSampler(model, tokenizer, Sampling(6, seed=3), batch_size=4)
    whole = dict(generator.stream(job, range(10)))
    assert sorted(whole) == list(range(10))
    assert dict(generator.stream(job, [9, 2])) == {2: whole[2], 9: whole[9]}
    seeds = {Sampling(seed=s).seed_of(i) for s in range(10) for i in range(100)}
    assert len(seeds) == 1000
    assert max(seeds) < 2**31


def test_greedy_equals_the_argmax_of_the_model_despite_padding(model, tokenizer):
    ids = prompt_ids(tokenizer, PROMPTS[0])
    for _ in range(5):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    expected = tokenizer.decode(ids[-5:], skip_special_tokens=True)
    assert sample(model, tokenizer, PROMPTS, 1, Sampling(5, temperature=0))[0] == [expected]


def test_a_models_own_settings_do_not_bend_the_distribution(model, tokenizer):
    plain = sample(model, tokenizer, PROMPTS, 2, Sampling(6))
    model.generation_config.update(top_k=1, repetition_penalty=5.0, min_p=0.9, no_repeat_ngram_size=1)
    assert sample(model, tokenizer, PROMPTS, 2, Sampling(6)) == plain


def always(model, logits):
    """Has the model give these whatever it reads."""
    model.lm_head = torch.nn.Linear(16, 258)
    torch.nn.init.zeros_(model.lm_head.weight)
    model.lm_head.bias.data = logits


def test_first_token_follows_the_models_probabilities(model, tokenizer):
    with torch.no_grad():
        logits = model(torch.tensor([prompt_ids(tokenizer, PROMPTS[0])])).logits[0, -1]
    # Nearly all mass on four letters, in known shares.
    bias = torch.full_like(logits, -30.0)
    shares = {"A": 0.4, "B": 0.3, "C": 0.2, "D": 0.1}
    for letter, share in shares.items():
        bias[tokenizer(letter)["input_ids"][0]] = torch.tensor(share).log()
    always(model, bias)
    texts = sample(model, tokenizer, ["x"], 4000, Sampling(1), batch_size=1000)[0]
    for letter, share in shares.items():
        assert texts.count(letter) / 4000 == pytest.approx(share, abs=0.035)


def test_end_of_text_is_told_from_the_limit(model, tokenizer):
    one_token = 50 * torch.eye(258)
    always(model, one_token[1])
    generator = TransformersSampler(model, tokenizer, Sampling(6))
    (_, ended), *_ = generator.stream(["x"], [0])
    assert (ended.text, ended.finish, ended.tokens) == ("", "stop", 1)
    always(model, one_token[tokenizer("7")["input_ids"][0]])
    (_, cut), *_ = generator.stream(["x"], [0])
    assert (cut.text, cut.finish, cut.tokens) == ("777777", "length", 6)


def test_messages_go_through_the_chat_template(model, tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    assert tokenizer.decode(prompt_ids(tokenizer, messages)) == "Be brief.\n1+1?\n"
    bare = byte_model.tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        prompt_ids(bare, messages)
    with pytest.raises(ValueError, match="no tokens"):
        prompt_ids(tokenizer, "")


def test_prompts_beyond_the_context_are_refused_before_any_work(tokenizer):
    with pytest.raises(ValueError, match="lower max_new_tokens to 13"):
        sample(byte_model.model(context=32), tokenizer, PROMPTS, 1, Sampling(20))


@pytest.mark.parametrize(
    "setting", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"seed": -1}]
)
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        Sampling(**setting)
