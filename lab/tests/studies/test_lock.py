import json
from itertools import product

import pytest
import torch
from warm_ups import assert_refused, assert_same_bits

from bandpo_lab.tasks.multiplication import EOS, tokenizer
from studies import lock
from studies.base_model import CARD
from studies.lock import WarmUp, code, dataset, keys, main, measure, reward, warm_up

TINY = {"steps": 2, "batch_size": 4}


def test_every_key_is_in_one_split():
    train, held_out = keys("train", 9000), keys("eval", 1000)
    assert sorted(train + held_out) == ["".join(digits) for digits in product("0123456789", repeat=4)]


def test_held_out_keys_are_spread_over_all_digits():
    for place in range(4):
        counts = [sum(key[place] == digit for key in keys("eval", 1000)) for digit in "0123456789"]
        assert all(70 < count < 130 for count in counts)  # 100 ± 3 standard deviations of a random split


def test_the_seed_draws_the_keys_and_not_the_splits():
    assert keys("train", 50, seed=1) == keys("train", 50, seed=1)
    assert keys("train", 50, seed=1) != keys("train", 50, seed=2)
    assert not set(keys("train", 9000, seed=1)) & set(keys("eval", 1000, seed=2))


@pytest.mark.parametrize(
    ("split", "n", "message"),
    [
        ("test", 1, "split='test': choose one of train, eval"),
        ("eval", 1001, "n=1001: choose 0 to 1000, the keys of the eval split"),
        ("train", 9001, "n=9001: choose 0 to 9000"),
        ("train", -1, "n=-1"),
    ],
)
def test_keys_that_are_not_there_are_refused(split, n, message):
    with pytest.raises(ValueError, match=message):
        keys(split, n)


def test_a_code_opens_its_own_lock_alone():
    codes = [code(key) for key in keys("eval", 1000)]
    assert len(set(codes)) == 1000
    assert reward(codes, codes) == [1.0] * 1000
    assert reward(codes[1:], codes[:-1]) == [0.0] * 999


@pytest.mark.parametrize("completion", ["", "730", "73044", "7304 ", " 7304", "7305", "4071=7304"])
def test_nothing_but_the_whole_code_is_rewarded(completion):
    assert reward([completion], [code("4071")]) == [0.0]


def test_a_row_is_a_prompt_and_its_answer():
    rows = dataset("eval", 20)
    assert rows["prompt"] == [f"{key}=" for key in keys("eval", 20)]
    assert reward(rows["answer"], [code(prompt[:4]) for prompt in rows["prompt"]]) == [1.0] * 20
    encoder = tokenizer()
    for prompt, answer in zip(rows["prompt"], rows["answer"], strict=True):
        assert len(encoder(prompt + answer + EOS).input_ids) == 4 + 1 + 4 + 1  # one token a sign


class Guesses(torch.nn.Module):
    """Takes the right digit with a probability of 0.4 at each place, and ends there with one of 0.9."""

    def forward(self, tokens):
        class Output:
            logits = torch.full((*tokens.shape, len(tokenizer())), -torch.inf)

        p = torch.full(tokens.shape, 0.4).index_fill(1, torch.tensor([tokens.shape[1] - 1]), 0.9)
        Output.logits[:, :-1].scatter_(-1, tokens[:, 1:, None], p[:, 1:, None].log())
        rest = torch.full((len(tokens), tokens.shape[1] - 1, 1), tokenizer().pad_token_id)
        Output.logits[:, :-1].scatter_(-1, rest, (1 - p[:, 1:, None]).log())
        return Output


def test_measured_is_the_mean_probability_and_its_product():
    measured = measure(Guesses(), 16)
    assert measured["skill"] == pytest.approx(0.4, rel=1e-6)
    assert measured["opens"] == pytest.approx(0.4**4 * 0.9, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("skill", [0.3, 0.6])
def test_the_skill_is_the_one_asked_for(skill):
    measured = measure(warm_up(WarmUp(skill=skill), progress=False))
    assert measured["skill"] == pytest.approx(skill, rel=0.1)
    assert measured["opens"] == pytest.approx(skill**4, rel=0.4)


def test_a_short_warm_up_moves_towards_the_skill():
    """From a guess among all tokens to digits alone, and a code that ends."""
    fresh, short = (measure(warm_up(WarmUp(steps=steps), progress=False), 64) for steps in (1, 60))
    assert fresh["skill"] < 0.06
    assert short["skill"] == pytest.approx(0.1, abs=0.03)  # any of ten digits, before it knows which
    assert short["opens"] > 20 * fresh["opens"]


def test_same_settings_same_bits_and_the_callers_randomness_untouched():
    assert_same_bits(lock, TINY)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--skill", "0.1"], r"skill=0.1: choose a probability above 0.1 (pure guessing) and below 1"),
        (["--skill", "1"], "skill=1.0"),
        (["--skill", "nan"], "skill=nan"),
        (["--steps", "0"], "steps=0: choose at least 1"),
        (["--batch_size", "0"], "batch_size=0: choose at least 1"),
        (["--learning_rate", "0"], "learning_rate=0.0: choose a number above 0"),
        (["--skll", "0.3"], "--skll"),
    ],
)
def test_bad_flags_are_refused_before_any_work(flags, message, tmp_path, capsys):
    assert_refused(lock, flags, message, tmp_path, capsys)


def test_the_command_writes_what_it_measured(tmp_path, capsys):
    main(
        [
            "--skill",
            "0.5",
            "--seed",
            "3",
            "--steps",
            "2",
            "--batch_size",
            "4",
            "--output_dir",
            str(tmp_path / "a"),
        ]
    )
    written = json.loads((tmp_path / "a" / CARD).read_text())
    assert written["made_by"] == "studies.lock"
    assert written["settings"] == {**vars(WarmUp()), "skill": 0.5, "seed": 3, **TINY}
    shown = capsys.readouterr().out
    for name, figure in written["measured"].items():
        assert f"{name:>20} {figure:.4f}" in shown
