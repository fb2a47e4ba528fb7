"""Checks of a loss's inputs in verl's workers: of the values of tokens, and of the part of a mini-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from bandpo.core._limits import LOGP_SLACK
from bandpo.core.methods import Method
from bandpo.core.schedules import TrainingState
from bandpo.integrations.verl.checks import not_for_copies, not_for_processes, not_for_verl
from bandpo.integrations.verl.probe import is_probing
from bandpo.integrations.verl.settings import refuse_if

if TYPE_CHECKING:
    from jaxtyping import Bool
    from torch import Tensor
    from verl.workers.config import ActorConfig


class InvalidTokens:
    """The counted tokens of a micro-batch with an invalid value, such as NaN or a positive log-probability.

    Args:
        mask: 1 for tokens that count; like all tensors, of shape (sequences, tokens).
        logps: Log-probabilities by name.
        advantages: The advantages.
        weights: The importance weights ``rollout_is_weights``, if there are any.

    >>> logp = torch.tensor([[-1.0, 0.5]])
    >>> invalid = InvalidTokens(torch.ones(1, 2), {"old_log_prob": logp}, torch.ones(1, 2))
    >>> invalid.count, str(invalid)
    (1, 'old_log_prob[0, 1] is 0.5, which is no log-probability: those are finite and at most 0')
    """

    def __init__(
        self, mask: Tensor, logps: Mapping[str, Tensor], advantages: Tensor, weights: Tensor | None = None
    ) -> None:
        counted = mask > 0
        tensors = {**logps, "advantages": advantages}
        invalid: dict[str, Bool[Tensor, "batch time"]] = {}
        for name, logp in logps.items():
            invalid[name] = counted & ~(logp.isfinite() & (logp <= LOGP_SLACK))
        invalid["advantages"] = counted & ~advantages.isfinite()
        if weights is not None:
            tensors["rollout_is_weights"] = weights
            invalid["rollout_is_weights"] = counted & ~(weights.isfinite() & (weights >= 0))

        self._tensors = tensors
        self._invalid = invalid
        self.mask = torch.stack([*invalid.values()]).any(0)
        """True for tokens with an invalid value; shape (sequences, tokens)."""
        # The only transfer from the device, unless a token is invalid.
        self.count = int(self.mask.sum())
        """The number of tokens with an invalid value."""

    def __str__(self) -> str:
        """Describe the first of them by its row, position and value."""
        expectations = {
            "advantages": "no advantage: those are finite",
            "rollout_is_weights": "no importance weight: those are finite and at least 0",
        }
        for name, invalid in self._invalid.items():
            if invalid.any():
                row, position = invalid.nonzero()[0].tolist()
                value = self._tensors[name][row, position].item()
                expectation = expectations.get(name, "no log-probability: those are finite and at most 0")
                total = f" ({self.count} such tokens in this micro-batch)" if self.count > 1 else ""
                return f"{name}[{row}, {position}] is {value:g}, which is {expectation}{total}"
        return "every token is valid"


def state_of(method: Method, rows: int, config: ActorConfig) -> TrainingState:
    """Return the training state with which a method computes a loss.

    The state is empty, unless the method depends on sums over the whole mini-batch, such as a mean over all tokens, and
    the loss is not that of the probe. Then it has the group of processes over which they are summed.

    Args:
        method: The method.
        rows: The number of sequences in this call of the loss.
        config: The actor's settings. ``global_batch_info`` has the size of the mini-batch and the number of
            data-parallel processes.

    Raises:
        ValueError: The method depends on the whole mini-batch, but this call has only a part of this process's share
            of it, because the mini-batch is split into micro-batches; or it is divided among processes, and the method
            does not include the other processes, or ranks tokens of which several processes have a copy.
    """
    if not method.whole_batch or is_probing():
        return TrainingState()
    info = config.global_batch_info
    mini_batch_rows = (info.get("global_batch_size") or 0) / (info.get("dp_size") or 1)
    refuse_if(rows < mini_batch_rows, not_for_verl(method))
    processes = info.get("dp_size") or 1
    refuse_if(method.within_process and processes > 1, not_for_processes(method, processes))
    group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    if group is None or torch.distributed.get_world_size(group) == 1:
        return TrainingState()
    copies = torch.distributed.get_world_size(group) // processes
    refuse_if(method.objective.whole_batch and copies > 1, not_for_copies(method, copies))
    return TrainingState(processes=group)
