"""The settings of `bandpo-lab train --async`: those of TRL's asynchronous trainer, and its rehearsal on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, field

from bandpo.integrations.trl import BandAsyncGRPOConfig
from bandpo_lab.errors import InvalidValue
from bandpo_lab.training.config_checks import CpuDevice, check_numbers, check_range


@dataclass
class AsyncTrainingConfig(CpuDevice, BandAsyncGRPOConfig):
    """`BandAsyncGRPOConfig` with a rehearsal, which checks the range of numbers before the training begins.

    Raises:
        ValueError: A number is out of its range; TRL would drop every sample of a rehearsal; or ``lag`` is set without
            ``rehearse``.
    """

    # The option of this name is that of `ModelConfig`, which takes precedence in TRL as well.
    dtype: str = field(default="float32", init=False)
    rehearse: bool = field(
        default=False,
        metadata={
            "help": "Train on this CPU: this process samples, with weights of `lag` versions ago, in place of vLLM."
        },
    )
    lag: int | None = field(
        default=None,
        metadata={
            "help": "Versions between the newest weights and those that sample in a rehearsal; 2 if not given. "
            "TRL requests samples before the update on those before them, so data is up to one version older."
        },
    )

    def __post_init__(self) -> None:
        check_numbers(self)
        check_range(self, ("max_staleness",), lambda value: value >= 0, "at least 0")
        check_range(self, ("weight_sync_steps",), lambda value: value >= 1, "at least 1")
        if self.rehearse:
            self._set_rehearsal()
        elif self.lag is not None:
            raise InvalidValue(
                f"lag={self.lag}: with vLLM, the age of the data is what it is, up to max_staleness; leave lag out, or "
                "add --rehearse to train on this CPU on data of a chosen age"
            )
        super().__post_init__()

    def _set_rehearsal(self) -> None:
        """Set what a training on a CPU needs, and check that TRL accepts samples of the lag."""
        self.lag = 2 if self.lag is None else self.lag
        if self.lag > self.max_staleness:
            raise InvalidValue(
                f"max_staleness={self.max_staleness}: TRL drops samples that are more versions old, as all are in a "
                f"rehearsal with lag={self.lag}: raise it to {self.lag}, or lower lag"
            )
        self.use_cpu = True
        self.bf16 = False
        self.fp16 = False
        # The sampler's old weights are not in a checkpoint.
        self.save_strategy = "no"
        if self.token_budget is None:
            # TRL asks vLLM's server for it.
            self.token_budget = 0

    @property
    def updates_per_batch(self) -> int:
        """The number of optimizer steps on each batch."""
        return 1
