"""Generate responses to sums with vLLM, and compare its log-probabilities with those of transformers.

    python scripts/generate.py                  # vLLM on one GPU: 32 prompts × 8 responses of at most 256 tokens
    python scripts/generate.py --rehearse       # transformers on a CPU in place of vLLM, with fewer and shorter ones

Prints one line of JSON: times in seconds, tokens per second, the difference of the log-probabilities in nats, the share
of right answers, and the GPU memory in GiB.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bandpo_lab.errors import MissingPackage
from bandpo_lab.evals.grading import grade
from bandpo_lab.models.embedded import model_path
from bandpo_lab.tasks.sums import problems

COMPARED = 8
"""The number of responses whose log-probabilities are compared."""


@dataclass(frozen=True)
class Response:
    """A response: the tokens of its prompt, its own tokens, the engine's log-probability of each (nats), its text."""

    prompt: list[int]
    tokens: list[int]
    logps: list[float]
    text: str


def with_vllm(
    path: str, chats: list[Any], samples: int, tokens: int
) -> tuple[list[list[Response]], float, float]:
    """Generate with vLLM; return the responses to each prompt, and the seconds of the start and of the generation."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    start = time.monotonic()
    settings = {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 512,
        "gpu_memory_utilization": 0.25,
    }
    engine = LLM(path, logprobs_mode="processed_logprobs", seed=0, **settings)
    sampling = SamplingParams(n=samples, temperature=1.0, max_tokens=tokens, logprobs=0)
    engine.chat(chats[:1], sampling, use_tqdm=False)
    started = time.monotonic()
    outputs = engine.chat(chats, sampling, use_tqdm=False)
    ended = time.monotonic()
    groups = []
    for output in outputs:
        group = []
        for answer in output.outputs:
            ids = list(answer.token_ids)
            logps = [table[token].logprob for table, token in zip(answer.logprobs, ids, strict=True)]
            group.append(Response(list(output.prompt_token_ids), ids, logps, answer.text))
        groups.append(group)
    return groups, started - start, ended - started


def with_transformers(
    path: str, chats: list[Any], samples: int, tokens: int
) -> tuple[list[list[Response]], float, float]:
    """Generate with transformers on a CPU, in place of vLLM; return the same as `with_vllm`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    start = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    started = time.monotonic()
    torch.manual_seed(0)
    groups = []
    for chat in chats:
        inputs = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        length = inputs["input_ids"].shape[1]
        settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": tokens}
        output = model.generate(
            **inputs,
            **settings,
            num_return_sequences=samples,
            output_scores=True,
            return_dict_in_generate=True,
        )
        logps = model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
        group = []
        for row, values in zip(output.sequences[:, length:].tolist(), logps.tolist(), strict=True):
            count = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            text = tokenizer.decode(row[:count], skip_special_tokens=True)
            group.append(Response(inputs["input_ids"][0].tolist(), row[:count], values[:count], text))
        groups.append(group)
    return groups, started - start, time.monotonic() - started


def differences(path: str, responses: list[Response], device: str) -> list[float]:
    """Return |log-probability of the engine − that of transformers| for each token of some responses, in nats."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model = model.to(device).eval()
    result: list[float] = []
    for response in responses:
        ids = torch.tensor([[*response.prompt, *response.tokens]], device=device)
        first = len(response.prompt)
        with torch.no_grad():
            logps = model(ids).logits[0, first - 1 : -1].float().log_softmax(-1)
        of_tokens = logps.gather(1, ids[0, first:, None])[:, 0].tolist()
        result += [abs(a - b) for a, b in zip(of_tokens, response.logps, strict=True)]
    return result


def main(arguments: list[str] | None = None) -> None:
    """Generate, compare and print the row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="A folder, or smollm2.")
    parser.add_argument("--rehearse", action="store_true", help="Use transformers on this machine's CPU.")
    parser.add_argument("--row", type=Path, help="A file for the row, besides the output.")
    options = parser.parse_args(arguments)
    if not options.rehearse and importlib.util.find_spec("vllm") is None:
        raise MissingPackage("vLLM is not installed: pip install vllm==0.24.0, or --rehearse on a CPU")
    import torch

    if not options.rehearse and not torch.cuda.is_available():
        raise MissingPackage(
            f"torch {torch.__version__} sees no GPU: check nvidia-smi, or --rehearse on a CPU"
        )
    prompts, samples, tokens = (2, 2, 8) if options.rehearse else (32, 8, 256)
    sums = problems("train", prompts)
    chats = [[{"role": "user", "content": problem.prompt}] for problem in sums]
    path = model_path(options.model)
    generate = with_transformers if options.rehearse else with_vllm
    groups, start, seconds = generate(path, chats, samples, tokens)
    device = "cpu" if options.rehearse else "cuda"
    gaps = differences(path, [group[0] for group in groups[:COMPARED]], device)
    scores = []
    for problem, group in zip(sums, groups, strict=True):
        scores += [grade(response.text, problem.answer, problem=problem.prompt).score for response in group]
    count = sum(len(response.tokens) for group in groups for response in group)
    row = {
        "start_s": start,
        "generate_s": seconds,
        "tokens": count,
        "tokens_per_s": count / seconds,
        "logp_gap_mean": fmean(gaps),
        "logp_gap_max": max(gaps),
        "reward": fmean(scores),
        "gpu_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0,
    }
    print(json.dumps(row))
    if options.row:
        options.row.write_text(json.dumps(row))


if __name__ == "__main__":
    try:
        main()
    except MissingPackage as error:
        sys.exit(str(error))
