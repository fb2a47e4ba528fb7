"""What TRL's asynchronous trainer knows of each sample, on its way from the rollout queue to the loss.

TRL's `RolloutSample` has the version of the weights, the group and the reward of a sample. Its data set passes the
group and the metrics on to the collator, and the collator passes none of them to the loss. So `SampleQueue` puts each
sample into its own metrics, and `SampleCollator` adds a table to each batch, which `SampleTable` reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

SAMPLES = "bandpo_samples"
"""The key, in a batch of TRL, of a table with one row for each process, sample and column of `SampleTable`."""


class SampleMetrics(dict[str, float]):
    """The metrics of a sample, together with the sample."""

    def __init__(self, sample: Any) -> None:
        super().__init__(sample.metrics)
        self.sample = sample


class SampleQueue:
    """A queue of samples that puts each sample into its metrics; all else is that of the queue."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def get(self, *arguments: Any, **kwargs: Any) -> Any:
        """Return the next sample."""
        sample = self._queue.get(*arguments, **kwargs)
        sample.metrics = SampleMetrics(sample)
        return sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


class SampleCollator:
    """TRL's collator with a table of the samples in each batch.

    Args:
        collate: TRL's collator.
        step_of_version: The optimiser step at which each version of the weights was published.
        end_ids: The ids of the tokens that end a completion.
    """

    def __init__(
        self,
        collate: Callable[[Any], dict[str, Any]],
        step_of_version: Mapping[int, int],
        end_ids: Collection[int],
    ) -> None:
        self._collate = collate
        self._step_of_version = step_of_version
        self._end_ids = end_ids

    def __call__(self, examples: Any) -> dict[str, Any]:
        """Return the batch of a list with one micro-batch, whose items are the rows of the processes."""
        batch = self._collate(examples)
        (rows,) = examples
        table = [[self._row(example["metrics"].sample) for example in row.samples] for row in rows]
        longest = max(map(len, table))
        padding = [math.nan] * 4
        padded = [row + [padding] * (longest - len(row)) for row in table]
        # A float64 has the numbers of groups exactly, up to 2^53.
        return batch | {SAMPLES: torch.tensor(padded, dtype=torch.float64)}

    def _row(self, sample: Any) -> list[float]:
        """Return the columns of `SampleTable` for a sample; NaN for what is unknown."""
        version = self._step_of_version.get(int(sample.model_version), math.nan)
        reward = sample.metrics.get("reward", math.nan)
        is_truncated = int(sample.input_ids[-1]) not in self._end_ids
        return [version, sample.group_id, reward, is_truncated]


@dataclass(frozen=True)
class SampleTable:
    """What is known of the samples of one process's row, in the order of their segments."""

    version: Int[Tensor, " samples"] | None = None
    """The optimiser step of the weights at the start of each sample's group; None if one is unknown."""
    group: Int[Tensor, " samples"] | None = None
    """The number of each sample's group."""
    reward: Float[Tensor, " samples"] | None = None
    """The reward of each sample, NaN for one without a score; None if no sample has one."""
    truncated: Bool[Tensor, " samples"] | None = None
    """True for each sample that was cut off at the length limit."""

    @classmethod
    def of(cls, inputs: Mapping[str, Any], numbers: Int[Tensor, " samples"]) -> SampleTable:
        """Return the table of a batch.

        Args:
            inputs: The batch of one process, as `SampleCollator` made it; without a table nothing is known.
            numbers: The numbers of the samples in the row.
        """
        table = inputs.get(SAMPLES)
        if table is None:
            return cls()
        version, group, reward, truncated = table[0][numbers].unbind(-1)
        return cls(
            version=None if bool(version.isnan().any()) else version.long(),
            group=group.long(),
            reward=None if bool(reward.isnan().all()) else reward.float(),
            truncated=truncated.bool(),
        )
