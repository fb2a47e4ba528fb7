"""What any rule or method would have done to the tokens of a record, without training again."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bandpo.audit.metrics import COUNTERFACTUALS, Audit, tried_at
from bandpo.batch import Batch
from bandpo.errors import InvalidValue
from bandpo.methods import Method
from bandpo.rules import ClipRule, FixedClip
from bandpo.runs import LossBatch, Run, Setup, open_run
from bandpo.runs.quantities import Row, named_rows
from bandpo.runs.setup import framework_of
from bandpo.schedules import TrainingState
from bandpo.sequences import Sequences
from bandpo.text import as_method, as_text, parse

if TYPE_CHECKING:
    from torch import Tensor

RUN = "the run"
"""The name of the run's own method beside the others."""

UNKNOWN_METHOD = "FixedClip(0.2)"
"""The method under which tokens are audited where the run's own is not known and no other is tried."""


def method_of(setup: Setup, method: Method | None = None, *, location: object = "the run") -> Method | None:
    """Return the method that a run's files name; if they name none, or one that cannot be read, ``method``.

    The text is a stranger's, so it may only name classes of bandpo. A warning says what cannot be read, unless a method
    is given.

    Args:
        setup: What the run was trained with, as its files say.
        method: The method that the user names.
        location: Where the text stands, for the warning.
    """
    if setup.method is None:
        return method
    try:
        named = parse(setup.method, imports=False)
    except (AttributeError, TypeError, ValueError) as error:
        if method is None:
            warnings.warn(
                f"{location}: the method that the run was trained with is not known: {error}; if you trust it, name "
                "it yourself by --run-method (method=)",
                stacklevel=2,
            )
        return method
    # A rule alone leaves the level to the trainer's own setting.
    return replace(named, level=setup.level) if named.only_rule and setup.level else named


def as_batch(loss_batch: LossBatch) -> Batch:
    """Return a recorded loss as the tensors that methods see, with what the run's bounds surround as the anchor.

    Raises:
        ValueError: if the bounds surround the engine's log-probabilities, which the record does not have.
    """

    def tensor(array: Any) -> Tensor | None:
        return None if array is None else torch.from_numpy(array)

    mask = torch.from_numpy(loss_batch.mask).float()
    sequences = Sequences(mask)
    return Batch(
        log_ratio=torch.from_numpy(loss_batch.log_ratio),
        logp_old=torch.from_numpy(loss_batch.logp_old),
        advantages=torch.from_numpy(loss_batch.advantages),
        mask=mask,
        sequences=sequences,
        logp_anchor=tensor(loss_batch.logp_anchor),
        entropy=tensor(loss_batch.entropy),
        state=TrainingState(group=tensor(loss_batch.group), age=tensor(loss_batch.lag), sequences=sequences),
    )


class RecordedMethod:
    """The run's method in each loss of a record, which may change from loss to loss; each text is read once.

    Args:
        method: The method that the user names, where the record names none that can be read.
    """

    def __init__(self, method: Method | None = None):
        self._given = method
        self._known: dict[str | None, Method | None] = {}

    def of(self, batch: LossBatch) -> Method | None:
        """Return the method of a loss; None if it is not known."""
        if batch.method not in self._known:
            setup = Setup(method=batch.method)
            self._known[batch.method] = method_of(setup, self._given, location=Path(batch.location).parent)
        return self._known[batch.method]


@dataclass(frozen=True)
class Replay:
    """The audits of a record."""

    by_step: Mapping[str, Mapping[int, Audit]]
    """For each method, the run's own first where it is known, the audit of each step."""
    anchor: str
    """Whose log-probabilities the bounds surrounded."""
    setup: Setup
    """What the run was trained with."""

    @property
    def judged(self) -> str:
        """The method that the verdicts are on: the run's own where it is known."""
        return next(iter(self.by_step))

    @property
    def audits(self) -> dict[str, Audit]:
        """For each method its audit over the whole record."""
        return {name: functools.reduce(operator.add, steps.values()) for name, steps in self.by_step.items()}

    @property
    def rows(self) -> Sequence[Row]:
        """One row for each step, as the run's log has it."""
        rows: dict[int, dict[str, float]] = {step: {"step": step} for step in self.by_step[self.judged]}
        for name, steps in self.by_step.items():
            prefix = "audit/" if name == self.judged else f"audit/if/{name}/"
            # Some files may not name the run's method.
            for step in rows.keys() & steps.keys():
                rows[step] |= {f"{prefix}{key}": value for key, value in steps[step].metrics().items()}
        return named_rows(rows.values())


class _AuditsByStep:
    """Audits of one method, added up by step.

    The sums of all steps lie in one tensor. Tensors of their own would stay between the large temporary ones of later
    losses, and keep the memory of these from being used again: 2 GB for a record of 60 million tokens.

    Args:
        first: An audit of the method, of which the sums are not added.
    """

    def __init__(self, first: Audit):
        self._first = first
        self._rows: dict[int, int] = {}
        self._sums = torch.zeros(16, len(first.flat_sums), dtype=torch.float64)

    def add(self, step: int, audit: Audit) -> None:
        """Add the audit of a loss to those of its step."""
        row = self._rows.setdefault(step, len(self._rows))
        if row == len(self._sums):
            self._sums = torch.cat([self._sums, torch.zeros_like(self._sums)])
        self._sums[row] += audit.flat_sums

    def by_step(self) -> dict[int, Audit]:
        """Return the audit of each step, in the order in which steps were first added."""
        return {step: self._first.with_sums(self._sums[row].clone()) for step, row in self._rows.items()}


class ReplayCollector:
    """Audits loss batches under the run's own method, where it is known, and under others.

    Args:
        methods: Rules and methods to try, by name, objects or text. A rule is tried with PPO's surrogate at the run's
            level, a method as it is.
        method: The run's own, where the record does not name it.
    """

    def __init__(
        self,
        methods: Mapping[str, Method | ClipRule | str] = COUNTERFACTUALS,
        method: Method | None = None,
    ):
        self._tried = {name: as_method(other) for name, other in methods.items()}
        self._recorded_method = RecordedMethod(method)
        self._audits: dict[str, _AuditsByStep] = {}
        self._number = 0
        self._anchor = "trainer"
        self._setup: Setup | None = None

    def add(self, batch: LossBatch) -> None:
        """Audit one loss batch. A batch without the log-probabilities of the policy in training is left out."""
        step = self._number if batch.step is None else batch.step
        self._number += 1
        if not batch.has_logp:
            return
        method = self._recorded_method.of(batch)
        self._anchor = batch.anchor
        if self._setup is None:
            text = None if method is None else as_text(method)
            self._setup = Setup(framework_of(batch.framework), text)

        level = "token" if method is None else method.level
        methods = {} if method is None else {RUN: method}
        methods |= {name: tried_at(level, other) for name, other in self._tried.items()}
        if not methods:
            methods = {UNKNOWN_METHOD: Method(FixedClip(0.2))}
        tensors = as_batch(batch)
        for name, other in methods.items():
            audit = Audit.of(tensors, other, other.tokens(tensors), {})
            if name not in self._audits:
                self._audits[name] = _AuditsByStep(audit)
            self._audits[name].add(step, audit)

    def result(self) -> Replay | None:
        """Return the audits; None if no loss was audited."""
        if self._setup is None or not self._audits:
            return None
        by_step = {name: audits.by_step() for name, audits in self._audits.items()}
        return Replay(by_step, self._anchor, self._setup)


def replay_record(
    run: str | Path | Run,
    methods: Mapping[str, Method | ClipRule | str] = COUNTERFACTUALS,
    *,
    method: Method | ClipRule | str | None = None,
) -> Replay:
    """Audit the tokens of a record under the run's own method, if it is known, and under others.

    The run's own figures are those of `bandpo.Audit` during the run.

    Args:
        run: The folder that `bandpo.Recorder` wrote, one file of it, or an open run.
        methods: Rules and methods to try, by name, objects or text. A rule is tried with PPO's surrogate at the run's
            level, a method as it is.
        method: The run's own, where the record does not name it. Nothing that a record names is imported.

    Raises:
        ValueError: if the record cannot be read, is empty, or has no log-probabilities to anchor at; a text cannot be
            read, or a radius depends on what a record does not hold.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> logp_old = torch.tensor([[0.08, 0.50]]).log()
    >>> with Recorder(folder, method="FixedClip(0.2)") as recorder:
    ...     recorder.add(logp=torch.tensor([[0.16, 0.55]]).log(), logp_old=logp_old, advantages=torch.ones(1), step=1)
    >>> replay = replay_record(folder, {"Band": "Band()"})
    >>> [(name, audit.metrics()["clip_high"]) for name, audit in replay.audits.items()]
    [('the run', 0.5), ('Band', 0.0)]
    """
    run = run if isinstance(run, Run) else open_run(run)
    collector = ReplayCollector(methods, None if method is None else as_method(method))
    run.scan([collector])
    replay = collector.result()
    if replay is None:
        raise no_losses(run.path)
    return replay


def no_losses(path: Path) -> InvalidValue:
    """Return the error of a record that holds no loss."""
    return InvalidValue(
        f"{path} holds no tokens of a loss: nothing was added before it was closed or killed, or batches before "
        "their first loss alone"
    )
