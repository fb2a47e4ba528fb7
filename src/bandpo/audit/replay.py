"""What any rule or method would have done to the tokens of a record, without training again."""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bandpo.audit.logs import Row, named_rows
from bandpo.audit.metrics import COUNTERFACTUALS, Audit, tried_at
from bandpo.audit.record import read_calls
from bandpo.audit.settings import Setup
from bandpo.audit.words import RUN
from bandpo.errors import InvalidValue
from bandpo.methods import Method
from bandpo.rules import ClipRule, FixedClip
from bandpo.text import as_method, parse


@dataclass(frozen=True)
class Replay:
    """What was seen of a record."""

    by_step: Mapping[str, Mapping[int, Audit]]
    """For each method, the run's own first where the record tells it, the audit of each step."""
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
    def rows(self) -> list[Row]:
        """One row for each step, as `bandpo.audit.logs.read_log` gives them of the run's log."""
        found: dict[int, dict[str, float]] = {step: {"step": step} for step in self.by_step[self.judged]}
        for name, steps in self.by_step.items():
            prefix = "audit/" if name == self.judged else f"audit/if/{name}/"
            for step in found.keys() & steps.keys():  # some files may not tell the run's method
                found[step] |= {f"{prefix}{key}": x for key, x in steps[step].metrics().items()}
        return named_rows(found.values())


def replay_record(
    path: str | Path,
    methods: Mapping[str, Method | ClipRule | str] = COUNTERFACTUALS,
    *,
    method: Method | ClipRule | str | None = None,
) -> Replay:
    """Audit the tokens of a record under the run's own method, if it is told, and under others.

    The run's own figures are those of `bandpo.Audit` during the run.

    Args:
        path: The folder that `bandpo.Recorder` wrote, or one file of it.
        methods: Rules and methods to try, by name, objects or text. A rule is tried with PPO's surrogate at the run's
            level, a method as it is.
        method: The run's own, where the record does not tell it. Nothing that a record names is imported.

    Raises:
        ValueError: the record cannot be read, is empty, or has no log-probabilities to anchor at; a text cannot be
            read, or a radius depends on what a record does not hold.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> logp_old = torch.tensor([[0.08, 0.50]]).log()
    >>> with Recorder(folder, method="FixedClip(0.2)") as recorder:
    ...     recorder.add(logp=torch.tensor([[0.16, 0.55]]).log(), logp_old=logp_old, advantages=torch.ones(1), step=1)
    >>> seen = replay_record(folder, {"Band": "Band()"})
    >>> [(name, audit.metrics()["clip_high"]) for name, audit in seen.audits.items()]
    [('the run', 0.5), ('Band', 0.0)]
    """
    given = None if method is None else as_method(method)
    tried = {name: parse(m) if isinstance(m, str) else m for name, m in methods.items()}
    audits: defaultdict[str, dict[int, Audit]] = defaultdict(dict)
    surrounds, setup = "trainer", None
    for number, call in enumerate(read_calls(path, given)):
        if not call.known:
            continue
        own, setup, surrounds = call.method, setup or Setup.of_record(call), call.anchor
        batch = call.judged
        each = {} if own is None else {RUN: own}
        level = "token" if own is None else own.level
        each |= {name: tried_at(level, other) for name, other in tried.items()}
        each = each or {"FixedClip(0.2)": Method(FixedClip())}
        for name, judge in each.items():
            tokens = judge.tokens(batch)
            seen = Audit.of(batch, judge, tokens, {})
            steps, step = audits[name], number if call.step is None else call.step
            steps[step] = steps[step] + seen if step in steps else seen
    if setup is None:
        raise InvalidValue(
            f"{path} holds no tokens of a loss: nothing was added before it was closed or killed, or batches before "
            "their first loss alone"
        )
    return Replay(audits, surrounds, setup)
