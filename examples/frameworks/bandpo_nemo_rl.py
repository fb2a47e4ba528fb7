"""Clip rules in NeMo-RL: its own loss, with bounds per token in place of ``ratio_clip_min`` and ``ratio_clip_max``.

In a copy of NeMo-RL's ``examples/run_grpo.py``, replace the ``loss_fn`` that ``setup()`` returns by
``BandPGLossFn(config.loss_fn, "Band(KL(), 0.05)", config=config)``. bandpo, and this file, must be importable in the
workers' environments too.

The method is a clip rule, or a method that is PPO's surrogate with other bounds, with or without a dual clip. NeMo-RL's
KL term, importance-sampling correction, loss aggregation and metrics are unchanged. Settings under which it would
compute another loss raise an error.

With ``record`` the tokens of every loss and their prompts are written to a folder, see `bandpo.audit.Recorder`. NeMo-RL
does not pass step, rewards, truncation flags or the version of the weights to its loss; its own
``train_data_step….jsonl`` have the rewards.

The old log-probabilities are the trainer's own before the first update on a batch, ``prev_logprobs``, or with
``Method(…, old_policy='rollout')`` the sampler's, ``generation_logprobs``, as ``grpo.async_grpo`` needs. NeMo-RL's
importance weights are then 1. With the trainer's own and one update for each batch every ratio is 1, and no clip acts:
with ``config`` this raises an error.

Written for NeMo-RL 0.6.0 (commit 7ea279a).
"""

from __future__ import annotations

from typing import Any

import torch
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossFn

from bandpo import Method
from bandpo.integrations import check_anchor, check_settings, dual_clip_of, epsilons, read_bounds, record


def _check_anchor(method: Method, config: Any, accepted: bool) -> None:
    """Check that ratios can differ from 1, and print the log-probabilities that they refer to."""
    grpo = config.grpo
    responses = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    lines = check_anchor(
        method,
        responses // config.policy.train_global_batch_size,
        sampler=method.old_policy == "rollout",
        setting=f"method={method!r}",
        asynchronous=bool(grpo.async_grpo and grpo.async_grpo.enabled),
        to_sampler="write the method as Method(..., old_policy='rollout')",
        more_updates="set policy.train_global_batch_size below the number of responses of a step",
        accepted=accepted,
        accept="accept_idle_clip=True",
    )
    print(*[f"bandpo: {line}" for line in lines], sep="\n", flush=True)


class BandPGLossFn(ClippedPGLossFn):
    """NeMo-RL's `ClippedPGLossFn` with a clip rule.

    Args:
        cfg: NeMo-RL's ``loss_fn`` settings.
        method: A clip rule or a method in its text form; ``Band(KL(), 0.05)`` by default.
        record: Folder to which the tokens of every loss are written.
        config: All of NeMo-RL's settings, for the check that ratios can differ from 1. It is not made without them.
        accept_idle_clip: True to accept a run in which every ratio is 1, as the baseline of a sweep.
        **options: As for `ClippedPGLossFn`.

    Raises:
        ValueError: ``method`` cannot be read, it is not PPO's surrogate, every ratio would be 1, or a setting of
            NeMo-RL would change the loss. On a batch: an old log-probability is NaN or above 0.
    """

    def __init__(
        self,
        cfg: Any,
        method: str | None = None,
        record: str | None = None,
        *,
        config: Any = None,
        accept_idle_clip: bool = False,
        **options: Any,
    ):
        aggregation = "token-mean" if cfg.token_level_loss else "seq-mean-token-mean"
        bounds_method = read_bounds("", method, aggregation=aggregation, dual_clip=True)
        check_settings("NeMo-RL", cfg, bounds_method)
        if config is not None:
            _check_anchor(bounds_method, config, accept_idle_clip)
        super().__init__(cfg, **options)
        self._method = bounds_method
        self._record_folder = record
        self._old = "generation_logprobs" if bounds_method.old_policy == "rollout" else "prev_logprobs"
        if not bounds_method.only_rule:
            self.ratio_clip_c = dual_clip_of(bounds_method)

    def __call__(self, next_token_logprobs: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        # The tensors of a batch have a first column for the first token, which has no log-probability.
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        bounds = epsilons(self._method.clip, data[self._old][:, 1:], mask)
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
            data[self._old][:, 1:],
            data["advantages"][:, 1:],
            mask,
            logp_rollout=data["generation_logprobs"][:, 1:],
            old_is_rollout=self._old == "generation_logprobs",
            **columns,
        )
