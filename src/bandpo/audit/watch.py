"""The tests of `bandpo diagnose` while a run trains: each fault is told once, with the fix, or ends the run."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bandpo.audit.diagnosis import course
from bandpo.audit.invariants import Finding, Looks, tested_invariants
from bandpo.audit.logs import Row, named_rows
from bandpo.audit.record import Call, without_bad
from bandpo.audit.settings import Setup
from bandpo.batch import Batch, normalize_mask
from bandpo.errors import InvalidValue, RunProblem

EVERY = 10
"""Batches from one look to the next: a look costs about as much as a loss of the same tokens without its gradient."""
KEPT = 32
"""Looks that are judged together, the newest: their tokens bound the memory."""


class BandWarning(UserWarning):
    """A run that trains, but not as its settings say."""


class Watch:
    """Looks at batches and log steps of a run, and tells each fault once.

    >>> watch, logp = Watch(), -torch.ones(4, 6)
    >>> watch.look(logp=logp, logp_old=logp, advantages=torch.tensor([1.0, -1.0, 1.0, -1.0]))
    >>> watch({"entropy": 1.2, "reward": 0.3})

    Args:
        framework: The framework whose settings are named, see `bandpo.audit.settings`; None for none.
        every: Generated batches from one look to the next, and log steps from one judgement of their course to another.
        how: ``warn``, or ``stop`` to end the run.
        anchor: As for `bandpo.Recorder`.

    Raises:
        ValueError: ``how`` is another word.
    """

    def __init__(
        self, framework: str | None = None, *, every: int = EVERY, how: str = "warn", anchor: str = "trainer"
    ):
        if how not in ("warn", "stop"):
            raise InvalidValue(f"how must be 'warn' or 'stop', got {how!r}")
        self._setup, self._every, self._how = Setup(framework), every, how
        self._said: set[str] = set()
        self._anchor = anchor
        self._looks: deque[Call] = deque(maxlen=KEPT)
        self._rows: list[Row] = []

    def look(
        self,
        *,
        logp_old: Tensor,
        advantages: Tensor,
        mask: Tensor | None = None,
        generation: int = 0,
        update: int = 0,
        **told: Any,
    ) -> None:
        """Test what a run assumes on sequences of a generated batch, if no update was made on it yet.

        Args:
            logp_old: This, and what is not named here, as for `bandpo.Recorder.add`.
            generation: Batches whose number is no multiple of ``every`` are not looked at.

        Raises:
            RuntimeError: something is wrong, and ``how`` is ``stop``.
        """
        if update or generation % self._every:
            return
        counted = normalize_mask(logp_old, mask).cpu() != 0
        given = {name: torch.as_tensor(x).detach().cpu() for name, x in told.items() if x is not None}
        new, engine, entropy = (
            _at(counted, given.pop(name, None)) for name in ("logp", "logp_rollout", "entropy")
        )
        old, advantages = _at(counted, logp_old), advantages.detach().float().cpu()
        assert old is not None
        advantages = (advantages if advantages.dim() == 2 else advantages[:, None]).expand_as(old)
        ratio = torch.zeros_like(old) if new is None else new - old
        batch = Batch(ratio, old, advantages, counted.float(), engine, entropy)
        ids, known = given.pop("tokens", None), new is not None
        call = Call("", None, None, self._anchor, "", batch, None, ids, None, generation, update, known=known)
        self._looks.append(without_bad(replace(call, **given))[0])
        self._tell(tested_invariants(Looks.of(self._looks)))

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Take one log step, and judge their course.

        Args:
            row: What is logged, under the framework's own names.
        """
        self._rows += named_rows([{"step": len(self._rows), **row}])
        if self._rows and len(self._rows) % self._every == 0:
            self._tell(course(self._rows))

    def _tell(self, findings: Sequence[Finding]) -> None:
        for f in findings:
            if f.ok is not False or f.code in self._said:
                continue
            self._said.add(f.code)
            text = f"{' or '.join((f.code, *f.or_else))}: {f.cause}. Try: {self._setup.filled(f.advice)}"
            if self._how == "stop":
                raise RunProblem(text)
            warnings.warn(text, BandWarning, stacklevel=4)


def _at(counted: Tensor, x: Tensor | None) -> Tensor | None:
    """On the CPU, and 0 where a token does not count."""
    return None if x is None else x.detach().float().cpu().masked_fill(~counted, 0.0)
