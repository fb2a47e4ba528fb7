"""What the trainer says of a method beside TRL's settings: of how tokens are sampled, and in the model card."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bandpo.integrations._trl_config import BandGRPOConfig
from bandpo.methods import METHODS

WHOLE_VOCABULARY: Mapping[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
"""Settings of sampling that change the probabilities of tokens, with the values at which they do not."""
SAME = {"top_p": (None,), "top_k": (None, -1), "min_p": (0, 0.0), "repetition_penalty": (None,)}
"""Other values at which they do not."""


def sampling_settings(args: Any) -> dict[str, Any]:
    """Return the settings of sampling that probabilities depend on, with what ``generation_kwargs`` changes in them.

    Args:
        args: A ``GRPOConfig``.
    """
    names = ("temperature", *WHOLE_VOCABULARY)
    settings = {name: getattr(args, name) for name in names}
    further = args.generation_kwargs or {}
    return settings | {name: value for name, value in further.items() if name in names}


def restrictions(args: Any) -> dict[str, Any]:
    """Return the settings by which tokens are sampled from other probabilities than the temperature alone gives."""
    settings = sampling_settings(args)
    return {
        name: settings[name]
        for name, neutral in WHOLE_VOCABULARY.items()
        if settings[name] != neutral and settings[name] not in SAME[name]
    }


def sampling_lines(args: BandGRPOConfig, rollout_setting: str, use_vllm: bool) -> list[str]:
    """Return lines that say what the probabilities of a method are, where sampling makes a difference.

    Args:
        args: The settings.
        rollout_setting: The setting by which the method refers to the rollout's log-probabilities; empty if it
            refers to the trainer's.
        use_vllm: Whether vLLM samples, and not a ``rollout_func``.
    """
    lines: list[str] = []
    restricting = ", ".join(f"{name}={value}" for name, value in restrictions(args).items())
    temperature = sampling_settings(args)["temperature"]
    of_trainer = f"at temperature={temperature:g} over the whole vocabulary"
    if temperature != args.temperature:
        lines.append(
            f"generation_kwargs samples at temperature={temperature:g}, but the trainer's probabilities are at "
            f"temperature={args.temperature:g}: set temperature={temperature:g}"
        )
    elif rollout_setting and restricting:
        engine = "vLLM's are those after" if use_vllm else "if rollout_func returns those after"
        lines.append(
            f"{rollout_setting} compares the trainer's probabilities, {of_trainer}, with the rollout's; {engine} "
            f"{restricting}, so ratios are not 1 before the first update, and bounds surround probabilities of the "
            "tokens that are left; sample with " + _neutral(args)
        )
    elif rollout_setting and temperature != 1:
        source = "vLLM's are" if use_vllm else "rollout_func must return them"
        lines.append(
            f"{rollout_setting} compares the trainer's probabilities, {of_trainer}, with the rollout's; {source} at "
            "the same temperature"
        )
    elif restricting:
        lines.append(
            f"tokens are sampled with {restricting}, but the probabilities in ratios and bounds are the trainer's, "
            f"{of_trainer}; sample with {_neutral(args)} for one policy"
        )
    return lines


def _neutral(args: Any) -> str:
    return ", ".join(f"{name}={WHOLE_VOCABULARY[name]}" for name in restrictions(args))


def card_entries(args: BandGRPOConfig) -> tuple[str, dict[str, str]]:
    """Return the name of the method for a model card, and its paper as TRL's trainers describe one.

    Args:
        args: The settings; their method is text, which is quoted and never interpreted as Markdown.
    """
    text = str(args.method)
    name = _code_span(text)
    called = re.match(r"\w*", text)
    called = called.group() if called else ""
    is_whole = called in METHODS
    if not is_whole or args.other_average:
        name = f"{name} (loss_type {args.loss_type}, ratios per {args.importance_sampling_level})"
    source = METHODS[called].source if is_whole else ""
    if not source:
        return name, {}
    url = f"https://arxiv.org/abs/{source}"
    citation = (
        f"@misc{{{called},\n  eprint = {{{source}}},\n  archivePrefix = {{arXiv}},\n  url = {{{url}}}\n}}"
    )
    return name, {"title": f"arXiv {source}", "id": source, "citation": citation}


def _code_span(text: str) -> str:
    """Quote text for Markdown, as code in one line."""
    line = " ".join(text.split())
    runs = [len(run) for run in re.findall("`+", line)]
    if not runs:
        return f"`{line}`"
    fence = "`" * (max(runs) + 1)
    return f"{fence} {line} {fence}"
