"""Check that masks count the sampled tokens, and that no answers are lost."""

from __future__ import annotations

import numpy as np

from rlvet._numbers import format_number, format_share
from rlvet.checks.findings import Finding, Kind
from rlvet.records.advantages.groups import (
    group_index,
    has_groups_of_several_batches,
    unusual_sizes,
    usual_size,
)
from rlvet.records.advantages.statistics import FEWEST_CORRELATED, MAJORITY, NEARLY_ALL, distinct_index
from rlvet.records.recorded_advantages import NO_TOKEN, RecordCase, RecordedAdvantages
from rlvet.records.registry import ADVANTAGES

NEARLY_EVERY = 0.8
"""Share of batches above which something counts as regular."""

FEWEST_BATCHES = 3
"""Number of batches, and of groups per batch, from which incomplete groups are judged."""

MICRO_BATCH_LOST = Kind(
    code="micro-batch-lost",
    severity="fix",
    meaning="the last part of a batch is missing from the losses, or its gradient is lost",
    condition=(
        "in nearly every batch one group lacks as many answers; or the tokens of the last micro-batch do "
        "not move with their advantages, as those of the others do"
    ),
    remedy=(
        "make the batch size a multiple of the micro-batch size, or keep the last, smaller micro-batch "
        "(drop_last=False) and step the optimizer after it"
    ),
    evidence=("group", "advantages"),
    source="timoschick/pet issue 36; simulated losses of `benchmarks/doctor`",
    scenarios=("last micro-batch dropped", "last micro-batch without gradient"),
)


@ADVANTAGES.check(
    "missing answers of a group",
    after="",
    tested="every group has all of its answers (share that has)",
    explained="in a record, every group has all of its answers",
    reports=(MICRO_BATCH_LOST,),
)
def check_groups(case: RecordCase) -> Finding:
    """Check that no micro-batch is left out of the updates on a batch, such as a last one that is smaller."""
    recorded = case.recorded
    has_group = ~np.isnan(recorded.group)
    if not has_group.any() or not case.whole_groups:
        return Finding("ok", None, "", advice="record group=")
    split = case.of(unusual_sizes)
    if split:
        return Finding("ok", None, "", advice=split)
    data = recorded.select(has_group)
    group = group_index(data)
    sizes = np.bincount(group)
    # The most frequent size is that of a complete group.
    group_size = usual_size(sizes)
    smaller_sizes = sizes[sizes < group_size]
    complete_share = float((sizes >= group_size).mean())
    measure = "share of groups with all of their answers"
    passed = Finding("ok", True, "", complete_share, None, len(sizes), measure=measure)
    if has_groups_of_several_batches(data):
        return passed

    is_in_one_process = int(distinct_index(group, data.process).max()) == int(group.max())
    batch = distinct_index(data.batch, data.process) if is_in_one_process else distinct_index(data.batch)
    batch_of_group = np.zeros(len(sizes), np.int64)
    batch_of_group[group] = batch
    incomplete_groups = np.bincount(batch_of_group, weights=sizes < group_size)
    groups_per_batch = float(np.bincount(batch_of_group).mean())
    if len(incomplete_groups) < FEWEST_BATCHES or not len(smaller_sizes) or groups_per_batch < FEWEST_BATCHES:
        return passed

    # A lost micro-batch makes one group of each batch smaller, by the same number of answers.
    smaller_size = int(np.median(smaller_sizes))
    is_same_size = float((smaller_sizes == smaller_size).mean()) > NEARLY_EVERY
    is_one_per_batch = float((incomplete_groups == 1).mean()) > NEARLY_EVERY
    if not (is_same_size and is_one_per_batch):
        return passed
    cause = (
        f"in nearly every batch one group has {group_size - smaller_size} of {group_size} answers fewer than the "
        "others: the last, smaller micro-batch is lost"
    )
    passed = passed._replace(figure=1 - complete_share, measure="share of groups that lack answers")
    return passed.failed(MICRO_BATCH_LOST, cause)


MASK = Kind(
    code="mask",
    severity="fix",
    meaning="the mask counts the prompt or the padding, excludes the end token, or counts nothing",
    condition=(
        "tokens at an end of sequences are far less probable than sampled ones, all answers to a prompt "
        "begin with one improbable token, finished answers lack an end token, or a loss counts no token"
    ),
    remedy=(
        "count only sampled tokens in the mask: the answer with its end token, without the prompt and the "
        "padding"
    ),
    evidence=("tokens", "truncated", "logp", "entropy"),
    source="verl-project/verl issue 3805, huggingface/trl pull request 4970; simulated masks of `benchmarks/doctor`",
    scenarios=("prompt in the mask", "padding in the mask", "end token outside the loss"),
)


@ADVANTAGES.check(
    "losses without a token",
    after="missing answers of a group",
    tested="every loss counts a token (share that does not)",
    explained="in a record, every loss counts a token",
    reports=(MASK,),
)
def check_losses(case: RecordCase) -> Finding:
    """Check that the mask of every loss counts at least one token."""
    recorded = case.recorded
    share = recorded.empty_losses / max(1, recorded.losses)
    measure = "share of losses that count no token"
    passed = Finding("ok", True, "", share, None, recorded.losses, measure=measure)
    if not recorded.empty_losses:
        return passed
    cause = (
        f"{recorded.empty_losses} of {recorded.losses} losses count no token, so nothing is learned from them"
    )
    severity = "fix" if share > 0.05 else "look"
    return passed.failed(MASK, cause, severity=severity, onset=recorded.first_empty_step)


COMMON_ENDS = 3
"""Number of the most frequent last tokens of answers. If most answers end with these, they are end tokens, or the ends
of stop strings."""


END_TOKENS = "end tokens in the mask"
PROMPTS = "prompts in the mask"


@ADVANTAGES.check(
    END_TOKENS,
    after="losses without a token",
    tested="the end token counts (share of finished answers that end with one)",
    explained="in a record, the end token counts",
    reports=(MASK,),
)
def check_ends(case: RecordCase) -> Finding:
    """Check that the mask counts the end token of answers that were not cut off.

    An end token occurs almost only at the end of answers. If the mask leaves it out, the last counted token is one that
    also occurs within answers.
    """
    recorded = case.recorded
    finished = (recorded.truncated == 0) & (recorded.last_token != NO_TOKEN) & (recorded.length > 1)
    last_ids = recorded.last_token[finished]
    # If no answer at all is marked as cut off, the program that wrote the record may not know which are.
    if not (recorded.truncated == 1).any():
        return Finding("ok", None, "", advice="needs truncated=, and an answer that was cut off")
    if len(last_ids) < FEWEST_CORRELATED or not len(recorded.token_counts):
        return Finding("ok", None, "", advice="record tokens= and truncated=")

    # An id is an end token if at least half of its other occurrences are at an end. The occurrence in the answer itself
    # is left out.
    counts = recorded.token_counts[last_ids] - 1
    end_counts = recorded.end_counts[last_ids] - 1
    is_end_token = 2 * end_counts >= np.maximum(counts, 1)
    share = float(is_end_token.mean())
    measure = "share of finished answers that end with an end token"
    passed = Finding("ok", True, "", share, None, len(last_ids), measure=measure)
    _, frequencies = np.unique(last_ids, return_counts=True)
    share_of_common = np.sort(frequencies)[::-1][:COMMON_ENDS].sum() / len(last_ids)
    if share > MAJORITY or share_of_common > 0.8:
        return passed
    cause = (
        f"{format_share(1 - share)} of finished answers end with a token that also occurs within answers: the mask "
        "leaves the end token out of the loss, so the policy does not learn to end its answers"
    )
    passed = passed._replace(
        figure=1 - share, measure="share of finished answers that end with another token"
    )
    return passed.failed(MASK, cause)


def share_of_identical(recorded: RecordedAdvantages) -> tuple[float, int]:
    """Return the share of prompts whose answers are all the same, and the number of prompts with several answers."""
    has_answer = ~np.isnan(recorded.group) & (recorded.answer != NO_TOKEN) & (recorded.length > 0)
    data = recorded.select(has_answer)
    if not len(data.answer):
        return 0.0, 0
    prompt = group_index(data)
    sizes = np.bincount(prompt)
    answers = distinct_index(prompt, data.answer)
    # The prompt of each distinct answer.
    prompt_of_answer = np.zeros(int(answers.max()) + 1, np.int64)
    prompt_of_answer[answers] = prompt
    distinct = np.bincount(prompt_of_answer, minlength=len(sizes))
    has_several = sizes > 1
    count = int(has_several.sum())
    return (float((distinct[has_several] == 1).mean()) if count else 0.0), count


FORCED_EVIDENCE = 30.0
"""Log-likelihood ratio (nats) above which equal first tokens in groups were not sampled for each answer."""

FORCED_PROBABILITY = 0.5
"""Geometric mean of the probabilities of equal first tokens above which they are no fault. Answers begin alike if the
policy is sure of their first token."""


@ADVANTAGES.check(
    PROMPTS,
    after=END_TOKENS,
    tested="the first counted token belongs to the answer",
    explained="in a record, the first counted token belongs to the answer",
    reports=(MASK,),
)
def check_prompts(case: RecordCase) -> Finding:
    """Check that the mask does not count prompts.

    If it does, all answers to a prompt have the same first counted token, although the policy would rarely sample it.
    """
    recorded = case.recorded
    has_data = ~np.isnan(recorded.group) & (recorded.first_token != NO_TOKEN)
    if not has_data.any():
        return Finding("ok", None, "", advice="record tokens= and group=")
    data = recorded.select(has_data)
    index = group_index(data)
    sizes = np.bincount(index)
    smallest_id = np.full(len(sizes), np.iinfo(np.int64).max)
    largest_id = np.full(len(sizes), NO_TOKEN)
    np.minimum.at(smallest_id, index, data.first_token)
    np.maximum.at(largest_id, index, data.first_token)
    has_several = sizes > 1
    equal = has_several & (smallest_id == largest_id)
    if not has_several.any():
        return Finding("ok", None, "", advice="record tokens= and group=")

    # The evidence that the first token was not sampled is how improbable it is, in nats, that all answers but one of a
    # group would have drawn the token of the remaining one.
    if share_of_identical(recorded)[0] >= NEARLY_ALL:
        return Finding("ok", None, "", advice="all answers to a prompt are the same")
    share = float(equal[has_several].mean())
    surprisals = -np.bincount(index, weights=data.first_logp) / sizes
    evidence = float((surprisals * (sizes - 1))[equal].sum())
    measure = "share of prompts whose answers begin with different tokens"
    passed = Finding("ok", True, "", 1 - share, None, int(has_several.sum()), measure=measure)
    if share < NEARLY_ALL or evidence < FORCED_EVIDENCE:
        return passed
    probability = float(np.exp(-surprisals[equal].mean()))
    if probability > FORCED_PROBABILITY:
        return passed
    cause = (
        f"the first counted token is the same in all answers to a prompt, though its probability is "
        f"{format_number(probability, 2)} in each: the mask counts the prompt, or a fixed beginning that was not "
        "sampled"
    )
    passed = passed._replace(figure=share, measure="share of prompts whose answers begin with one token")
    return passed.failed(MASK, cause)
