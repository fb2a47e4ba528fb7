"""What the processes of one training decide together, and which of them no longer answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from bandpo.errors import BandpoError, RunProblem

if TYPE_CHECKING:
    from bandpo_lab.training.arguments import TrainingConfig

T = TypeVar("T")

COMMUNICATION_ERRORS = (
    "gloo",
    "nccl",
    "timed out waiting",
    "connection closed by peer",
    "connection reset by peer",
)
"""Parts of the messages with which an exchange between processes fails."""
ANSWER_SECONDS = 10.0
"""How long a process that met such an error waits for the answers of the others."""


class Processes:
    """The processes that train together; one alone by default."""

    def __init__(self, rank: int = 0, size: int = 1, first_on_machine: bool = True, timeout: float = 1800):
        self.rank = rank
        self.size = size
        self.first_on_machine = first_on_machine
        self.timeout = timeout

    @classmethod
    def of(cls, training: TrainingConfig) -> Processes:
        """Return the processes that transformers has set up for these settings."""
        return cls(
            training.process_index,
            training.world_size,
            first_on_machine=training.local_process_index == 0,
            timeout=training.ddp_timeout,
        )

    @property
    def main(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def gather(self, compute: Callable[[], T]) -> list[T]:
        """Call a function on every process, and return the results of all on all.

        Raises:
            BandpoError: the function raised it on this process, or on another.
            RunProblem: the function raised another error on another process. On that process it is raised as it is.
        """
        value: T | None = None
        error: Exception | None = None
        try:
            value = compute()
        except Exception as raised:
            error = raised
        if self.size == 1:
            outcomes: list[Any] = [(value, error)]
        else:
            outcomes = [None] * self.size
            dist.all_gather_object(outcomes, (value, error and _sendable(error)))
        if error is not None:
            raise error
        for rank, (_, other) in enumerate(outcomes):
            if isinstance(other, BandpoError):
                raise other
            if other is not None:
                raise RunProblem(f"rank {rank} stopped with {other}")
        return [value for value, _ in outcomes]

    def from_main(self, compute: Callable[[], T]) -> T:
        """Call a function on the main process, and return its result on every process.

        Raises:
            BandpoError: the function raised it.
            RunProblem: the function raised another error, and this is not the main process.
        """
        results = self.gather(lambda: compute() if self.main else None)
        return results[0]  # type: ignore[return-value]

    @contextmanager
    def lost_are_named(self) -> Generator[None, None, None]:
        """Say which processes no longer answer when an exchange between them fails.

        Raises:
            RunProblem: an exchange failed, and at least one other process does not answer.
        """
        try:
            yield
        except RuntimeError as error:
            message = " ".join(str(error).split())
            failed_exchange = any(part in message.lower() for part in COMMUNICATION_ERRORS)
            if self.size == 1 or not failed_exchange:
                raise
            silent = self._silent_ranks()
            if not silent:
                raise
            who = "rank" if len(silent) == 1 else "ranks"
            does = "does" if len(silent) == 1 else "do"
            raise RunProblem(
                f"{who} {', '.join(map(str, silent))} of {self.size} {does} not answer rank {self.rank} (ddp_timeout "
                f"is {self.timeout:g} s): it was stopped or killed, or is much slower. Add --resume to go on from "
                f"the last checkpoint. The exchange failed with: {message}"
            ) from error

    def _silent_ranks(self) -> list[int]:
        """Return the ranks that do not tell the store within some seconds that they met an error too."""
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"bandpo/answers/{self.rank}", "here")
            silent = {rank for rank in range(self.size) if rank != self.rank}
            end = time.monotonic() + ANSWER_SECONDS
            while silent and time.monotonic() < end:
                silent = {rank for rank in silent if not store.check([f"bandpo/answers/{rank}"])}
                time.sleep(0.2)
            return sorted(silent)
        except RuntimeError:
            # The store is kept by rank 0, or by the launcher on its machine.
            return [0] if self.rank else []


def _sendable(error: Exception) -> Any:
    """Return what other processes are told of an error: bandpo's own as it is, any other as text."""
    if isinstance(error, BandpoError):
        return type(error)(str(error))
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
