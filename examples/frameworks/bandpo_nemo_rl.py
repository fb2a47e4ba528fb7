"""Clip rules in NeMo-RL: its own loss, with bounds per token in place of ``ratio_clip_min`` and ``ratio_clip_max``.

In a copy of NeMo-RL's ``examples/run_grpo.py``, replace the ``loss_fn`` that ``setup()`` returns by
``BandPGLossFn(config.loss_fn, "Band(KL(), 0.05)")``. bandpo, and this file, must be importable in the workers'
environments too.

The method is a clip rule, or a method that is PPO's surrogate with other bounds, with or without a dual clip. NeMo-RL's
KL term, importance-sampling correction, loss aggregation and metrics are unchanged. Settings under which it would
compute another loss raise an error.

With ``record`` the tokens of every loss and their prompts are written to a folder, see `bandpo.audit.Recorder`. NeMo-RL
does not pass step, rewards, truncation flags or the version of the weights to its loss; its own
``train_data_step….jsonl`` have the rewards.

The old log-probabilities are the trainer's own, ``prev_logprobs``.

Written for NeMo-RL 0.6.0 (commit 7ea279a).
"""

from __future__ import annotations

from typing import Any

import torch
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossFn

from bandpo.integrations import check_settings, dual_clip_of, epsilons, read_bounds, record


class BandPGLossFn(ClippedPGLossFn):
    """NeMo-RL's `ClippedPGLossFn` with a clip rule.

    Args:
        cfg: NeMo-RL's ``loss_fn`` settings.
        method: A clip rule or a method in its text form; ``Band(KL(), 0.05)`` by default.
        record: Folder to which the tokens of every loss are written.
        **options: As for `ClippedPGLossFn`.

    Raises:
        ValueError: ``method`` cannot be read, it is not PPO's surrogate, or a setting of NeMo-RL would change the loss.
            On a batch: an old log-probability is NaN or above 0.
    """

    def __init__(self, cfg: Any, method: str | None = None, record: str | None = None, **options: Any):
        aggregation = "token-mean" if cfg.token_level_loss else "seq-mean-token-mean"
        bounds_method = read_bounds("", method, aggregation=aggregation, dual_clip=True)
        check_settings("NeMo-RL", cfg, bounds_method)
        super().__init__(cfg, **options)
        self._method = bounds_method
        self._record_folder = record
        if not bounds_method.only_rule:
            self.ratio_clip_c = dual_clip_of(bounds_method)

    def __call__(self, next_token_logprobs: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        # The tensors of a batch have a first column for the first token, which has no log-probability.
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        bounds = epsilons(self._method.clip, data["prev_logprobs"][:, 1:], mask)
        self.ratio_clip_min = bounds.low
        self.ratio_clip_max = bounds.high
        self._record(next_token_logprobs, data, mask)
        data = {**data, "prev_logprobs": torch.nn.functional.pad(bounds.logp_old, (1, 0))}
        return super().__call__(next_token_logprobs, data, *args, **kwargs)

    def _record(self, logp: Any, data: Any, mask: Any) -> None:
        """Write a micro-batch to the record."""
        if not self._record_folder:
            return
        columns: dict[str, Any] = {}
        if "input_ids" in data:
            ids = data["input_ids"]
            prompt_lengths = data["token_mask"].int().argmax(1).tolist()
            columns["tokens"] = ids[:, 1:]
            columns["prompts"] = [row[:length] for row, length in zip(ids, prompt_lengths, strict=True)]
        record(
            self._record_folder,
            "nemo-rl",
            self._method,
            logp,
            data["prev_logprobs"][:, 1:],
            data["advantages"][:, 1:],
            mask,
            logp_rollout=data["generation_logprobs"][:, 1:],
            **columns,
        )
