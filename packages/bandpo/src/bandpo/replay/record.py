"""The audit of any rule or method on the tokens of a record, without training again."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bandpo.audit.metrics import COUNTERFACTUALS, Audit, method_at_level
from bandpo.core.batch import Batch
from bandpo.core.errors import InvalidValue
from bandpo.core.methods import Method
from bandpo.core.rules import ClipRule, FixedClip
from bandpo.core.schedules import TrainingState
from bandpo.core.sequences import Sequences
from bandpo.core.text import as_method, as_text, parse
from bandpo.replay.by_age import BlockedByAge
from bandpo.replay.directions import Directions
from rlvet.records import LossBatch, RecordedRun
from rlvet.records.ages import AgeCollector, Ages
from rlvet.runs import Setup
from rlvet.runs.effect import RUN
from rlvet.runs.quantities import Row, named_rows
from rlvet.runs.setup import framework_of

if TYPE_CHECKING:
    from torch import Tensor

UNKNOWN_METHOD = "FixedClip(0.2)"
"""The method of the audit if the run's own is not known and no other is named."""


def method_of(setup: Setup, method: Method | None = None, *, location: object = "the run") -> Method | None:
    """Return the method that a run's files name; ``method`` if they name none, or one that cannot be parsed.

    The text is untrusted, so it may only name classes of bandpo. If it cannot be parsed and ``method`` is None, a
    warning names the reason.

    Args:
        setup: The training setup that the run's files name.
        method: The method that the user names.
        location: The source of the text, for the warning and the error.

    Raises:
        ValueError: if the files name another method than the user.
    """
    if setup.method is None:
        return method
    try:
        run_method = parse(setup.method, imports=False)
    except (AttributeError, TypeError, ValueError) as error:
        if method is None:
            warnings.warn(
                f"{location}: the method that the run was trained with is not known: {error}; if you trust it, name "
                "it yourself by --run-method (method=)",
                stacklevel=2,
            )
        return method
    if method is not None and method != run_method:
        raise InvalidValue(
            f"{location} names its method, {run_method}, so --run-method (method=) {method} would have no effect: "
            "leave it out, or compare it by `bandpo audit --method` on a record"
        )
    # With a clip rule alone, the level is the trainer's own setting.
    return replace(run_method, level=setup.level) if run_method.only_rule and setup.level else run_method


def as_batch(loss_batch: LossBatch) -> Batch:
    """Return a recorded loss as a batch, with the anchor of the run's bounds.

    Raises:
        ValueError: if the bounds surround the engine's log-probabilities, and the record lacks these.
    """

    def tensor(array: Any) -> Tensor | None:
        return None if array is None else torch.from_numpy(array)

    mask = torch.from_numpy(loss_batch.mask).float()
    sequences = Sequences(mask)
    return Batch(
        logp=torch.from_numpy(loss_batch.logp),
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
    """The run's method in each loss of a record, which may change from loss to loss. Each text is parsed once.

    Args:
        method: The method that the user names, for losses whose record names none that can be parsed.
    """

    def __init__(self, method: Method | None = None):
        self._default = method
        self._by_text: dict[str | None, Method | None] = {}

    def of(self, batch: LossBatch) -> Method | None:
        """Return the method of a loss; None if it is not known."""
        text = batch.method
        if text not in self._by_text:
            location = Path(batch.location).parent
            self._by_text[text] = method_of(Setup(method=text), self._default, location=location)
        return self._by_text[text]


@dataclass(frozen=True)
class Replay:
    """The audits of a record under several methods."""

    by_step: Mapping[str, Mapping[int, Audit]]
    """The audit of each step by the name of the method, the run's own first if it is known."""
    anchor: str
    """The policy that the bounds surround: ``trainer`` or ``rollout``."""
    setup: Setup
    """The training setup of the run."""
    ages: Ages = field(default_factory=Ages)
    """The tokens by age."""
    rare_winners_by_age: Mapping[str, int] = field(default_factory=dict)
    """The number of rare winners by the class of ages."""
    blocked_by_age: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The share of the gradient on rare winners that each method blocks, by the name of the method and the class of
    ages, see `bandpo.replay.by_age`."""
    blocked_by_age_and_bin: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    """The share of the gradient on winners that each method blocks, by the name of the method, the bin of the old
    probability and the class of ages."""
    directions: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By the name of the method, `bandpo.replay.directions.COSINE` and `bandpo.replay.directions.EFFECTIVE`."""

    @property
    def main_method(self) -> str:
        """The name of the method that the verdicts refer to: the run's own if it is known, else the first."""
        return next(iter(self.by_step))

    @property
    def audits(self) -> dict[str, Audit]:
        """The audit of each method over the whole record."""
        return {name: functools.reduce(operator.add, steps.values()) for name, steps in self.by_step.items()}

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics of each method over the whole record, and those by age, such as ``age/2/tokens``."""
        of_ages: dict[str, float] = {}
        for row in self.ages.rows:
            of_ages |= {
                f"age/{row.name}/tokens": row.tokens,
                f"age/{row.name}/log_ratio_spread": row.spread,
                f"age/{row.name}/effective_sample_size": row.effective,
            }
        metrics: dict[str, dict[str, float]] = {}
        for name, audit in self.audits.items():
            blocked = self.blocked_by_age.get(name, {})
            metrics[name] = audit.metrics() | of_ages
            metrics[name] |= {f"age/{age}/blocked_mass_below_0.1": share for age, share in blocked.items()}
            for probabilities, shares in self.blocked_by_age_and_bin.get(name, {}).items():
                metrics[name] |= {
                    f"age/{age}/blocked_mass/{probabilities}": share for age, share in shares.items()
                }
            metrics[name] |= self.directions.get(name, {})
        return metrics

    @property
    def rows(self) -> Sequence[Row]:
        """One row of metrics for each step, with the names of a run's log."""
        rows: dict[int, dict[str, float]] = {step: {"step": step} for step in self.by_step[self.main_method]}
        for name, steps in self.by_step.items():
            prefix = "audit/" if name == self.main_method else f"audit/if/{name}/"
            # A file without the run's method has no audit of it.
            for step in rows.keys() & steps.keys():
                rows[step] |= {f"{prefix}{key}": value for key, value in steps[step].metrics().items()}
        return named_rows(rows.values())


class _AuditsByStep:
    """The audits of one method, summed by step.

    The sums of all steps are stored in one tensor. Separate small tensors would fragment the memory between the large
    temporary tensors of later losses, which cost 2 GB with a record of 60 million tokens.

    Args:
        template: An audit of the method, which defines the names and shapes of the sums. Its values are not added.
    """

    def __init__(self, template: Audit):
        self._template = template
        self._rows: dict[int, int] = {}
        self._sums = torch.zeros(16, len(template.flat_sums), dtype=torch.float64)

    def add(self, step: int, audit: Audit) -> None:
        """Add the audit of a loss to those of its step."""
        row = self._rows.setdefault(step, len(self._rows))
        if row == len(self._sums):  # double the capacity
            self._sums = torch.cat([self._sums, torch.zeros_like(self._sums)])
        self._sums[row] += audit.flat_sums

    def by_step(self) -> dict[int, Audit]:
        """Return the audit of each step, in the order in which steps were first added."""
        return {step: self._template.with_sums(self._sums[row].clone()) for step, row in self._rows.items()}


class ReplayCollector:
    """A collector that audits recorded losses under the run's own method, if it is known, and under others.

    Args:
        methods: Rules and methods to audit, by name, as objects or text. A rule is used with PPO's surrogate at the
            run's level, a method as it is.
        method: The run's own method, if the record does not name it.
    """

    def __init__(
        self,
        methods: Mapping[str, Method | ClipRule | str] = COUNTERFACTUALS,
        method: Method | None = None,
    ):
        self._counterfactuals = {name: as_method(rule) for name, rule in methods.items()}
        self._recorded_method = RecordedMethod(method)
        self._audits: dict[str, _AuditsByStep] = {}
        self._ages = AgeCollector()
        self._blocked_by_age = BlockedByAge()
        self._directions = Directions()
        self._losses = 0
        self._anchor = "trainer"
        self._setup: Setup | None = None

    def add(self, batch: LossBatch) -> None:
        """Audit one loss. A batch without the log-probabilities of the policy in training is left out."""
        step = self._losses if batch.step is None else batch.step
        self._losses += 1
        if not batch.has_logp:
            return
        method = self._recorded_method.of(batch)
        self._anchor = batch.anchor
        if self._setup is None:
            text = None if method is None else as_text(method)
            self._setup = Setup(framework_of(batch.framework), text)

        level = "token" if method is None else method.level
        methods = {} if method is None else {RUN: method}
        methods |= {name: method_at_level(level, rule) for name, rule in self._counterfactuals.items()}
        if not methods:
            methods = {UNKNOWN_METHOD: Method(FixedClip(0.2))}
        tensors = as_batch(batch)
        self._ages.add(batch)
        for name, audited_method in methods.items():
            tokens = audited_method.tokens(tensors)
            self._directions.add(name, audited_method, tokens)
            self._blocked_by_age.add(name, audited_method, tokens, tensors, batch)
            audit = Audit.of(tensors, audited_method, tokens, {})
            if name not in self._audits:
                self._audits[name] = _AuditsByStep(audit)
            self._audits[name].add(step, audit)

    def result(self) -> Replay | None:
        """Return the audits; None if no loss was audited."""
        if self._setup is None or not self._audits:
            return None
        by_step = {name: audits.by_step() for name, audits in self._audits.items()}
        ages = self._ages.result()
        return Replay(
            by_step,
            self._anchor,
            self._setup,
            ages,
            self._blocked_by_age.rare_winners(),
            self._blocked_by_age.shares(),
            self._blocked_by_age.shares_by_bin(),
            self._directions.result(),
        )


def replay_record(
    run: str | Path | RecordedRun,
    methods: Mapping[str, Method | ClipRule | str] = COUNTERFACTUALS,
    *,
    method: Method | ClipRule | str | None = None,
) -> Replay:
    """Audit the tokens of a record under the run's own method, if it is known, and under others.

    The metrics of the run's own method equal those of `bandpo.audit.Audit` during the run.

    Args:
        run: The folder that `bandpo.audit.Recorder` wrote, one file of it, or an open run.
        methods: Rules and methods to audit, by name, as objects or text. A rule is used with PPO's surrogate at the
            run's level, a method as it is.
        method: The run's own method, if the record does not name it. Nothing that a record names is imported.

    Raises:
        ValueError: if the record cannot be read, is empty, or lacks the log-probabilities of the anchor; a text cannot
            be parsed; a method is given for a record that names another; or a radius depends on something that records
            do not contain.

    >>> import tempfile
    >>> from bandpo.audit import Recorder
    >>> folder = tempfile.mkdtemp()
    >>> logp_old = torch.tensor([[0.08, 0.50]]).log()
    >>> with Recorder(folder, method="FixedClip(0.2)") as recorder:
    ...     recorder.add(logp=torch.tensor([[0.16, 0.55]]).log(), logp_old=logp_old, advantages=torch.ones(1), step=1)
    >>> replay = replay_record(folder, {"Band": "Band()"})
    >>> [(name, audit.metrics()["clip_high"]) for name, audit in replay.audits.items()]
    [('the run', 0.5), ('Band', 0.0)]
    """
    run = run if isinstance(run, RecordedRun) else RecordedRun(run)
    collector = ReplayCollector(methods, None if method is None else as_method(method))
    run.scan([collector])
    replay = collector.result()
    if replay is None:
        raise no_losses(run.path)
    return replay


def no_losses(path: Path) -> InvalidValue:
    """Return the error for a record without a loss."""
    return InvalidValue(
        f"{path} holds no tokens of a loss: either nothing was recorded before the run ended, or only batches before "
        "their first loss, as by verl; there, give the log, which has the audit of the losses; `rlvet diagnose` has "
        "the tokens by age"
    )
