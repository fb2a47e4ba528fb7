import json
import math
import re

import pytest
import torch

from bandpo_lab.tasks.multiplication import DIRECT, SCRATCHPAD, base_model_path, problems
from studies import base_model
from studies.base_model import CARD, WarmUp, main, measure, scratchpad_probability, warm_up

TINY = {"steps": 2}


@pytest.fixture(scope="module")
def shipped():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = base_model_path()
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def card():
    return json.loads((base_model_path() / CARD).read_text())


def test_shipped_model_is_stock_qwen2_in_small_files_without_pickle(shipped):
    files = list(base_model_path().iterdir())
    assert sum(file.stat().st_size for file in files) <= 2 * 2**20
    assert {file.suffix for file in files} == {".safetensors", ".json", ".jinja"}
    model, encoder = shipped
    assert type(model).__module__ == "transformers.models.qwen2.modeling_qwen2"
    assert model.dtype == torch.float32
    assert 330_000 < model.num_parameters() < 340_000
    assert model.generation_config.eos_token_id == encoder.eos_token_id
    assert model.generation_config.pad_token_id == encoder.pad_token_id


def test_scratchpad_probability_is_the_share_of_samples(shipped):
    model, encoder = shipped
    problem = problems("eval", 1)
    expected = scratchpad_probability(model, encoder, problem).item()
    prompt = encoder([problem[0].prompt] * 2_000, return_tensors="pt")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = model.generate(**prompt, do_sample=True, top_k=0, max_new_tokens=1)[:, -1]
    share = (first == encoder.get_vocab()[SCRATCHPAD]).double().mean().item()
    assert share == pytest.approx(expected, abs=4 * math.sqrt(expected / 2_000))
    assert (first == encoder.get_vocab()[DIRECT]).double().mean().item() > 0.97


def test_card_agrees_with_the_shipped_model_and_with_a_fresh_measurement(shipped, card):
    asked, samples = 64, 4
    fresh, stated = measure(*shipped, samples=samples, seed=1), card["measured"]
    for name in ("direct_accuracy", "scratchpad_accuracy", "mean@32"):
        rate = stated[name]
        tolerance = 4 * math.sqrt(rate * (1 - rate) / (asked * samples))
        assert fresh[name.replace("@32", f"@{samples}")] == pytest.approx(rate, abs=tolerance), name
    assert fresh["tail"] == pytest.approx(stated["tail"], rel=1e-3)
    assert stated["scratchpad_accuracy"] > 0.95
    assert 0.03 < stated["direct_accuracy"] < 0.07
    assert stated["pass@32"] > stated["mean@32"] > 0.05
    held_out = problems("eval", 720)
    tail = scratchpad_probability(*shipped, held_out)
    assert tail.shape == (720,)
    assert card["settings"]["tail"] == 0.02
    assert tail.mean().item() == pytest.approx(0.02, rel=0.1)
    assert tail.mean().item() == pytest.approx(card["measured"]["tail"], rel=1e-3)
    assert 0.01 < tail.min() < tail.max() < 0.04  # rare for every problem


@pytest.mark.exhaustive
@pytest.mark.parametrize("changes", [{}, {"tail": 0.002}], ids=str)
def test_the_script_makes_such_a_model_again(shipped, card, changes):
    # Within bounds, not bit for bit: another processor rounds differently, and training amplifies that.
    made_with = WarmUp(**{"tail": card["settings"]["tail"]} | changes)
    measured = measure(warm_up(made_with, progress=False), shipped[1])
    assert measured["tail"] == pytest.approx(made_with.tail, rel=0.1)
    assert measured["scratchpad_accuracy"] > 0.9
    assert 0.01 < measured["direct_accuracy"] < 0.1


def test_same_settings_same_bits_and_the_callers_randomness_untouched():
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first, second, other = (warm_up(WarmUp(seed=s, **TINY), progress=False).state_dict() for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tail", "0"], "tail=0.0: choose a probability between 0 and 1"),
        (["--tail", "nan"], "tail=nan"),
        (["--steps", "0"], "steps=0: choose at least 1"),
    ],
)
def test_bad_flags_and_used_folders_are_refused_before_any_work(flags, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([*flags, "--output_dir", str(tmp_path / "new")])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    (tmp_path / "precious").touch()
    for used in (tmp_path, tmp_path / "precious"):
        with pytest.raises(SystemExit):
            main(["--output_dir", str(used)])
        assert str(used) in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_writes_the_same_loadable_folder_each_time(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(base_model, "_SAMPLING", {**base_model._SAMPLING, "max_new_tokens": 2})
    flags = ["--tail", "0.1", "--seed", "3", "--steps", "2"]
    for folder in ("a", "b"):
        main([*flags, "--output_dir", str(tmp_path / folder)])
    shown = capsys.readouterr().out
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    assert {f.name for f in (tmp_path / "a").iterdir()} == {f.name for f in base_model_path().iterdir()}
    written = json.loads((tmp_path / "a" / CARD).read_text())
    assert written["settings"] == {**vars(WarmUp()), "tail": 0.1, "seed": 3, **TINY}
    for name, figure in written["measured"].items():
        assert re.search(rf"{re.escape(name)} +{figure:.4f}", shown)
