"""The loss in verl's workers: what it refuses there, and its gradient compared while it trains."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from bandpo._limits import LOGP_SLACK
from bandpo.audit.online import BandWarning
from bandpo.batch import Batch
from bandpo.errors import RunProblem
from bandpo.gradient_check import compare
from bandpo.integrations._verl_checks import not_for_verl
from bandpo.integrations._verl_settings import WHERE, refuse
from bandpo.methods import Method
from bandpo.schedules import TrainingState

if TYPE_CHECKING:
    from jaxtyping import Bool
    from torch import Tensor
    from verl.workers.config import ActorConfig

EVERY = 1000
"""Losses from one comparison to the next. One costs about ten losses, so a hundredth of what the loss costs."""


class WrongTokens:
    """The counted tokens of a micro-batch that hold a value which no token can have.

    >>> logp = torch.tensor([[-1.0, 0.5]])
    >>> found = WrongTokens(torch.ones(1, 2), {"old_log_prob": logp}, {})
    >>> found.count, str(found)
    (1, 'old_log_prob[0, 1] is 0.5, which is no log-probability: those are finite and at most 0')
    """

    def __init__(
        self, mask: Tensor, logps: Mapping[str, Tensor], others: Mapping[str, Tensor | None]
    ) -> None:
        """Look for them, at the cost of one read from the device.

        Args:
            mask: 1 for tokens that count.
            logps: Log-probabilities by name.
            others: Advantages and ``rollout_is_weights`` by name.
        """
        counted = mask > 0
        wrong: dict[str, Bool[Tensor, "batch time"]] = {}
        for name, logp in logps.items():
            wrong[name] = counted & ~(logp.isfinite() & (logp <= LOGP_SLACK))
        for name, values in others.items():
            if values is not None:
                allowed = values.isfinite() & ((values >= 0) | (name != "rollout_is_weights"))
                wrong[name] = counted & ~allowed
        self._tensors = {**logps, **others}
        self._wrong = wrong
        self.mask = torch.stack([*wrong.values()]).any(0)
        """Which they are."""
        self.count = int(self.mask.sum())
        """How many."""

    def __str__(self) -> str:
        """Name the first of them with its row, its position and its value."""
        for name, wrong in self._wrong.items():
            if wrong.any():
                row, position = wrong.nonzero()[0].tolist()
                value = self._tensors[name][row, position].item()
                kind = {
                    "advantages": "no advantage: those are finite",
                    "rollout_is_weights": "no importance weight: those are finite and at least 0",
                }.get(name, "no log-probability: those are finite and at most 0")
                more = f" ({self.count} such tokens in this micro-batch)" if self.count > 1 else ""
                return f"{name}[{row}, {position}] is {value:g}, which is {kind}{more}"
        return "no token is wrong"


def state_of(method: Method, rows: int, config: ActorConfig) -> TrainingState:
    """Return what the method's sums run over: all processes, if it has sums.

    Args:
        method: The method.
        rows: The sequences that the loss is given.
        config: The actor's settings, with the sizes of the global batch.

    Raises:
        ValueError: it has sums, and ``rows`` are a part of this process's mini-batch.
    """
    if not method.whole_batch:
        return TrainingState()
    info = config.global_batch_info
    whole = (info.get("global_batch_size") or 0) / (info.get("dp_size") or 1)
    refuse(rows < whole, not_for_verl(method))
    group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    several = group is not None and torch.distributed.get_world_size(group) > 1
    return TrainingState(processes=group if several else None)


class Certifier:
    """Compares what reaches the log-probabilities in the backward pass with the method's gradient, now and then.

    It does so for the first loss of each process, for the first of which tokens are blocked, and for every `EVERY`-th
    of either. A factor on the whole loss is verl's: the number of micro-batches, or a loss scale.
    """

    def __init__(self) -> None:
        self._losses: Counter[bool] = Counter()

    def __call__(
        self,
        loss: Tensor,
        logp: Tensor,
        method: Method,
        batch: Batch,
        share: Tensor,
        *,
        blocked: bool,
        stop: bool,
    ) -> None:
        """Watch the backward pass of one loss, if it is its turn; the rest as for `bandpo.gradient_check.compare`.

        ``blocked`` says whether the method blocks a token, ``stop`` whether a mismatch ends the run or is a warning.
        """
        turn = self._losses[blocked] % EVERY == 0
        self._losses[blocked] += 1
        # Sums over processes cannot be formed again in one process's backward pass.
        if not turn or batch.state.processes is not None:
            return
        scale: list[Tensor] = []
        loss.register_hook(scale.append)  # called before that of the log-probabilities

        def look(gradient: Tensor) -> None:
            found = compare(gradient, method, batch, share * scale[-1])
            if found.equal:
                print(f"bandpo: {found}", flush=True)  # verl's own way to say something; Ray passes it on
            elif stop:
                raise RunProblem(f"{found}; {WHERE}certify=warn trains on")
            else:
                warnings.warn(str(found), BandWarning, stacklevel=2)

        logp.register_hook(look)
