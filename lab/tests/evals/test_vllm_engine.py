"""The vLLM generator against a stand-in: vLLM itself needs an accelerator and is not run here."""

from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

import byte_model
from bandpo_lab.evals.generate import Completion, Sampling, prompt_ids
from bandpo_lab.evals.vllm_engine import VLLMSampler
from stand_ins import stand_in


@pytest.fixture
def calls(monkeypatch):
    calls = []

    class LLM:
        def __init__(self, model, seed, generation_config):
            calls.append((model, seed, generation_config))

        def get_tokenizer(self):
            return byte_model.tokenizer()

        def generate(self, prompts, sampling_params, use_tqdm):
            calls.append(list(zip(prompts, sampling_params, strict=True)))
            ended = {"finish_reason": "length", "token_ids": [1, 2]}
            texts = (SimpleNamespace(text=f"{p.seed}", **ended) for p in sampling_params)
            return [SimpleNamespace(outputs=[text]) for text in texts]

    stand_in(monkeypatch, "vllm", LLM=LLM, SamplingParams=SimpleNamespace)
    return calls


def test_only_missing_positions_are_drawn_each_with_its_seed(calls):
    sampling = Sampling(9, 0.7, 0.8, seed=4)
    generator = VLLMSampler("m", sampling, batch_size=2)
    assert calls.pop() == ("m", 4, "vllm")
    got = dict(generator.stream(["a", "b", "c", [{"role": "user", "content": "d"}]], [3, 0, 1]))
    assert got == {i: Completion(str(sampling.seed_of(i)), "length", 2) for i in (0, 1, 3)}
    assert [len(batch) for batch in calls] == [2, 1]
    prompt, params = calls[1][0]
    assert prompt == {"prompt_token_ids": prompt_ids(byte_model.tokenizer(), "d\n")}
    assert (params.max_tokens, params.temperature, params.top_p) == (9, 0.7, 0.8)
    generator = VLLMSampler("m", Sampling(9), chat_template="{{ messages[0]['content'] }}!")
    list(generator.stream([[{"role": "user", "content": "d"}]], [0]))
    assert calls[-1][0][0] == {"prompt_token_ids": prompt_ids(byte_model.tokenizer(), "d!")}
