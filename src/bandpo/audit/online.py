"""The checks of `bandpo diagnose` while a run trains: each fault is reported once, with the fix, or ends the run."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from bandpo.batch import normalize_mask
from bandpo.doctor.findings import Finding
from bandpo.doctor.first_pass import FirstPass
from bandpo.doctor.log_checks import log_findings
from bandpo.doctor.token_checks import token_findings
from bandpo.errors import InvalidValue, RunProblem
from bandpo.runs import LossBatch, Setup
from bandpo.runs.quantities import Row, named_rows
from bandpo.sequences import unpack

if TYPE_CHECKING:
    from numpy import ndarray as Array
    from torch import Tensor

EVERY = 10
"""Batches from one check to the next. A check costs about as much as a loss of the same tokens without its gradient."""

CHECKED_TOGETHER = 32
"""Batches that are judged together, the newest: their tokens bound the memory."""


class BandWarning(UserWarning):
    """A run that trains, but not as its settings say."""


class Watch:
    """Checks batches and log steps of a run, and reports each fault once.

    >>> watch, logp = Watch(), -torch.ones(4, 6)
    >>> watch.look(logp=logp, logp_old=logp, advantages=torch.tensor([1.0, -1.0, 1.0, -1.0]))
    >>> watch({"entropy": 1.2, "reward": 0.3})

    Args:
        framework: The framework whose settings are named, see `bandpo.runs.setup.SETTINGS`; None for none.
        every: Generated batches from one check to the next, and log steps from one check of their course to another.
        how: ``warn``, or ``stop`` to end the run.
        anchor: As for `bandpo.Recorder`.

    Raises:
        ValueError: if ``how`` is another word.
    """

    def __init__(
        self, framework: str | None = None, *, every: int = EVERY, how: str = "warn", anchor: str = "trainer"
    ):
        if how not in ("warn", "stop"):
            raise InvalidValue(f"how must be 'warn' or 'stop', got {how!r}")
        self._setup = Setup(framework)
        self._every = every
        self._how = how
        self._anchor = anchor
        self._reported: set[str] = set()
        self._batches: deque[LossBatch] = deque(maxlen=CHECKED_TOGETHER)
        self._rows: list[Row] = []

    def look(
        self,
        *,
        logp_old: Tensor,
        advantages: Tensor,
        logp: Tensor | None = None,
        mask: Tensor | None = None,
        logp_rollout: Tensor | None = None,
        entropy: Tensor | None = None,
        tokens: Tensor | None = None,
        group: Sequence[int] | Tensor | None = None,
        reward: Sequence[float] | Tensor | None = None,
        truncated: Sequence[bool] | Tensor | None = None,
        generation: int = 0,
        update: int = 0,
        segments: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> None:
        """Check what a run assumes on sequences of a generated batch, if no update was made on it yet.

        Args:
            logp_old: This, and what is not named here, as for `bandpo.Recorder.add`.
            generation: Batches whose number is no multiple of ``every`` are not checked.

        Raises:
            RuntimeError: if something is wrong, and ``how`` is ``stop``.
        """
        if update or generation % self._every:
            return
        tensors = unpack(
            {
                "logp_old": logp_old,
                "logp": logp,
                "advantages": advantages,
                "mask": mask,
                "logp_rollout": logp_rollout,
                "entropy": entropy,
                "tokens": tokens,
            },
            segments,
            cu_seqlens,
        )
        logp_old, logp, advantages = tensors["logp_old"], tensors["logp"], tensors["advantages"]
        logp_rollout, entropy, tokens = tensors["logp_rollout"], tensors["entropy"], tensors["tokens"]
        counted = normalize_mask(logp_old, tensors["mask"]).cpu() != 0
        old = _at_counted(counted, logp_old)
        new = None if logp is None else _at_counted(counted, logp)
        per_token = advantages.detach().float().cpu()
        if per_token.dim() != 2:
            per_token = per_token[:, None]
        batch = LossBatch(
            location="",
            step=None,
            method=None,
            anchor=self._anchor,
            framework="",
            log_ratio=old * 0 if new is None else new - old,
            logp_old=old,
            advantages=per_token.expand_as(counted).contiguous().numpy(),
            mask=counted.numpy(),
            logp_rollout=None if logp_rollout is None else _at_counted(counted, logp_rollout),
            entropy=None if entropy is None else _at_counted(counted, entropy),
            token=_as_array(tokens),
            generation=generation,
            update=update,
            group=_as_array(group),
            reward=_as_array(reward),
            truncated=_as_array(truncated),
            has_logp=new is not None,
        )
        self._batches.append(batch.without_bad_sequences()[0])
        self._report(token_findings(FirstPass.of(self._batches)))

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Take one log step, and check their course.

        Args:
            row: What is logged, under the framework's own names.
        """
        self._rows += named_rows([{"step": len(self._rows), **row}])
        if self._rows and len(self._rows) % self._every == 0:
            self._report(log_findings(self._rows))

    def _report(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            if finding.ok is not False or finding.code in self._reported:
                continue
            self._reported.add(finding.code)
            codes = " or ".join((finding.code, *finding.or_else))
            text = f"{codes}: {finding.cause}. Try: {self._setup.fill(finding.advice)}"
            if self._how == "stop":
                raise RunProblem(text)
            warnings.warn(text, BandWarning, stacklevel=4)


def _at_counted(counted: Tensor, values: Tensor) -> Array:
    """Return values on the CPU in float32, 0 where a token does not count."""
    return values.detach().float().cpu().masked_fill(~counted, 0.0).numpy()


def _as_array(values: Any) -> Array | None:
    """Return values on the CPU as an array; None if there are none."""
    return None if values is None else torch.as_tensor(values).detach().cpu().numpy()
