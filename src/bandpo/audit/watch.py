"""The tests of `bandpo diagnose` while a run trains: each fault is told once, with the fix, or ends the run."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from bandpo.audit.diagnosis import course
from bandpo.audit.invariants import Finding, Looks, tested_invariants
from bandpo.audit.logs import Row, named_rows
from bandpo.audit.record import Call, without_bad
from bandpo.audit.settings import Setup
from bandpo.batch import Batch, full_mask
from bandpo.errors import InvalidValue, RunProblem
from bandpo.radius import Radius
from bandpo.rules import ClipRule, bands

RADIUS_FACTOR = 2.5  # from the divergence's default, either way
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

    Raises:
        ValueError: ``how`` is another word.
    """

    def __init__(self, framework: str | None = None, *, every: int = EVERY, how: str = "warn"):
        if how not in ("warn", "stop"):
            raise InvalidValue(f"how must be 'warn' or 'stop', got {how!r}")
        self._setup, self._every, self._how = Setup(framework), every, how
        self._said: set[str] = set()
        self._looks: deque[Call] = deque(maxlen=KEPT)
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
        generation: int = 0,
        update: int = 0,
        **told: Any,
    ) -> None:
        """Test what a run assumes on sequences of a generated batch, if no update was made on it yet.

        Args:
            logp_old: And the rest: as for `bandpo.Recorder.add`. ``told`` holds ``group``, ``reward`` and
                ``truncated``. Batches whose ``generation`` is no multiple of ``every`` are not looked at.
            advantages, logp, mask, logp_rollout, entropy, tokens, generation, update, told: See there.

        Raises:
            RuntimeError: something is wrong, and ``how`` is ``stop``.
        """
        if update or generation % self._every:
            return
        counted = full_mask(logp_old, mask).cpu() != 0

        def each(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.detach().float().cpu().masked_fill(~counted, 0.0)

        old, engine, given_entropy, new = map(each, (logp_old, logp_rollout, entropy, logp))
        assert old is not None
        given = advantages.detach().float().cpu()
        given = (given if given.dim() == 2 else given[:, None]).expand_as(old)
        batch = Batch(
            torch.zeros_like(old) if new is None else new - old,
            old,
            given,
            counted.float(),
            engine,
            given_entropy,
        )
        columns = {name: torch.as_tensor(x).cpu() for name, x in told.items() if x is not None}
        ids = None if tokens is None else tokens.cpu()
        call = Call(
            "", None, None, "trainer", "", batch, None, ids, None, generation, update, known=logp is not None
        )
        self._looks.append(without_bad(replace(call, **columns))[0])
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


def check_radius(rule: ClipRule) -> None:
    """Warn of a band whose radius is far from what its divergence is used with; rules within rules included.

    Radii of different divergences do not compare: TV 0.05, say, is three to four times tighter than what DPPO uses
    beside KL 0.05.
    """
    for band in bands(rule).values():
        if isinstance(band.radius, Tensor):
            continue  # only its values would tell, and they may be on a device
        radius = cast("float | Radius", band.radius)  # never None: Band filled it in
        least, most = radius.range if isinstance(radius, Radius) else (radius, radius)
        usual = band.divergence.default_radius
        # The nearest value of a radius that changes counts: a schedule may end far from where it started.
        factor = min(max(usual, least), most) / usual
        if not 1 / RADIUS_FACTOR < factor < RADIUS_FACTOR:
            size = f"{factor:.2g} times" if factor > 1 else f"1/{1 / factor:.2g} of"
            warnings.warn(
                f"radius {factor * usual:g} is {size} what {band.divergence!r} is usually given ({usual:g}); radii of "
                "different divergences do not compare. If it is meant, ignore this",
                BandWarning,
                stacklevel=3,
            )
