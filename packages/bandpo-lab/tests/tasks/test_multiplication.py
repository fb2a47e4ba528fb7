import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandpo_lab.tasks import multiplication
from bandpo_lab.tasks.multiplication import DIRECT, EOS, Product, dataset, problems, reward, tokenizer

any_problem = st.builds(Product, st.integers(0, 10**18), st.integers(0, 9))


def check_scratchpad(a, b, text):
    """Replay column multiplication on the text, from what the text itself says."""
    steps, product = re.fullmatch(r"<(.*)>(\d+)", text).groups()
    carry, written = 0, ""
    for digit, step in zip(str(a)[::-1], steps.split(";"), strict=True):
        factor, by, added, total = map(int, re.fullmatch(r"(\d)\*(\d)\+(\d)=(\d+)", step).groups())
        assert (factor, by, added) == (int(digit), b, carry)
        assert total == factor * by + added
        carry, written = total // 10, str(total % 10) + written
    assert int(f"{carry}{written}") == int(product) == a * b


@given(any_problem)
def test_right_completions_are_right_step_by_step(problem):
    check_scratchpad(problem.a, problem.b, problem.scratchpad)
    assert problem.prompt == f"{problem.a}*{problem.b}="
    assert reward([DIRECT + problem.answer, problem.scratchpad], [problem.answer] * 2) == [1.0, 1.0]


@pytest.mark.parametrize(("a", "b"), [(-1, 3), (12, 10), (12, -1)])
def test_impossible_problems_are_refused(a, b):
    with pytest.raises(ValueError, match=re.escape(f"Product({a}, {b})")):
        Product(a, b)


def test_the_splits_are_all_problems_each_once_and_the_smaller_has_all_digits():
    both = problems("eval", 720) + problems("train", 6480)
    assert sorted((p.a, p.b) for p in both) == [(a, b) for a in range(100, 1000) for b in range(2, 10)]
    held_out = problems("eval", 720)
    assert held_out != problems("eval", 720, seed=1)
    for place in range(3):
        counts = [sum(str(p.a)[place] == str(digit) for p in held_out) for digit in range(place == 0, 10)]
        assert max(counts) <= 1.1 * min(counts)
    assert {sum(p.b == b for p in held_out) for b in range(2, 10)} == {90}


@given(st.integers(0, 70), st.integers(), st.integers())
def test_no_seed_mixes_the_splits(n, seed, other):
    train, held_out = problems("train", n, seed), problems("eval", n, other)
    assert not set(train) & set(held_out)
    assert len(set(train)) == n == len(set(held_out))
    assert problems("train", n, seed) == train


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "test", "n": 1}, "split='test': choose one of train, eval"),
        ({"split": "eval", "n": 721}, "n=721: choose 0 to 720"),
        ({"split": "eval", "n": -1}, "n=-1: choose 0 to 720"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        problems(**arguments)
    with pytest.raises(ValueError, match=message):
        dataset(**arguments)


def test_dataset_is_what_trl_reads():
    rows, asked = dataset("train", 50, seed=3), problems("train", 50, seed=3)
    assert rows.column_names == ["prompt", "answer"]
    assert [(row["prompt"], row["answer"]) for row in rows] == [(p.prompt, p.answer) for p in asked]
    columns = {"prompts": rows["prompt"], "completion_ids": [[1]] * 50, "trainer_state": None}
    answers = list(rows["answer"])
    assert reward(completions=[f"|{a}" for a in answers], answer=answers, **columns) == [1.0] * 50
    with pytest.raises(ValueError, match="2 completions for 1 answers"):
        reward(["|1", "|2"], ["1"])


WRONG = [
    "", "3222", " 3222",
    "|", "|3221", "|03222", "|+3222", "|-3222", "| 3222", "|3222 ",
    "|3222\n", "|3222.0", "|3_222", "|32|22", "||3222", "|3222|3222", "|3222>3222",
    "|6=3222", "|3222<|im_end|>", "|537*6", "|٣٢٢٢",
    "<3222", "<>", "<7*6>", "<7*6+0=42;3222", "7*6+0=42>3222", "<7*6+0=42>3221", "<a>3222",
    "<7*6 >3222", "<7*6>0>3222", "<<>3222", "<|>3222", "<\n>3222", ">3222", "<>3222<>3222",
    "__import__('os')", "|537*6 or 3222", "|int('3222')",
]  # fmt: skip


def test_the_product_in_its_form_alone_earns():
    right = ["|3222", "<7*6+0=42;3*6+4=22;5*6+2=32>3222", "<7*6+0=41>3222", "<>3222"]
    assert reward(right, ["3222"] * 4) == [1.0] * 4
    assert [completion for completion in WRONG if reward([completion], ["3222"]) != [0.0]] == []


def test_tokenizer_survives_every_way_to_load_it_and_reads_a_conversation_as_its_text(tmp_path):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

    made = tokenizer()
    made.save_pretrained(tmp_path)
    Qwen2Config().save_pretrained(tmp_path)  # a qwen2 config makes AutoTokenizer rebuild the tokenizer
    folders = [tmp_path, multiplication.base_model_path()]
    loaded = [kind.from_pretrained(f) for kind in (AutoTokenizer, PreTrainedTokenizerFast) for f in folders]
    for encoder in [made, *loaded]:
        assert encoder.get_vocab() == made.get_vocab()
        assert (encoder.eos_token, encoder.pad_token) == (EOS, multiplication.PAD)
        assert encoder.padding_side == "left"
        for p in problems("train", 200):
            for text in (p.prompt + DIRECT + p.answer, p.prompt + p.scratchpad):
                ids = encoder(text + EOS).input_ids
                assert len(ids) == len(text) + 1  # one token per character
                assert encoder.decode(ids) == text + EOS
                assert encoder.decode(ids, skip_special_tokens=True) == text
        batch = encoder(["12*3=", "123*4="], padding=True)
        assert batch.input_ids[0][0] == encoder.pad_token_id
        assert encoder("1\n").input_ids == encoder.convert_tokens_to_ids(["1", "Ċ"])
    encoder = tokenizer()
    chat = encoder.apply_chat_template([{"role": "user", "content": "537*6="}], add_generation_prompt=True)
    assert chat.input_ids == encoder("537*6=").input_ids
    longest = max(len(encoder(p.scratchpad + EOS).input_ids) for p in problems("train", 6480))
    assert longest == 33 <= multiplication.MAX_COMPLETION_LENGTH


@pytest.mark.slow
def test_the_task_alone_loads_no_framework():
    code = "import sys, bandpo_lab.tasks.multiplication; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(shown.stdout.split())
    assert "bandpo_lab.tasks.multiplication" in loaded
    assert not loaded & {"transformers", "datasets", "trl"}
