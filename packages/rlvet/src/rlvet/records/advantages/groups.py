"""Find which answers are of one group, and whether the recorded groups can be those of the advantages."""

from __future__ import annotations

import numpy as np

from rlvet.records.advantages.statistics import MAJORITY, distinct_index
from rlvet.records.recorded_advantages import Integers, RecordCase, RecordedAdvantages

FEWEST_GROUPS = 8
"""Number of groups from which it is judged whether they have a usual size."""


def group_index(data: RecordedAdvantages) -> Integers:
    """Return the index of each sequence's group, (sequences,).

    A number may be that of a prompt in the batch of a process or of all processes, or in the run. Of these it is what
    gives most groups the same size.
    """
    candidates = [
        distinct_index(data.batch, data.process, data.group),
        distinct_index(data.batch, data.group),
    ]
    if has_groups_of_several_batches(data):
        candidates.append(distinct_index(data.group))
    return max(candidates, key=_usual_share)


def has_groups_of_several_batches(data: RecordedAdvantages) -> bool:
    """Return whether numbers are those of the run, and the answers of a group may be in successive batches.

    An asynchronous trainer takes the answers for an update from a queue, wherever a group ends.
    """
    batch = distinct_index(data.step, data.batch)
    group = distinct_index(data.group)
    batches = int(batch.max(initial=0)) + 1
    group_of_pair, batch_of_pair = np.divmod(np.unique(group * batches + batch), batches)
    batches_of_group = np.bincount(group_of_pair)
    if not len(batches_of_group) or batches_of_group.max() < 2:
        return False
    # Numbers that begin anew in each batch are used by other batches too.
    last = np.zeros(len(batches_of_group), np.int64)
    first = np.full(len(batches_of_group), len(data.group))
    np.maximum.at(last, group_of_pair, batch_of_pair)
    np.minimum.at(first, group_of_pair, batch_of_pair)
    are_successive = bool((last - first + 1 == batches_of_group).all())
    return are_successive and len(batches_of_group) > int(np.bincount(batch_of_pair).max())


def complete_groups(data: RecordedAdvantages) -> RecordedAdvantages:
    """Return the data without the groups that a later or an earlier batch may continue, which is not recorded."""
    if not has_groups_of_several_batches(data):
        return data
    group = distinct_index(data.group)
    sizes = np.bincount(group)
    return data.select((sizes >= usual_size(sizes))[group])


def usual_size(sizes: Integers) -> int:
    """Return the most frequent number of answers of a group."""
    return int(np.bincount(sizes).argmax())


def _usual_share(group: Integers) -> float:
    """Return the share of groups that have the most frequent size; 0 without a group."""
    sizes = np.bincount(group)
    return float((sizes == usual_size(sizes)).mean()) if len(sizes) else 0.0


def unusual_sizes(case: RecordCase) -> str:
    """Say that groups have no usual size, so that they may be no whole groups; empty if most have the same."""
    recorded = case.recorded
    return describe_sizes(recorded.select(~np.isnan(recorded.group))) if case.whole_groups else ""


def describe_sizes(data: RecordedAdvantages) -> str:
    """Say that groups have no usual size; empty if most have the same, or if there are few groups.

    Args:
        data: Sequences that have a group.
    """
    group = group_index(data)
    sizes = np.bincount(group)
    if len(sizes) < FEWEST_GROUPS or _usual_share(group) > MAJORITY:
        return ""
    return (
        f"groups have {sizes.min()} to {sizes.max()} answers, and no size is that of most, as where a batch is split "
        "over losses that number their groups anew"
    )
