"""Clip rules in NeMo-RL: its own loss, with the bounds of the batch in place of ``ratio_clip_min`` and ``_max``.

In a copy of NeMo-RL's ``examples/run_grpo.py``, put ``BandPGLossFn(config.loss_fn, "Band(KL(), 0.05)")`` in place of
the ``loss_fn`` that ``setup()`` returns. bandpo, and this file, must be importable in the workers' environments too.

The method is a clip rule, or a method that is PPO's surrogate on other bounds, with or without a dual clip. NeMo-RL's
KL term, importance-sampling correction, average and metrics stay as they are; settings under which it would compute
another loss are refused. ``record``, if given, is the folder to which the tokens of every loss are written, see
`bandpo.Recorder`, with the prompts. NeMo-RL tells its loss neither step nor reward, nor which answers were cut off or
with which weights they were sampled; its own ``train_data_step….jsonl`` hold the rewards.

Anchor: the trainer's own log-probabilities, ``prev_logprobs``.

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
        ValueError: ``method`` cannot be read, it is more than bounds, or a setting makes NeMo-RL's loss another one. On
            a batch: a counted old log-probability is NaN or above 0.
    """

    def __init__(self, cfg: Any, method: str | None = None, record: str | None = None, **options: Any):
        average = "token-mean" if cfg.token_level_loss else "seq-mean-token-mean"
        read = read_bounds("", method, aggregation=average, dual_clip=True)
        check_settings("NeMo-RL", cfg, read)
        super().__init__(cfg, **options)
        self._method = read
        self._rule = read.clip
        self._folder = record
        if not read.only_rule:
            self.ratio_clip_c = dual_clip_of(read)

    def __call__(self, next_token_logprobs: Any, data: Any, *counts: Any, **named: Any) -> Any:
        # NeMo-RL aligns tokens with the logits after them: it cuts the first column off.
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        bounds = epsilons(self._rule, data["prev_logprobs"][:, 1:], mask)
        self.ratio_clip_min, self.ratio_clip_max = bounds.low, bounds.high
        self._record(next_token_logprobs, data, mask)
        data = {**data, "prev_logprobs": torch.nn.functional.pad(bounds.logp_old, (1, 0))}
        return super().__call__(next_token_logprobs, data, *counts, **named)

    def _record(self, logp: Any, data: Any, mask: Any) -> None:
        """Write a micro-batch to the record."""
        if not self._folder:
            return
        columns: dict[str, Any] = {}
        if "input_ids" in data:
            ids = data["input_ids"]
            starts = data["token_mask"].int().argmax(1).tolist()
            columns["tokens"] = ids[:, 1:]
            columns["prompts"] = [row[:start] for row, start in zip(ids, starts, strict=True)]
        record(
            self._folder,
            "nemo-rl",
            self._method,
            logp,
            data["prev_logprobs"][:, 1:],
            data["advantages"][:, 1:],
            mask,
            logp_rollout=data["generation_logprobs"][:, 1:],
            **columns,
        )
