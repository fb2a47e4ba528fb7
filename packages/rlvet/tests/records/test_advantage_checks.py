"""The checks of advantages on hand-made columns and on runs of the bench, and the collector that feeds them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlvet.records import recorded_advantages
from rlvet.records.advantage_checks import advantage_findings, advantage_notes
from rlvet.records.advantages import comparison, masks, rewards, signal
from rlvet.records.advantages.formulas import estimators
from rlvet.records.record import LossBatch
from rlvet.records.recorded_advantages import NO_TOKEN, RecordCase, RecordedAdvantages

BATCHES, PROMPTS, GROUP = 4, 6, 5
SEQUENCES = BATCHES * PROMPTS * GROUP


def of_columns(check):
    """Return a check as a function of the columns of a record."""
    return lambda recorded, **options: check(RecordCase(recorded, **options))


check_advantages = of_columns(comparison.check_advantages)
check_ends = of_columns(masks.check_ends)
check_groups = of_columns(masks.check_groups)
check_losses = of_columns(masks.check_losses)
check_prompts = of_columns(masks.check_prompts)
check_rewards = of_columns(rewards.check_rewards)
check_signal = of_columns(signal.check_signal)


def recorded(seed: int = 0, **columns) -> RecordedAdvantages:
    """Return sequences whose advantages are Dr. GRPO's, with rewards from 0 to 1."""
    generator = np.random.default_rng(seed)
    reward = generator.random(SEQUENCES).round(3)
    grouped = reward.reshape(-1, GROUP)
    batch = np.repeat(np.arange(BATCHES), PROMPTS * GROUP)
    defaults = {
        "batch": batch,
        "step": 10 * batch,
        "process": np.zeros(SEQUENCES, np.int64),
        "row": np.tile(np.arange(PROMPTS * GROUP), BATCHES),
        "advantage": (grouped - grouped.mean(1, keepdims=True)).ravel(),
        "uniform": np.ones(SEQUENCES),
        "reward": reward,
        "group": np.tile(np.repeat(np.arange(float(PROMPTS)), GROUP), BATCHES),
        "truncated": np.zeros(SEQUENCES),
        "length": generator.integers(2, 9, SEQUENCES),
        "answer": np.arange(SEQUENCES),
        "first_token": generator.integers(5, 9, SEQUENCES),
        "first_logp": np.full(SEQUENCES, -1.0),
        "last_token": np.full(SEQUENCES, 1),
        "token_counts": np.array([0, SEQUENCES, 50, 50]),
        "end_counts": np.array([0, SEQUENCES, 5, 5]),
        "losses": BATCHES,
    }
    return RecordedAdvantages(**(defaults | columns))


def expected(name: str, data: RecordedAdvantages) -> np.ndarray:
    """Return what an estimator makes of the rewards of `recorded`."""
    group = np.repeat(np.arange(BATCHES * PROMPTS), GROUP)
    return estimators(data.reward, group, data.batch, data.length)[name]


UNKNOWN = np.full(SEQUENCES, math.nan)


def test_estimators_by_hand():
    reward, length = np.array([0.0, 1.0, 1.0, 4.0]), np.array([1, 3, 1, 1])
    values = estimators(reward, np.array([0, 0, 1, 1]), np.zeros(4, np.int64), length)
    assert values["Dr. GRPO"].tolist() == [-0.5, 0.5, -1.5, 1.5]
    assert values["RLOO"].tolist() == [-1, 1, -3, 3]
    assert values["GRPO"] == pytest.approx([-0.7071, 0.7071, -0.7071, 0.7071], abs=2e-4)
    assert values["GRPO (standard deviation with n)"] == pytest.approx([-1, 1, -1, 1], abs=3e-4)
    assert values["the batch's mean as baseline"].tolist() == [-1.5, -0.5, -0.5, 2.5]
    assert values["batch normalisation"] == pytest.approx(
        np.array([-1.5, -0.5, -0.5, 2.5]) / 1.732051, rel=1e-4
    )
    tokens = np.array([0, 1, 1, 1, 1, 4])
    assert values["batch normalisation over tokens"] == pytest.approx(
        (reward - tokens.mean()) / tokens.std(), rel=1e-4
    )
    assert values["OPO"].tolist() == [-0.75, 0.25, -1.5, 1.5]


@pytest.mark.parametrize(
    "name", list(estimators(np.zeros(1), np.zeros(1, int), np.zeros(1, int), np.ones(1, int)))
)
def test_the_estimator_that_fits_is_named(name):
    data = recorded()
    data = replace(data, advantage=expected(name, data).astype(np.float32).astype(float))
    (note,) = advantage_notes(data)
    # Two epsilons hardly differ where rewards do.
    assert note.startswith(f"advantages are those of {name.partition(' (epsilon')[0]}"), note
    assert "in all 4 batches" in note
    assert check_advantages(data).ok is not False


def test_a_constant_factor_is_no_fault():
    data = recorded()
    assert "Dr. GRPO times 3" in advantage_notes(replace(data, advantage=3 * data.advantage))[0]


def test_all_checks_pass_on_a_healthy_run():
    findings = advantage_findings(recorded())
    assert {finding.code for finding in findings} == {"ok"}
    assert [finding.ok for finding in findings] == [True, True, None, True, True, True, None]


class TestDepartures:
    def test_from_a_batch_on(self):
        data = recorded()
        finding = check_advantages(replace(data, advantage=np.where(data.batch < 2, 1, -1) * data.advantage))
        assert (finding.code, finding.onset) == ("reward-sign", 20)
        assert finding.cause.startswith("from step 20 on advantages are negated")

    def test_one_process(self):
        data = recorded()
        process = data.group.astype(int) // 3
        advantage = np.where(process == 1, 0.0, data.advantage)
        finding = check_advantages(replace(data, process=process, advantage=advantage))
        assert finding.code == "advantages"
        assert finding.cause.startswith("on process 1 advantages are 0, while on the others")

    def test_positive_only(self):
        data = recorded()
        finding = check_advantages(replace(data, advantage=np.maximum(0.0, data.advantage)))
        assert (finding.code, "only positive ones are left" in finding.cause) == ("advantages", True)

    def test_answers_that_are_left_out(self):
        data = recorded()
        kept = np.random.default_rng(1).random(SEQUENCES) > 0.2
        finding = check_advantages(data.select(kept))
        assert (finding.code, "were left out after the advantages" in finding.cause) == ("advantages", True)

    def test_answers_without_a_counted_token_are_no_fault(self):
        """TRL's mask_truncated_completions: they are in the mean of their group, and have no advantage."""
        data = recorded()
        masked = np.random.default_rng(1).random(SEQUENCES) > 0.8
        assert check_advantages(replace(data, advantage=np.where(masked, math.nan, data.advantage))).ok

    def test_ties(self):
        data = recorded(reward=np.repeat([[0.0], [1.0]], GROUP, 1).repeat(BATCHES * PROMPTS // 2, 0).ravel())
        reward = data.reward.copy()
        reward[:GROUP] = [0, 0, 1, 1, 1]
        data = replace(data, reward=reward)
        advantage = expected("GRPO", data) + np.where(
            np.arange(SEQUENCES) >= GROUP, np.tile([1, -1, 1, -1, 0], 24), 0
        )
        finding = check_advantages(replace(data, advantage=advantage))
        assert (finding.code, finding.cause[:40]) == (
            "advantages",
            "in 23 of 23 groups with equal rewards, a",
        )

    def test_another_order(self):
        data = recorded()
        finding = check_advantages(
            replace(data, advantage=np.roll(data.advantage.reshape(BATCHES, -1), 1, 1).ravel())
        )
        assert finding.code == "advantages"
        assert "in another order" in finding.cause

    def test_prompts_that_are_compared(self):
        data = recorded()
        finding = check_advantages(replace(data, advantage=expected("batch normalisation", data)))
        assert (finding.code, finding.severity, finding.ok) == ("grouping", "look", None)

    def test_other_groups(self):
        data = recorded()
        order = np.concatenate([30 * k + np.random.default_rng(k).permutation(30) for k in range(BATCHES)])
        advantage = np.empty(SEQUENCES)
        advantage[order] = expected("GRPO", replace(data, reward=data.reward[order]))
        finding = check_advantages(replace(data, advantage=advantage))
        assert (finding.code, finding.cause[:50]) == (
            "grouping",
            "each batch is centred and groups are not, and answ",
        )

    def test_batch_normalisation_of_single_answers_is_none(self):
        data = recorded(group=np.tile(np.arange(float(PROMPTS * GROUP)), BATCHES))
        assert check_advantages(replace(data, advantage=expected("batch normalisation", data))).ok

    def test_a_formula_that_is_not_known(self):
        data = recorded()
        shaped = replace(data, advantage=data.advantage**3 + 0.1 * data.advantage)
        assert check_advantages(shaped).ok
        assert "but match no known formula" in advantage_notes(shaped)[0]

    def test_a_critic(self):
        data = recorded(uniform=np.zeros(SEQUENCES))
        assert check_advantages(data).ok
        assert "as a critic's do" in advantage_notes(data)[0]
        assert check_advantages(replace(data, advantage=-data.advantage)).code == "reward-sign"

    def test_no_relation(self):
        data = recorded()
        noise = np.random.default_rng(5).standard_normal(SEQUENCES)
        finding = check_advantages(replace(data, advantage=noise))
        assert finding.code in ("advantages", "ok")
        assert "record reward= and group=" in advantage_notes(replace(data, reward=UNKNOWN, group=UNKNOWN))[0]

    @pytest.mark.parametrize("column", ["reward", "group"])
    def test_what_is_not_recorded_is_named(self, column):
        finding = check_advantages(replace(recorded(), **{column: UNKNOWN}))
        assert (finding.ok, finding.advice) == (None, f"record {column}=")


class TestSignal:
    def test_it_needs_advantages(self):
        assert check_signal(recorded(advantage=UNKNOWN)).ok is None

    def test_flat_rewards(self):
        flat = recorded(reward=np.full(SEQUENCES, 0.5), advantage=np.zeros(SEQUENCES))
        assert check_signal(flat).cause == "every reward is 0.5, so nothing can be learned"
        cut = check_signal(replace(flat, truncated=(np.arange(SEQUENCES) % 4 > 0).astype(float)))
        assert (cut.code, cut.cause) == ("truncated", "75% of answers are cut off, and every reward is 0.5")

    @pytest.mark.parametrize("rewards_are_known", [True, False])
    def test_no_advantages(self, rewards_are_known):
        data = recorded(advantage=np.zeros(SEQUENCES))
        finding = check_signal(data if rewards_are_known else replace(data, reward=UNKNOWN))
        assert (finding.code, finding.figure) == ("no-signal", 1.0)
        assert finding.or_else == (() if rewards_are_known else ("reward-flat",))

    def test_one_batch_with_signal_is_enough(self):
        data = recorded()
        assert check_signal(replace(data, advantage=data.advantage * (data.batch == 0))).ok

    def test_one_and_the_same_advantage(self):
        assert check_signal(recorded(advantage=np.ones(SEQUENCES))).code == "no-signal"

    def test_large_advantages(self):
        assert check_signal(recorded(advantage=4000 * recorded().advantage)).code == "advantage-scale"


class TestRewards:
    def test_noise_of_equal_answers(self):
        answer = np.repeat(np.arange(SEQUENCES // GROUP), GROUP)
        finding = check_rewards(recorded(answer=answer))
        assert finding.code == "reward-noise"
        assert finding.figure == pytest.approx(1.0)

    def test_a_judge_with_a_little_noise_is_healthy(self):
        generator = np.random.default_rng(3)
        answer = np.tile([0, 0, 1, 1, 2], SEQUENCES // GROUP)
        reward = answer / 2 + 0.02 * generator.standard_normal(SEQUENCES)
        assert check_rewards(recorded(answer=answer, reward=reward)).ok
        # Where every answer is right, its noise is all that is left.
        reward = 1 + 0.02 * generator.standard_normal(SEQUENCES)
        reward[:30] -= 1
        assert check_rewards(recorded(answer=np.zeros(SEQUENCES, int), reward=reward)).ok

    def test_it_needs_equal_answers(self):
        assert check_rewards(recorded()).ok is None
        assert check_rewards(recorded(answer=np.full(SEQUENCES, NO_TOKEN))).ok is None


class TestEnds:
    def test_end_tokens_outside_the_loss(self):
        """Ids 2 to 11 stand at the end as often as anywhere."""
        last = 2 + np.arange(SEQUENCES) % 10
        data = recorded(
            last_token=last,
            token_counts=np.array([0, 0] + [60] * 10),
            end_counts=np.array([0, 0] + [12] * 10),
            truncated=(np.arange(SEQUENCES) < 3).astype(float),
        )
        assert check_ends(data).code == "mask"
        # A stop string leaves one and the same.
        assert check_ends(replace(data, last_token=np.full(SEQUENCES, 2))).ok
        # Of answers that were cut off nothing is known.
        assert check_ends(replace(data, truncated=np.ones(SEQUENCES))).ok is None
        # A writer may say of every answer that it was finished.
        assert check_ends(replace(data, truncated=np.zeros(SEQUENCES))).ok is None


class TestPrompts:
    @pytest.mark.parametrize(
        ("probability", "code"),
        [(0.01, "mask"), (0.3, "mask"), (0.6, "ok"), (0.94, "ok")],
    )
    def test_answers_that_begin_alike(self, probability, code):
        """They do so by themselves where the policy is sure of the first token, in however many groups."""
        first = np.repeat(np.arange(BATCHES * PROMPTS), GROUP)
        data = recorded(first_token=first, first_logp=np.full(SEQUENCES, math.log(probability)))
        # Evidence adds up over groups: as many as make it large at any probability.
        copies = 40
        columns = {
            name: np.tile(getattr(data, name), copies) for name in ("process", "first_token", "first_logp")
        }
        for name in ("advantage", "uniform", "reward", "group", "truncated", "length", "row"):
            columns[name] = np.tile(getattr(data, name), copies)
        batch = np.concatenate([data.batch + BATCHES * copy for copy in range(copies)])
        answer = np.arange(copies * SEQUENCES)
        last_token = np.tile(data.last_token, copies)
        many = recorded(batch=batch, step=10 * batch, answer=answer, last_token=last_token, **columns)
        finding = check_prompts(many)
        assert finding.code == code
        if code == "mask":
            assert f"its probability is {probability:.2g} in each" in finding.cause

    def test_answers_that_begin_with_other_tokens(self):
        assert check_prompts(recorded()).ok


def test_what_rounding_leaves_of_equal_rewards_is_no_departure():
    """In most groups of the later batches all rewards are equal, as those of a policy that has collapsed."""
    data = recorded()
    reward = np.where(data.batch >= 1, 0.62, data.reward)
    reward[-GROUP:] = data.reward[-GROUP:]
    advantage = expected("GRPO", replace(data, reward=reward))
    tied = (data.batch >= 1) & (np.arange(SEQUENCES) < SEQUENCES - GROUP)
    run = replace(data, reward=reward, advantage=np.where(tied, 6e-4, advantage))
    assert check_advantages(run).ok
    assert advantage_notes(run) == [f"advantages are those of GRPO, in all {BATCHES} batches"]
    # What is divided by nearly 0 is no rounding.
    run = replace(run, advantage=np.where(tied, np.where(np.arange(SEQUENCES) % 2, 0.9, -0.9), advantage))
    assert check_advantages(run).code == "advantages"


class TestGroups:
    def test_the_last_micro_batch(self):
        data = recorded()
        kept = np.arange(SEQUENCES) % (PROMPTS * GROUP) < PROMPTS * GROUP - 2
        finding = check_groups(data.select(kept))
        assert finding.code == "micro-batch-lost"
        assert f"2 of {GROUP} answers fewer" in finding.cause
        # It is the first cause, as advantages are then not those of their groups.
        assert advantage_findings(data.select(kept))[0].code == "micro-batch-lost"
        # Of a micro-batch of a shuffled batch, answers are always missing.
        assert check_groups(data.select(kept), whole_groups=False).ok is None

    def test_answers_that_are_missing_here_and_there(self):
        data = recorded()
        generator = np.random.default_rng(0)
        assert check_groups(data.select(generator.random(SEQUENCES) < 0.95)).ok
        # Of these, fewer than half of the groups have the same size, so nothing says how many answers they should have.
        assert check_groups(data.select(generator.random(SEQUENCES) < 0.7)).ok is None
        assert check_groups(data).ok


def drawn(sizes_of_batches, group_size, *, seed=0, binary=False, processes=1):
    """Return sequences with Dr. GRPO's advantages, whose groups are numbered over the run, in the order of the groups.

    Args:
        sizes_of_batches: The number of sequences of each batch.
        group_size: The number of answers of a group.
        seed: The seed of the rewards.
        binary: True for rewards of 0 and 1.
        processes: The number of processes, each with successive sequences of a batch.
    """
    generator = np.random.default_rng(seed)
    count = sum(sizes_of_batches)
    reward = generator.random(count).round(3)
    if binary:
        reward = (reward < np.repeat(generator.random(count // group_size), group_size)).astype(float)
    grouped = reward.reshape(-1, group_size)
    batch = np.repeat(np.arange(len(sizes_of_batches)), sizes_of_batches)
    row = np.concatenate([np.arange(size) for size in sizes_of_batches])
    process = np.concatenate([np.arange(size) * processes // size for size in sizes_of_batches])
    columns = {
        "batch": batch,
        "step": 10 * batch,
        "process": process,
        "row": row,
        "advantage": (grouped - grouped.mean(1, keepdims=True)).ravel(),
        "uniform": np.ones(count),
        "reward": reward,
        "group": np.repeat(np.arange(float(count // group_size)), group_size),
        "truncated": np.zeros(count),
        "length": generator.integers(2, 9, count),
        "answer": np.arange(count),
        "first_token": generator.integers(5, 9, count),
        "first_logp": np.full(count, -1.0),
        "last_token": np.full(count, 1),
    }
    counts = {"token_counts": np.array([0, count, 50, 50]), "end_counts": np.array([0, count, 5, 5])}
    return RecordedAdvantages(**columns, **counts, losses=len(sizes_of_batches))


def numbered_in_losses(data: RecordedAdvantages, losses: int, seed: int = 0) -> RecordedAdvantages:
    """Shuffle each batch over losses, each of which numbers its groups from 0, as a record once did in TRL."""
    generator = np.random.default_rng(seed)
    order, group = [], []
    for batch in np.unique(data.batch):
        shuffled = generator.permutation(np.flatnonzero(data.batch == batch))
        for rows in np.split(shuffled, losses):
            order.append(rows)
            group.append(np.unique(data.group[rows], return_inverse=True)[1].astype(float))
    return replace(data.select(np.concatenate(order)), group=np.concatenate(group))


class TestSplitGroups:
    @pytest.mark.parametrize("binary", [False, True])
    @pytest.mark.parametrize(("group_size", "losses"), [(16, 8), (8, 4), (4, 12)])
    def test_numbers_of_each_loss_are_no_groups(self, group_size, losses, binary):
        """They are said to be none, and no fault of the advantages is."""
        for seed in range(5):
            whole = drawn([192] * 3, group_size, seed=seed, binary=binary)
            data = numbered_in_losses(whole, losses, seed)
            assert not [finding.code for finding in advantage_findings(data) if finding.cause]
            for finding in (check_groups(data), check_advantages(data)):
                assert finding.ok is None
                assert "answers, and no size is that of most" in finding.advice
            (note,) = advantage_notes(data)
            assert note.startswith("the formula of the advantages was not tested: groups have ")

    def test_numbers_of_the_batch_are_groups_in_any_order(self):
        whole = drawn([192] * 3, 16)
        shuffled = whole.select(np.random.default_rng(0).permutation(len(whole.group)))
        assert advantage_notes(shuffled) == ["advantages are those of Dr. GRPO, in all 3 batches"]
        assert check_groups(shuffled).ok
        assert check_advantages(shuffled).ok

    def test_a_wrong_sign_shows_without_groups(self):
        data = numbered_in_losses(drawn([192] * 3, 16), 8)
        finding = check_advantages(replace(data, advantage=-data.advantage))
        assert finding.code == "reward-sign"

    def test_equal_answers_to_different_prompts_are_no_noise(self):
        whole = drawn([192] * 3, 16, binary=True)
        data = numbered_in_losses(replace(whole, answer=np.arange(len(whole.group)) % 3), 8)
        assert check_rewards(data).ok is not False

    def test_few_groups_are_judged_as_before(self):
        data = drawn([60], 20)
        kept = np.isin(np.arange(60), [0, 20, 21, 40, 41, 42], invert=True)
        assert check_groups(data.select(kept)).ok

    def test_answers_left_out_of_large_groups_are_still_found(self):
        data = drawn([320] * 3, 16)
        kept = np.random.default_rng(1).random(len(data.group)) > 0.2
        finding = check_advantages(data.select(kept))
        assert (finding.code, "were left out after the advantages" in finding.cause) == ("advantages", True)
        assert check_groups(data.select(kept)).ok is None


class TestGroupsOfSeveralBatches:
    """An asynchronous trainer takes answers from a queue, and a group may be in the batches of two steps."""

    @pytest.mark.parametrize("size", [24, 20, 8, 40])
    def test_they_are_whole(self, size):
        data = drawn([size] * (960 // size), 16)
        finding = check_groups(data)
        assert finding.ok
        assert finding.figure == 1
        (note,) = advantage_notes(data)
        assert note.startswith("advantages are those of Dr. GRPO in groups of several batches, in all ")
        assert not [finding.code for finding in advantage_findings(data) if finding.cause]

    def test_a_record_may_begin_and_end_within_a_group(self):
        data = drawn([24] * 40, 16)
        part = data.select((data.batch > 0) & (data.batch < 38))
        assert not [finding.code for finding in advantage_findings(part) if finding.cause]
        assert "of Dr. GRPO in groups of several batches" in advantage_notes(part)[0]

    def test_numbers_of_each_batch_are_not_those_of_the_run(self):
        data = drawn([192] * 3, 16)
        repeated = replace(data, group=data.group % 12)
        kept = repeated.row < 192 - 3
        assert check_groups(repeated.select(kept)).code == "micro-batch-lost"


class TestGroupsOfSeveralProcesses:
    def test_half_a_group_in_each_is_no_lost_micro_batch(self):
        data = drawn([11 * 16] * 4, 16, processes=2)
        finding = check_groups(replace(data, group=data.group % 11))
        assert (finding.ok, finding.figure) == (True, 1)

    def test_a_micro_batch_that_one_of_them_loses(self):
        data = drawn([12 * 16] * 4, 16, processes=2)
        kept = data.row != 95
        of_process = replace(data, group=data.group % 6)
        assert check_groups(of_process.select(kept)).ok
        assert check_groups(of_process.select(data.row % 96 < 92)).code == "micro-batch-lost"


def make_loss(values: list[float], *, generation: int = 0, update: int | None = 0, **columns) -> LossBatch:
    """Return a loss of sequences of two tokens whose old log-probabilities are of their advantage."""
    rows = len(values)
    array = np.array(values, np.float32)[:, None].repeat(2, 1)
    defaults = {
        "location": "run/tokens-00003-0001.arrow, call 1",
        "step": 5 * generation,
        "method": None,
        "anchor": "trainer",
        "framework": "",
        "log_ratio": np.zeros((rows, 2), np.float32),
        "logp_old": -np.abs(array) - 1,
        "advantages": array,
        "mask": np.ones((rows, 2), bool),
        "generation": generation,
        "update": update,
    }
    return LossBatch(**(defaults | columns))


class TestCollector:
    def test_a_second_pass_is_left_out_and_equal_answers_are_kept(self):
        losses = [
            make_loss([1, 1, -2]),
            make_loss([3]),
            make_loss([1, 1, -2], update=1),
            make_loss([3], update=1),
        ]
        data = RecordedAdvantages.of(losses)
        assert data.advantage.tolist() == [1, 1, -2, 3]
        assert (data.process.tolist(), data.row.tolist()) == ([3] * 4, [0, 1, 2, 3])

    def test_a_second_pass_without_numbers(self):
        losses = [
            make_loss([1, 2], update=None),
            make_loss([1, 2], update=None),
            make_loss([1, 3], update=None),
        ]
        assert RecordedAdvantages.of(losses).advantage.tolist() == [1, 2, 1, 3]

    def test_equal_answers_in_every_part_of_a_single_pass(self):
        """A policy that is sure of its answers gives many equal ones, and an update may see no other."""
        parts = [[1.0, 1.0, -2.0], [1.0, -2.0], [1.0, 1.0]]
        losses = [make_loss(part, update=update) for update, part in enumerate(parts)]
        assert RecordedAdvantages.of(losses).advantage.tolist() == [1, 1, -2, 1, -2, 1, 1]

    def test_passes_in_parts_that_are_drawn_anew(self):
        parts = [[1.0, 1.0], [-2.0, 3.0], [3.0, 1.0], [1.0, -2.0]]
        losses = [make_loss(part, update=update) for update, part in enumerate(parts)]
        assert RecordedAdvantages.of(losses).advantage.tolist() == [1, 1, -2, 3]

    @pytest.mark.parametrize("update", [0, None])
    def test_equal_answers_after_batches_that_told_the_passes(self, update):
        """In the second batch all answers but one are equal."""
        batches = [[[1, 2], [3, 4], [1, 2], [3, 4]], [[5, 5], [5, 6], [5, 5], [5, 6]]]
        losses = []
        for generation, parts in enumerate(batches):
            for number, part in enumerate(parts):
                known = None if update is None else number
                losses.append(make_loss(part, generation=generation, update=known))
        assert RecordedAdvantages.of(losses).advantage.tolist() == [1, 2, 3, 4, 5, 5, 5, 6]

    def test_a_last_batch_that_is_cut_off(self):
        parts = [[1, 2], [3, 4], [1, 2], [3, 4]]
        losses = [make_loss(part, update=update) for update, part in enumerate(parts)]
        losses += [make_loss(part, generation=1, update=update) for update, part in enumerate(parts[:3])]
        assert RecordedAdvantages.of(losses).advantage.tolist() == [1, 2, 3, 4, 1, 2, 3, 4]

    def test_a_second_pass_without_damaged_sequences(self):
        mask = np.array([[True, True], [False, False]])
        losses = [
            make_loss([1, 2]),
            make_loss([3, 4], update=1),
            make_loss([1, 2], update=2, mask=mask, bad_sequences=1),
            make_loss([3, 4], update=3),
        ]
        assert RecordedAdvantages.of(losses).advantage.tolist() == [1, 2, 3, 4]

    def test_tokens_with_different_advantages(self):
        loss = make_loss([0, 2], advantages=np.array([[1, 3], [2, 2]], np.float32))
        data = RecordedAdvantages.of([loss])
        assert (data.advantage.tolist(), data.uniform.tolist()) == ([2, 2], [0, 1])

    def test_losses_without_a_token(self):
        empty = {"mask": np.zeros((1, 2), bool)}
        losses = [make_loss([1]), make_loss([2], generation=1, **empty)]
        data = RecordedAdvantages.of(
            [*losses, make_loss([2], generation=2, truncated=np.array([True]), **empty)]
        )
        assert (data.losses, data.empty_losses, data.first_empty_step) == (3, 1, 5)
        finding = check_losses(data)
        assert (finding.code, finding.onset) == ("mask", 5)

    def test_a_long_run_is_thinned_out(self, monkeypatch):
        monkeypatch.setattr(recorded_advantages, "SEQUENCES", 8)
        data = RecordedAdvantages.of([make_loss([float(k), 0.5], generation=k) for k in range(20)])
        assert data.batch.tolist() == [0, 0, 8, 8, 16, 16]

    def test_nothing(self):
        data = RecordedAdvantages.of([])
        assert not any(finding.cause for finding in advantage_findings(data))


@pytest.mark.parametrize("seed", [1, 2])
def test_a_healthy_run_of_the_bench(tmp_path: Path, seed: int):
    from doctor.advantage_faults import Setting, train
    from rlvet import diagnose

    train(tmp_path, "", Setting(seed, estimator="RLOO", processes=2))
    diagnosis = diagnose(tmp_path)
    assert diagnosis.healthy
    notes = [note for note in diagnosis.notes if note.startswith("advantages")]
    assert notes == ["advantages are those of RLOO, in all 6 batches"]
    assert "advantages are those of RLOO" in str(diagnosis)


@pytest.mark.parametrize("name", ["sign flipped midway", "one rank negated", "prompt inside the loss"])
def test_a_fault_of_the_bench(tmp_path: Path, name: str):
    from doctor.advantage_faults import FAULTS, Setting, score, train
    from rlvet import diagnose

    train(tmp_path, name, Setting(7, processes=2))
    assert score(FAULTS[name], diagnose(tmp_path)) == "right"
