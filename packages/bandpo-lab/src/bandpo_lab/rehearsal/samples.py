"""The responses of a rehearsal's sampler, and their log-probabilities under the weights of any version.

The version of weights is the number that verl gives them when it sends them to the sampler.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bandpo_lab.rehearsal.files import SAMPLES, WEIGHTS
from rlvet.runs.files import read_jsonl


@dataclass(frozen=True)
class Sample:
    """A response, as the sampler recorded it."""

    version: int
    """The version of the weights that sampled."""
    prompt: Sequence[int]
    response: Sequence[int]
    temperature: float
    """The temperature at which the log-probabilities are computed."""
    log_probs: Sequence[float]
    """The sampler's log-probability of each token of the response."""


def read_samples(folder: Path, runs: Sequence[str] = ("first", "resumed")) -> list[Sample]:
    """Return the samples of some runs of a rehearsal, in their order."""
    paths = [folder / SAMPLES.format(run) for run in runs]
    return [Sample(**row) for path in paths if path.exists() for _, row in read_jsonl(path)]


def log_probs(model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float) -> Tensor:
    """Compute the log-probability of each token of a response, of shape (tokens,)."""
    sequence = torch.tensor([[*prompt, *response]])
    logits = model(sequence).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


class Versions:
    """The sampler's weights of each version, which compute log-probabilities again after the run.

    Args:
        folder: The folder of the rehearsal, with the model and with the weights that the sampler received.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    @functools.cached_property
    def _model(self) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        hf_config = AutoConfig.from_pretrained(self._folder / "model")
        return AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32).eval()

    def score(self, version: int, samples: Sequence[Sample]) -> list[list[float]]:
        """Compute the log-probabilities of samples under one version.

        Returns:
            The log-probabilities of each sample; empty if the sampler never received this version.
        """
        path = self._folder / WEIGHTS.format(version)
        if not path.exists():
            return []
        self._model.load_state_dict(torch.load(path), strict=False)
        with torch.inference_mode():
            return [log_probs(self._model, s.prompt, s.response, s.temperature).tolist() for s in samples]
