"""Texts of the trainer about its method: warnings about the sampling settings, and the model card."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bandpo.core.methods import METHODS
from bandpo.integrations.trl.config import BandGRPOConfig

NEUTRAL: Mapping[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
"""Sampling settings that change the probabilities of tokens, each with its neutral value."""
ALSO_NEUTRAL = {"top_p": (None,), "top_k": (None, -1), "min_p": (0, 0.0), "repetition_penalty": (None,)}
"""Further neutral values of these settings."""


def sampling_settings(args: Any) -> dict[str, Any]:
    """Return the sampling settings that change token probabilities, including those in ``generation_kwargs``.

    Args:
        args: A config of TRL's GRPOTrainer or AsyncGRPOTrainer.
    """
    names = ("temperature", *NEUTRAL)
    settings = {name: getattr(args, name) for name in names}
    generation_kwargs = getattr(args, "generation_kwargs", None) or {}
    return settings | {name: value for name, value in generation_kwargs.items() if name in names}


def restrictions(args: Any) -> dict[str, Any]:
    """Return the sampling settings, other than the temperature, that are not neutral."""
    settings = sampling_settings(args)
    return {
        name: settings[name]
        for name, neutral in NEUTRAL.items()
        if settings[name] != neutral and settings[name] not in ALSO_NEUTRAL[name]
    }


def sampling_lines(args: BandGRPOConfig, rollout_setting: str, use_vllm: bool) -> list[str]:
    """Return a warning if tokens are sampled from other probabilities than those in the ratios.

    Args:
        args: The settings.
        rollout_setting: The setting by which the method refers to the rollout's log-probabilities; empty if it
            refers to the trainer's.
        use_vllm: True if vLLM generates, False if a ``rollout_func`` does.

    Returns:
        A list with one line, or an empty list.
    """
    changed = ", ".join(f"{name}={value}" for name, value in restrictions(args).items())
    neutral = ", ".join(f"{name}={NEUTRAL[name]}" for name in restrictions(args))
    temperature = sampling_settings(args)["temperature"]
    of_trainer = f"at temperature={temperature:g} over the whole vocabulary"

    if temperature != args.temperature:
        return [
            f"generation_kwargs samples at temperature={temperature:g}, but the trainer's probabilities are at "
            f"temperature={args.temperature:g}: set temperature={temperature:g}"
        ]
    if rollout_setting and changed:
        engine = "vLLM's are those after" if use_vllm else "if rollout_func returns those after"
        return [
            f"{rollout_setting} compares the trainer's probabilities, {of_trainer}, with the rollout's; {engine} "
            f"{changed}, so ratios are not 1 before the first update, and bounds surround probabilities of the "
            f"tokens that are left; sample with {neutral}"
        ]
    if rollout_setting and temperature != 1:
        source = "vLLM's are" if use_vllm else "rollout_func must return them"
        return [
            f"{rollout_setting} compares the trainer's probabilities, {of_trainer}, with the rollout's; {source} at "
            "the same temperature"
        ]
    if changed:
        return [
            f"tokens are sampled with {changed}, but the probabilities in ratios and bounds are the trainer's, "
            f"{of_trainer}; sample with {neutral} for one policy"
        ]
    return []


OF_BANDPO = {"BandAbove": "a combination of bandpo's own, whose upper bound is that of BandPO in"}
"""Methods that the paper of their source does not have, with what they have of it."""


def card_entries(args: Any) -> tuple[str, dict[str, str]]:
    """Return the method's name for a model card, and its paper in the form of TRL's ``_paper``.

    Args:
        args: A config of bandpo. The text of its method is quoted, so that it is never interpreted as Markdown.
    """
    text = str(args.method)
    match = re.match(r"\w*", text)
    class_name = match.group() if match else ""
    is_whole_method = class_name in METHODS

    name = _code_span(text)
    if not is_whole_method or args.overrides_aggregation:
        name = f"{name} ({args.settings_on_card})"

    arxiv_id = METHODS[class_name].source if is_whole_method else ""
    if class_name in OF_BANDPO:
        return f"{name}, {OF_BANDPO[class_name]} [arXiv {arxiv_id}](https://arxiv.org/abs/{arxiv_id})", {}
    if not arxiv_id:
        return name, {}
    lines = [
        f"@misc{{{class_name},",
        f"  eprint = {{{arxiv_id}}},",
        "  archivePrefix = {arXiv},",
        f"  url = {{https://arxiv.org/abs/{arxiv_id}}}",
        "}",
    ]
    return name, {"title": f"arXiv {arxiv_id}", "id": arxiv_id, "citation": "\n".join(lines)}


def _code_span(text: str) -> str:
    """Return text as an inline code span of Markdown."""
    line = " ".join(text.split())
    backticks = re.findall("`+", line)
    if not backticks:
        return f"`{line}`"
    # A code span that contains backticks needs a longer fence than any run of them.
    fence = "`" * (max(map(len, backticks)) + 1)
    return f"{fence} {line} {fence}"
