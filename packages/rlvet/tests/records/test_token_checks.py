"""Each token check on hand-made columns, passing and failing; and the first pass that they are computed from."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from rlvet.checks.findings import Coverage, Finding
from rlvet.checks.log.engine import STALE_WEIGHTS, WEIGHT_SYNC
from rlvet.records import first_pass as first_pass_module
from rlvet.records.first_pass import AdvantageSlopes, FirstPass
from rlvet.records.record import LossBatch
from rlvet.records.token_checks import token_findings
from rlvet.records.tokens.engine import check_engine
from rlvet.records.tokens.numbers import check_numbers
from rlvet.records.tokens.ratio import check_ratio
from rlvet.records.tokens.surprisal import check_surprisal
from rlvet.records.tokens.updates import check_updates

BATCHES, PROMPTS, GROUP, LENGTH = 2, 8, 4, 6
SEQUENCES = BATCHES * PROMPTS * GROUP
TOKENS = SEQUENCES * LENGTH


def healthy(seed: int = 0) -> FirstPass:
    """Return a first pass that every check passes: the entropy is the mean surprisal of each sequence."""
    generator = np.random.default_rng(seed)
    logp = generator.uniform(-2.0, -0.5, (SEQUENCES, LENGTH))
    rewards = generator.permuted(np.tile(np.arange(GROUP) / GROUP, (BATCHES * PROMPTS, 1)), axis=1)
    advantages = rewards - rewards.mean(1, keepdims=True)
    position = np.tile(np.arange(LENGTH), SEQUENCES)
    return FirstPass(
        logp=logp.ravel(),
        logp_old=logp.ravel(),
        logp_rollout=logp.ravel() + 0.01 * generator.standard_normal(TOKENS),
        entropy=np.repeat(-logp.mean(1), LENGTH),
        lag=np.zeros(TOKENS),
        position=position,
        remaining=LENGTH - 1 - position,
        sequence=np.repeat(np.arange(SEQUENCES), LENGTH),
        before_updates=np.ones(SEQUENCES, bool),
        batch=np.repeat(np.arange(BATCHES), PROMPTS * GROUP),
        advantage=advantages.ravel(),
        group=np.tile(np.repeat(np.arange(float(PROMPTS)), GROUP), BATCHES),
        reward=rewards.ravel(),
        truncated=np.zeros(SEQUENCES),
        answer_ids=range(SEQUENCES),
    )


def noise(scale: float) -> np.ndarray:
    """Return a difference of the same size and random sign at every token."""
    return scale * np.random.default_rng(1).choice([-1.0, 1.0], TOKENS)


UNKNOWN = np.full(TOKENS, math.nan)


def test_all_checks_pass_on_a_healthy_run():
    findings = token_findings(healthy())
    assert [finding.ok for finding in findings] == [True, True, True, True, None]
    assert {finding.code for finding in findings} == {"ok"}


def test_a_failure_ends_the_checks_of_the_policies():
    run = healthy()
    findings = token_findings(replace(run, logp=run.logp + noise(0.3)))
    assert [finding.code for finding in findings] == ["ok", "dropout", "ok"]


class TestFinding:
    def test_of_computes_the_mean_and_its_standard_error(self):
        finding = Finding.of("a property", np.array([1.0, 2.0, 4.0]), 30)
        assert finding.figure == pytest.approx(7 / 3)
        assert finding.error == pytest.approx(np.std([1, 2, 4], ddof=1) / math.sqrt(3))
        assert (finding.ok, finding.n) == (True, 30)

    def test_of_one_batch_has_no_standard_error(self):
        assert Finding.of("a property", [2.0], 3).error is None

    def test_of_lets_nan_through(self):
        finding = Finding.of("a property", [1.0, math.nan], 3)
        assert finding.error is not None
        assert math.isnan(finding.error)

    def test_failed_keeps_the_figure_and_adds_the_advice(self):
        finding = Finding.of("a property", [2.0], 3).failed(STALE_WEIGHTS, "a cause", WEIGHT_SYNC)
        assert (finding.code, finding.ok, finding.figure) == ("stale", False, 2.0)
        assert finding.or_else == ("weight-sync",)
        assert finding.advice

    def test_untested_neither_passes_nor_fails(self):
        finding = Finding("ok", None, "a property", advice="record it")
        assert (finding.ok, finding.cause, finding.advice) == (None, "", "record it")


class TestCoverage:
    def test_of_a_part(self):
        coverage = Coverage(tokens=10, total_tokens=15, batches=2, total_batches=2)
        assert not coverage.complete
        assert str(coverage) == "looked at 10 of 15 tokens (67%), in all 2 batches"
        assert coverage.part == "67% of the tokens"
        assert coverage.as_json() == {"tokens": 10, "total_tokens": 15, "batches": 2, "total_batches": 2}

    def test_of_some_batches(self):
        coverage = Coverage(tokens=10, total_tokens=1000, batches=3, total_batches=8)
        assert str(coverage) == "looked at 10 of 1,000 tokens (1%), in 3 of 8 batches from first to last"

    def test_of_one_batch(self):
        assert str(Coverage(10, 10, 1, 1)) == "looked at all 10 tokens of 1 batch"
        assert str(Coverage(5, 10, 1, 1)) == "looked at 5 of 10 tokens (50%), in its one batch"


class TestNumbers:
    def test_bad_sequences_fail(self):
        finding = check_numbers(replace(healthy(), bad_sequences=3))
        assert (finding.code, finding.n) == ("nan", SEQUENCES + 3)
        assert finding.cause.startswith("3 of 67 sequences hold NaN")

    def test_an_empty_record_passes(self):
        assert check_numbers(FirstPass()).ok


class TestRatio:
    def test_it_needs_a_policy_in_training(self):
        assert check_ratio(replace(healthy(), logp=UNKNOWN)).ok is None

    def test_it_needs_losses_before_updates(self):
        run = replace(healthy(), before_updates=np.zeros(SEQUENCES, bool))
        assert check_ratio(run).ok is None

    def test_tokens_that_are_known_to_be_stale_are_left_out(self):
        run = healthy()
        lag = np.where(run.sequence == 0, 0.0, 1.0)
        logp = run.logp + np.where(lag > 0, 0.5, 0.0)
        finding = check_ratio(replace(run, lag=lag, logp=logp))
        assert (finding.ok, finding.n) == (True, LENGTH)

    @pytest.mark.parametrize(("fresh_noise", "code"), [(0.0, "ok"), (0.005, "ok"), (0.3, "dropout")])
    def test_of_old_data_around_the_sampler_only_fresh_tokens_show_a_fault(self, fresh_noise, code):
        """Tokens of an asynchronous run have other ratios than 1 because of their age, unless they have none."""
        run = healthy()
        lag = 2.0 * (run.sequence % 2)
        logp = run.logp + np.where(lag > 0, noise(0.5), noise(fresh_noise))
        finding = check_ratio(
            replace(run, lag=lag, logp=logp, logp_rollout=run.logp_old, anchored_at_rollout=True)
        )
        assert (finding.ok, finding.code) == (code == "ok", code)
        assert finding.n == (lag == 0).sum()

    @pytest.mark.parametrize("anchored_at_rollout", [True, False])
    def test_without_a_fresh_token_it_is_undecided(self, anchored_at_rollout):
        run = healthy()
        old = replace(run, lag=np.full_like(run.logp, 2.0), logp=run.logp + noise(0.5))
        if anchored_at_rollout:
            old = replace(old, logp_rollout=run.logp_old, anchored_at_rollout=True)
        finding = check_ratio(old)
        assert (finding.ok, finding.advice) == (
            None,
            "record fresh data too: older weights sampled all of this",
        )
        assert check_ratio(replace(old, lag=UNKNOWN)).ok is False

    def test_one_exact_batch_excuses_the_others(self):
        run = healthy()
        in_first_batch = run.batch[run.sequence] == 0
        assert check_ratio(replace(run, logp=run.logp + np.where(in_first_batch, 0.0, noise(0.5)))).ok

    def test_shift(self):
        run = healthy()
        finding = check_ratio(replace(run, logp_old=np.roll(run.logp, 1)))
        assert (finding.code, finding.cause) == (
            "shift",
            "logp_old is shifted by +1 tokens against logp: with this shift the ratio is 1",
        )

    def test_temperature(self):
        run = healthy()
        logp = run.logp_old + 0.4 * (run.logp_old + run.entropy)
        finding = check_ratio(replace(run, logp=logp))
        assert finding.code == "temperature"
        assert finding.cause == "logp_old is at 1.40 times the temperature of logp (R² 1.00)"

    def test_an_engine_that_draws_from_a_part_of_the_vocabulary(self):
        """Its probabilities are those of the tokens that top-p leaves, as in DPPO with vLLM's processed ones."""
        run = healthy()
        left = np.random.default_rng(2).uniform(0.7, 1.0, TOKENS)
        old = run.logp - np.log(left)
        finding = check_ratio(replace(run, logp_old=old, logp_rollout=old, anchored_at_rollout=True))
        assert finding.code == "top-p"
        # Noise to both sides is none of it.
        old = run.logp + noise(0.3)
        finding = check_ratio(replace(run, logp_old=old, logp_rollout=old, anchored_at_rollout=True))
        assert finding.code != "top-p"

    def test_dropout(self):
        run = healthy()
        finding = check_ratio(replace(run, logp=run.logp + noise(0.3)))
        assert (finding.code, finding.or_else) == ("dropout", ("precision",))
        assert finding.cause == (
            "two passes over the same tokens differ, and no shift or temperature explains it, "
            "though the old policy agrees with the engine"
        )
        assert finding.figure == pytest.approx(0.3)

    def test_what_too_few_tokens_cannot_exclude_is_not_said_to_be_excluded(self):
        """Here a shift, of which only six tokens are before an update, and a temperature, without entropies."""
        run = healthy()
        first = np.arange(SEQUENCES) == 0
        run = replace(
            run, before_updates=first, logp_old=np.roll(run.logp, 1), logp_rollout=UNKNOWN, entropy=UNKNOWN
        )
        finding = check_ratio(run)
        assert finding.cause == "two passes over the same tokens differ"
        assert (finding.code, finding.or_else) == ("dropout", ("precision", "shift", "temperature"))

    def test_without_entropies_a_temperature_cannot_be_excluded(self):
        run = replace(healthy(), entropy=UNKNOWN)
        finding = check_ratio(replace(run, logp=run.logp + noise(0.3)))
        assert finding.or_else == ("precision", "temperature")

    @pytest.mark.parametrize("anchored", [False, True])
    def test_rounding_of_an_engine_is_a_fault_unless_the_bounds_are_anchored_at_it(self, anchored):
        run = healthy()
        old = run.logp + noise(0.01)
        finding = check_ratio(replace(run, logp_old=old, logp_rollout=old, anchored_at_rollout=anchored))
        assert finding.code == ("ok" if anchored else "engine-mismatch")

    def test_an_engine_that_drifts_away_is_stale(self):
        run = healthy()
        old = run.logp + noise(0.3) * run.batch[run.sequence]
        finding = check_ratio(replace(run, logp_old=old, logp_rollout=old))
        assert (finding.code, finding.or_else) == ("stale", ("weight-sync",))

    def test_values_that_no_policy_gives_are_of_other_tokens(self):
        """Reversed log-probabilities of short answers are those of padding, which no answer has."""
        run = healthy()
        padding = np.random.default_rng(4).normal(-60.0, 3.0, TOKENS)
        finding = check_ratio(replace(run, logp_old=padding))
        assert (finding.code, finding.or_else) == ("permuted", ())
        assert "the median of logp_old is -60 nats, lower than any policy gives" in finding.cause
        # Of answers of one token, it may as well be a shift.
        single = replace(run, sequence=np.arange(TOKENS), position=np.zeros(TOKENS, int))
        single = replace(single, before_updates=np.ones(TOKENS, bool), batch=np.zeros(TOKENS, int))
        finding = check_ratio(replace(single, logp_old=padding))
        assert (finding.code, finding.or_else) == ("permuted", ("shift",))
        # Another policy may be far away, but not farther than one that knows nothing.
        assert check_ratio(replace(run, logp_old=run.logp + noise(5.0) - 6.0)).code != "permuted"


class TestEngine:
    def test_it_needs_an_engine(self):
        assert check_engine(replace(healthy(), logp_rollout=UNKNOWN)).ok is None

    def test_it_needs_log_probabilities_of_the_trainer(self):
        run = healthy()
        assert check_engine(replace(run, logp_rollout=run.logp_old)).ok is None

    def test_missing_log_probabilities_are_left_out(self):
        run = healthy()
        logp_rollout = np.where(run.position == 2, math.nan, run.logp_rollout)
        finding = check_engine(replace(run, logp_rollout=logp_rollout))
        assert (finding.ok, finding.n) == (True, TOKENS * 5 // 6)

    def test_shift(self):
        run = healthy()
        finding = check_engine(replace(run, logp_rollout=np.roll(run.logp_rollout, -1)))
        assert finding.code == "shift"
        assert finding.cause == "the trainer's tokens are shifted by +1 against the engine's"

    @pytest.mark.parametrize(("column", "content"), [("position", "the prompt"), ("remaining", "padding")])
    def test_mask(self, column, content):
        run = healthy()
        edge = getattr(run, column) < 2
        logp = np.where(edge, -6.0, run.logp)
        run = replace(
            run,
            logp=logp,
            logp_old=logp,
            logp_rollout=np.where(edge, 0.0, run.logp_rollout),
            entropy=np.where(edge, 1.0, run.entropy),
        )
        finding = check_engine(run)
        assert finding.code == "mask"
        assert finding.cause.endswith(f"5.0 nats less probable than sampled ones: the mask counts {content}")

    def test_retokenised(self):
        """The trainer sees the changed words before the tokens after them, whose probabilities change too."""
        run = healthy()
        logp_old = run.logp_old.copy()
        changed = np.array([3, 50, 100, 200, 300])
        logp_old[changed] -= 3
        logp_old[changed + 1] -= np.array([0.3, -0.2, 0.4, -0.3, 0.2])
        finding = check_engine(replace(run, logp_old=logp_old))
        assert finding.code == "retokenised"
        assert finding.cause == (
            "2.6% of tokens differ widely, and so do the tokens after them; sequences without them agree"
        )

    def test_far_tokens_before_tokens_of_which_the_policy_is_sure_have_no_cause(self):
        run = healthy()
        logp_old = run.logp_old.copy()
        changed = np.array([3, 50, 100, 200, 300])
        logp_old[changed] -= 3
        sure = run.logp_rollout.copy()
        sure[changed + 1] = logp_old[changed + 1] = -0.001
        finding = check_engine(replace(run, logp_old=logp_old, logp_rollout=sure))
        assert (finding.code, finding.ok) == ("ok", None)
        assert finding.advice.startswith("5 of 384 tokens differ by a nat and the rest agree, too few to")

    def test_other_experts_at_single_tokens_leave_the_next(self):
        """If the policy has little entropy, the engine's tokens are far less probable for the trainer."""
        run = healthy()
        logp_old = run.logp_old.copy()
        logp_old[[3, 50, 100, 200, 300]] -= 6
        finding = check_engine(replace(run, logp_old=logp_old))
        assert (finding.code, finding.or_else) == ("routing", ("engine-mismatch",))
        assert "also the tokens after them" in finding.cause

    def test_of_one_far_token_no_cause_is_named(self):
        run = healthy()
        logp_old = run.logp_old.copy()
        logp_old[[3, 50]] -= 50
        finding = check_engine(replace(run, logp_old=logp_old))
        assert (finding.code, finding.ok) == ("ok", None)
        assert finding.advice.startswith(
            "2 of 384 tokens differ by a nat and the rest agree, too few to disting"
        )

    def test_top_p(self):
        run = healthy()
        finding = check_engine(replace(run, logp_rollout=run.logp_old + 0.2))
        assert finding.code == "top-p"
        assert finding.cause.startswith("π_old/π_rollout is 0.819 on average and hardly ever above 1")

    def test_of_few_tokens_no_shift_is_named(self):
        run = healthy()
        shifted = np.roll(run.logp_old, 1)
        assert run.best_shift(run.logp_old, shifted, np.ones(TOKENS, bool))[:2] == (1, 0.0)
        assert run.best_shift(run.logp_old, shifted, run.sequence < 3)[0] == 0

    def test_flipped_experts_beside_a_few_far_tokens(self):
        """Of retokenised words nearly all tokens that are off are a nat away."""
        run = healthy()
        generator = np.random.default_rng(2)
        off = generator.choice(TOKENS, 64, replace=False)
        flipped = run.logp_old + 0.001 * generator.standard_normal(TOKENS)
        flipped[off] += generator.choice([-0.3, 0.3], 64)
        flipped[off[:3]] = run.logp_old[off[:3]] + 3.0
        assert check_engine(replace(run, logp_rollout=flipped)).code != "retokenised"

    def test_a_part_of_the_vocabulary_from_a_batch_on(self):
        """Its divergence stays below the limit, as the policy is nearly sure of its tokens."""
        batch = np.repeat(np.arange(8), SEQUENCES // 8)
        late = np.repeat(batch >= 3, LENGTH)
        run = replace(healthy(), batch=batch, first_step={number: number for number in range(8)})
        noisy = run.logp_old + 0.02 * np.random.default_rng(0).standard_normal(TOKENS)
        finding = check_engine(replace(run, logp_rollout=noisy + 0.04 * late))
        assert (finding.code, finding.onset) == ("top-p", 3)
        assert "before step 3 they agree" in finding.cause
        assert check_engine(replace(run, logp_rollout=noisy)).ok

    def test_weights_that_drift_apart_slowly(self):
        batch = np.repeat(np.arange(8), SEQUENCES // 8)
        run = replace(healthy(), batch=batch)
        divergence = np.array([1, 3, 6, 10, 12, 14, 38, 30]) * 1e-4
        drift = noise(1.0) * np.repeat(np.sqrt(2 * divergence[batch]), LENGTH)
        finding = check_engine(replace(run, logp_rollout=run.logp_old + drift))
        assert finding.code == "weight-sync"
        assert (finding.figure or 1) < 5e-3

    def test_temperature(self):
        run = healthy()
        logp_old = run.logp_rollout + 0.25 * (run.logp_rollout + run.entropy)
        finding = check_engine(replace(run, logp_old=logp_old))
        assert finding.code == "temperature"
        assert finding.cause.startswith("the trainer is at 0.80 times the temperature of the engine's")

    def test_stale_weights_of_a_known_lag(self):
        run = healthy()
        lag = 2.0 * (run.sequence % 2)
        logp_rollout = run.logp_rollout + noise(0.5) * (lag > 0)
        finding = check_engine(replace(run, logp_rollout=logp_rollout, lag=lag))
        assert finding.code == "stale"
        assert finding.cause.endswith("at lags up to 2")

    @pytest.mark.parametrize(("lag", "code"), [(0.0, "weight-sync"), (math.nan, "stale")])
    def test_a_distance_that_grows(self, lag, code):
        run = healthy()
        logp_rollout = run.logp_rollout + noise(0.5) * run.batch[run.sequence]
        finding = check_engine(replace(run, logp_rollout=logp_rollout, lag=np.full(TOKENS, lag)))
        assert finding.code == code

    def test_engine_mismatch(self):
        run = healthy()
        finding = check_engine(replace(run, logp_rollout=run.logp_rollout + noise(0.2)))
        # They are known to be fresh, so that they are not stale.
        assert (finding.code, finding.or_else) == ("engine-mismatch", ("prompt",))
        unknown = replace(run, logp_rollout=run.logp_rollout + noise(0.2), lag=UNKNOWN)
        finding = check_engine(unknown)
        assert (finding.code, finding.or_else) == ("engine-mismatch", ("stale", "prompt"))
        # The first step of a run has no weights that are older.
        finding = check_engine(replace(unknown, first_step={0: 0, 1: 1}))
        assert (finding.code, finding.or_else) == ("engine-mismatch", ("prompt",))
        finding = check_engine(replace(unknown, first_step={0: 100, 1: 101}))
        assert (finding.code, finding.or_else) == ("engine-mismatch", ("stale", "prompt"))

    def test_what_rounding_does_not_give_is_another_prompt_first(self):
        run = healthy()
        finding = check_engine(replace(run, logp_rollout=run.logp_rollout + noise(0.8)))
        assert (finding.code, finding.or_else) == ("prompt", ("engine-mismatch",))
        assert "by more than rounding gives" in finding.cause

    def test_first_tokens_that_agree_exclude_another_prompt(self):
        run = healthy()
        logp_rollout = run.logp_rollout + noise(0.8) * (run.position > 0)
        finding = check_engine(replace(run, logp_rollout=logp_rollout))
        assert (finding.code, finding.or_else) == ("engine-mismatch", ())

    def test_flipped_experts_where_rounding_moves_every_token(self):
        """Tokens of which the engine is sure agree in any case. Of the others a few are far off."""
        run = healthy()
        generator = np.random.default_rng(3)
        unsure = np.repeat(generator.uniform(size=SEQUENCES) < 0.4, LENGTH)
        old = np.where(unsure, run.logp_old, -0.01)
        flipped = old + np.where(unsure, 0.04, 1e-4) * generator.choice([-1.0, 1.0], TOKENS)
        off = generator.choice(np.flatnonzero(unsure), 12, replace=False)
        flipped[off] = old[off] + generator.choice([-1.4, 1.4], 12).clip(max=-old[off])
        run = replace(run, logp_old=old, logp=old, logp_rollout=flipped)
        finding = check_engine(run)
        assert (finding.code, finding.or_else) == ("routing", ("engine-mismatch",))
        assert "of tokens that the engine is not sure of differ widely" in finding.cause
        # Of 8 bits all of them are off.
        rounded = old + np.where(unsure, 0.4, 1e-4) * generator.standard_normal(TOKENS)
        assert check_engine(replace(run, logp_rollout=rounded)).code == "engine-mismatch"
        # So they are where the engine is sure of nearly all tokens, which few tokens are not.
        unsure = np.repeat(np.arange(SEQUENCES) % 8 == 0, LENGTH)
        old = np.where(unsure, run.logp_old, -0.01)
        rounded = old + np.where(unsure, 0.3, 1e-4) * generator.choice([-1.0, 1.0], TOKENS)
        assert check_engine(replace(run, logp_old=old, logp_rollout=rounded)).code == "engine-mismatch"

    def test_weights_that_drift_apart_from_the_first_update_on_have_no_onset(self):
        """The second and the third batch are right by the limit, but not as near as the first."""
        batch = np.repeat(np.arange(8), SEQUENCES // 8)
        run = replace(healthy(), batch=batch, first_step={number: number for number in range(8)})
        divergence = np.array([0, 15, 18, 77, 108, 150, 180, 207]) * 1e-4
        drift = noise(1.0) * np.repeat(np.sqrt(2 * divergence[batch]), LENGTH)
        finding = check_engine(replace(run, logp_rollout=run.logp_old + drift))
        assert (finding.code, finding.onset) == ("weight-sync", None)
        at_once = np.array([1, 1, 1, 150, 150, 150, 150, 150]) * 1e-4
        drift = noise(1.0) * np.repeat(np.sqrt(2 * at_once[batch]), LENGTH)
        finding = check_engine(replace(run, logp_rollout=run.logp_old + drift))
        assert (finding.code, finding.onset) == ("engine-mismatch", 3)

    def test_without_entropies_a_temperature_cannot_be_excluded(self):
        run = replace(healthy(), entropy=UNKNOWN)
        finding = check_engine(replace(run, logp_rollout=run.logp_rollout + noise(1.5)))
        assert (finding.code, finding.or_else) == ("prompt", ("engine-mismatch", "temperature"))


class TestUpdates:
    def run(self, **columns) -> FirstPass:
        group = np.tile(np.repeat(np.arange(4.0), 4), 4)
        batch = np.repeat(np.arange(4), 16)
        movement = {number: {0: 0.0, 1: 0.01, 2: 0.02} for number in range(4)}
        return replace(healthy(), movement=movement, batch=batch, group=group, **columns)

    def test_it_needs_several_updates(self):
        assert check_updates(replace(healthy(), movement={0: {0: 0.0}})).ok is None

    def test_a_policy_that_collapsed_after_large_steps(self):
        """Most batches no longer move it, which no small learning rate explains."""
        movement = {number: {0: 0.0, 1: 2.0 if not number else 4e-6} for number in range(4)}
        assert check_updates(replace(self.run(), movement=movement)).ok

    def test_updates_that_move_the_policy_pass(self):
        assert check_updates(self.run()).ok

    @pytest.mark.parametrize(("moved", "code"), [(0.0, "no-step"), (2e-5, "hardly-moves")])
    def test_updates_that_do_not(self, moved, code):
        run = replace(self.run(), movement={number: {0: 0.0, 1: moved} for number in range(4)})
        assert check_updates(run).code == code


class TestSurprisal:
    def test_it_needs_entropies(self):
        assert check_surprisal(replace(healthy(), entropy=UNKNOWN)).ok is None

    def test_old_log_probabilities_stand_in_for_those_in_training(self):
        assert check_surprisal(replace(healthy(), logp=UNKNOWN)).ok

    def test_old_tokens_were_not_sampled_from_the_policy_whose_entropy_it_is(self):
        run = healthy()
        lag = 2.0 * (run.sequence % 2)
        old = replace(run, lag=lag, entropy=np.where(lag > 0, run.entropy - 0.5, run.entropy))
        finding = check_surprisal(old)
        assert (finding.ok, finding.n) == (True, (lag == 0).sum())
        assert check_surprisal(replace(old, lag=UNKNOWN)).code == "edited-logits"
        undecided = check_surprisal(replace(old, lag=np.full_like(lag, 2.0)))
        assert (undecided.ok, undecided.advice) == (
            None,
            "record fresh data too: older weights sampled all of this",
        )

    @pytest.mark.parametrize(("change", "code"), [(0.5, "top-p"), (-0.5, "edited-logits")])
    def test_a_biased_sample(self, change, code):
        run = healthy()
        finding = check_surprisal(replace(run, entropy=run.entropy + change))
        assert finding.code == code
        assert finding.figure == pytest.approx(-change)
        assert f"by {abs(change):.3f} nats" in finding.cause

    def test_tokens_that_are_surer_at_the_start_alone(self):
        """Without rare tokens a part of the vocabulary may be missing; with them the logits are edited."""
        run = healthy()
        surer = replace(run, logp=np.where(run.position < 3, run.logp + 0.45, run.logp))
        surer = replace(surer, logp_old=surer.logp, logp_rollout=surer.logp)
        entropy = np.where(run.position < 3, run.entropy, -surer.logp)
        finding = check_surprisal(replace(surer, entropy=entropy))
        assert (finding.code, finding.or_else) == ("top-p", ("edited-logits",))
        rare = surer.logp.copy()
        rare[[1, 100, 200, 300]] -= 4.0
        rare = replace(surer, logp=rare, logp_old=rare, logp_rollout=rare, entropy=entropy)
        finding = check_surprisal(rare)
        assert (finding.code, finding.or_else) == ("edited-logits", ())

    def test_beside_a_wrong_mask_the_sampler_is_not_judged(self):
        run = healthy()
        shifted = replace(run, logp_old=run.logp_old - 0.3, logp=run.logp - 0.3)
        assert "top-p" in {finding.code for finding in token_findings(shifted)}
        findings = token_findings(shifted, counts_drawn_tokens=False)
        assert {finding.code for finding in findings} == {"ok"}
        assert "correct the mask first" in {finding.advice for finding in findings}

    def test_a_prompt_that_is_counted(self):
        run = healthy()
        logp = np.where(run.position < 2, -6.0, run.logp)
        finding = check_surprisal(replace(run, logp=logp, logp_rollout=UNKNOWN))
        assert (finding.code, finding.or_else) == ("mask", ("shift",))


def make_loss(logp_old: list[list[float]], **columns) -> LossBatch:
    """Return a loss of sequences of log-probabilities, each padded to the longest."""
    width = max(len(row) for row in logp_old)
    lengths = np.array([len(row) for row in logp_old])
    mask = np.arange(width) < lengths[:, None]
    padded = np.zeros(mask.shape, np.float32)
    padded[mask] = np.concatenate(logp_old)
    defaults = {
        "location": "",
        "step": None,
        "method": None,
        "anchor": "trainer",
        "framework": "",
        "log_ratio": np.zeros_like(padded),
        "logp_old": padded,
        "advantages": np.where(mask, np.float32(1.0), np.float32(0.0)),
        "mask": mask,
    }
    return LossBatch(**(defaults | columns))


class TestFirstPass:
    def test_tokens_stand_one_after_the_other(self):
        loss = make_loss(
            [[-1, -2, -3], [-4]],
            reward=np.array([1, 0]),
            truncated=np.array([True, False]),
            lag=np.array([[2, 2, 2], [1, 0, 0]]),
            step=7,
        )
        run = FirstPass.of([loss])
        assert run.logp_old.tolist() == [-1, -2, -3, -4]
        assert run.logp.tolist() == [-1, -2, -3, -4]
        assert run.position.tolist() == [0, 1, 2, 0]
        assert run.remaining.tolist() == [2, 1, 0, 0]
        assert run.sequence.tolist() == [0, 0, 0, 1]
        assert run.lag.tolist() == [2, 2, 2, 1]
        assert run.reward.tolist() == [1, 0]
        assert run.truncated.tolist() == [1, 0]
        for name in ("logp", "logp_old", "lag", "reward", "truncated"):
            assert getattr(run, name).dtype == np.float64, name

    def test_missing_columns_are_nan(self):
        run = FirstPass.of([make_loss([[-1, -2]], has_logp=False)])
        for name in ("logp", "logp_rollout", "entropy", "lag", "group", "reward", "truncated"):
            assert np.isnan(getattr(run, name)).all(), name
        assert run.answer_ids == (None,)
        assert run.last_distance == {}

    def test_an_infinite_entropy_counts_as_missing(self):
        run = FirstPass.of([make_loss([[-1, -2]], entropy=np.array([[np.inf, 1.0]], np.float32))])
        assert np.isnan(run.entropy).tolist() == [True, False]

    def test_equal_answers_in_updates_of_one_pass_are_no_repetitions(self):
        """A policy that has converged gives most prompts the same answer, also in other updates on the batch."""
        same = [[-0.1, -0.2]] * 11
        updates = [
            make_loss([*same, [-1.0 - update]], step=update, generation=0, update=update)
            for update in range(4)
        ]
        run = FirstPass.of(updates)
        assert run.coverage.total_tokens == sum(int(loss.mask.sum()) for loss in updates) == 4 * 23
        # A second pass has no new answer.
        again = [
            make_loss([*same, [-1.0 - update]], step=4 + update, generation=0, update=4 + update)
            for update in range(4)
        ]
        assert FirstPass.of([*updates, *again]).coverage.total_tokens == 4 * 23

    def test_a_sequence_is_taken_once_however_far_it_is_padded(self):
        losses = [make_loss([[-1, -2], [-3, -4]]), make_loss([[-5, -6, -7], [-1, -2]])]
        run = FirstPass.of(losses)
        assert run.logp_old.tolist() == [-1, -2, -3, -4, -5, -6, -7]
        assert run.sequence.tolist() == [0, 0, 1, 1, 2, 2, 2]

    def test_the_same_log_probabilities_with_another_advantage_are_another_sequence(self):
        losses = [make_loss([[-1, -2]]), make_loss([[-1, -2]], advantages=np.full((1, 2), -1, np.float32))]
        assert FirstPass.of(losses).advantage.tolist() == [1, -1]

    def test_sequences_without_tokens_are_left_out(self):
        assert FirstPass.of([make_loss([[], [-1]])]).sequence.tolist() == [0]

    def test_advantages_that_differ_within_a_sequence_are_nan(self):
        loss = make_loss([[-1, -2], [-3, -4]], advantages=np.array([[1, 2], [3, 3]], np.float32))
        assert np.isnan(FirstPass.of([loss]).advantage).tolist() == [True, False]

    def test_equal_answers_have_equal_ids(self):
        token = np.array([[7, 8], [7, 0], [7, 8]], np.int32)
        first, second, third = FirstPass.of([make_loss([[-1, -2], [-3], [-4, -5]], token=token)]).answer_ids
        assert first == third
        assert first != second

    def test_a_record_without_losses(self):
        run = FirstPass.of([])
        assert (len(run.logp), len(run.batch), run.batch_rows()) == (0, 0, [])
        assert [finding.ok for finding in token_findings(run)] == [True, None, None, None, None]

    def test_of_is_what_a_collector_returns(self):
        losses = [make_loss([[-1, -2]], step=0), make_loss([[-3]], step=1)]
        collector = FirstPass.collector()
        collector.add(losses[0])
        assert collector.result().logp_old.tolist() == [-1, -2]
        collector.add(losses[1])
        run = collector.result()
        assert run.logp_old.tolist() == [-1, -2, -3]
        assert FirstPass.of(losses).logp_old.tolist() == [-1, -2, -3]
        assert run.coverage == Coverage(tokens=3, total_tokens=3, batches=2, total_batches=2)


class TestBudget:
    """A long record is looked at in equal parts of all its batches."""

    @staticmethod
    def losses(batches: int, sequences: int, length: int):
        for batch in range(batches):
            rows = -1.0 - np.arange(sequences)[:, None] - 0.001 * np.arange(length) - 0.1 * batch
            yield make_loss(
                rows.tolist(),
                step=batch,
                generation=batch,
                update=0,
                group=np.arange(sequences) // 4,
                bad_sequences=1,
            )

    @pytest.fixture
    def _small_budget(self, monkeypatch):
        monkeypatch.setattr(first_pass_module, "TOKENS", 1000)
        monkeypatch.setattr(first_pass_module, "FEWEST_TOKENS", 64)

    @pytest.mark.usefixtures("_small_budget")
    def test_each_batch_has_an_equal_part(self):
        run = FirstPass.of(self.losses(batches=6, sequences=16, length=40))
        parts = np.bincount(run.batch[run.sequence])
        assert run.coverage == Coverage(int(parts.sum()), 6 * 16 * 40, 6, 6)
        assert parts.sum() <= 1000
        assert parts.min() == parts.max() > 40
        # What is said of whole sequences is said of all of them, and nothing escapes the search for NaN.
        assert (len(run.batch), run.bad_sequences) == (96, 6)

    @pytest.mark.usefixtures("_small_budget")
    def test_of_long_sequences_start_middle_and_end_are_kept(self):
        run = FirstPass.of(self.losses(batches=1, sequences=16, length=400))
        assert len(run.logp) <= 1000
        ends = {(int(p), int(r)) for p, r in zip(run.position, run.remaining, strict=True)}
        assert {(0, 399), (399, 0), (200, 199)} <= ends
        assert len(np.unique(run.sequence)) >= 12
        # Tokens that were left out are no neighbours.
        shifted = np.roll(run.logp_old, 1)
        shift, distance, _ = run.best_shift(run.logp_old, shifted, np.ones(len(shifted), bool))
        assert (shift, distance) == (1, 0.0)

    @pytest.mark.usefixtures("_small_budget")
    def test_of_many_batches_the_first_the_last_and_each_nth_are_kept(self):
        run = FirstPass.of(self.losses(batches=101, sequences=4, length=30))
        batches = np.unique(run.batch)
        assert (batches[0], batches[-1]) == (0, 100)
        assert run.coverage.total_batches == 101
        assert len(batches) < 20
        assert len(run.logp) <= 1000
        assert set(np.diff(batches)[:-1]) == {np.diff(batches)[0]}

    def test_of_many_sequences_whole_groups_are_kept(self, monkeypatch):
        monkeypatch.setattr(first_pass_module, "SEQUENCES", 64)
        run = FirstPass.of(self.losses(batches=4, sequences=32, length=2))
        assert len(run.batch) <= 64
        keys = run.batch * 100 + run.group
        assert set(np.unique(keys, return_counts=True)[1]) == {4}
        assert set(run.sequence.tolist()) == set(range(len(run.batch)))

    def test_a_fault_behind_the_middle_is_found_with_its_onset(self, monkeypatch):
        monkeypatch.setattr(first_pass_module, "TOKENS", 5000)
        monkeypatch.setattr(first_pass_module, "FEWEST_TOKENS", 320)

        def losses():
            generator = np.random.default_rng(0)
            for batch in range(14):
                logp_old = generator.uniform(-2, -0.5, (32, 20)).astype(np.float32)
                log_ratio = np.roll(logp_old, -1, 1) - logp_old if batch >= 8 else 0 * logp_old
                yield make_loss(
                    logp_old.tolist(), log_ratio=log_ratio, step=10 + batch, generation=batch, update=0
                )

        run = FirstPass.of(losses())
        assert run.coverage.tokens <= 5000 < run.coverage.total_tokens
        finding = check_ratio(run)
        assert (finding.code, finding.onset) == ("shift", 18)


class TestBatches:
    def test_of_the_generation_and_the_update(self):
        losses = [
            make_loss([[-1.0 - 10 * generation - update]], step=step, generation=generation, update=update)
            for step, (generation, update) in enumerate([(5, 0), (5, 1), (6, 0)])
        ]
        run = FirstPass.of(losses)
        assert run.batch.tolist() == [5, 5, 6]
        assert run.before_updates.tolist() == [True, False, True]
        assert run.first_step == {5: 0, 6: 2}

    def test_of_the_newest_version(self):
        """Parts of one batch, a step each, which the same version drew."""
        losses = [make_loss([[-1.0 - step]], step=step, lag=np.array([[step]])) for step in range(3)]
        run = FirstPass.of(losses)
        assert run.batch.tolist() == [0, 0, 0]
        assert run.before_updates.tolist() == [True, False, False]

    def test_of_losses_that_count_as_steps(self):
        """Without numbers of batches and updates, a ratio other than 1 tells that an update was made."""
        losses = [
            make_loss([[-1.0 - step]], log_ratio=np.full((1, 1), 0.1 * (step % 2), np.float32))
            for step in range(4)
        ]
        assert FirstPass.of(losses).before_updates.tolist() == [True, False, True, False]

    def test_of_losses_that_are_all_off(self):
        """If no ratio is near 1, only the first loss is certain to come before all updates."""
        losses = [make_loss([[-1.0 - step]], log_ratio=np.full((1, 1), 0.1, np.float32)) for step in range(4)]
        assert FirstPass.of(losses).before_updates.tolist() == [True, False, False, False]

    def test_of_repeated_losses_that_are_all_off(self):
        losses = [
            make_loss([[-1.0 - batch]], log_ratio=np.full((1, 1), 0.1, np.float32))
            for batch in (0, 0, 0, 1, 1, 1)
        ]
        assert FirstPass.of(losses).before_updates.tolist() == [True, True]

    def test_rows(self):
        def make_update(generation: int, update: int) -> LossBatch:
            return make_loss(
                [[-1.0 - generation, -2.0]],
                step=10 + 2 * generation + update,
                generation=generation,
                update=update,
                log_ratio=np.full((1, 2), 0.25 * update, np.float32),
                reward=np.array([generation]),
                entropy=np.full((1, 2), 0.5, np.float32),
            )

        run = FirstPass.of([make_update(0, 0), make_update(0, 1), make_update(1, 0), make_update(1, 1)])
        assert run.batch_rows() == [
            {"step": 10, "moved": 0.25, "reward": 0.0, "entropy": 0.5},
            {"step": 12, "moved": 0.25, "reward": 1.0, "entropy": 0.5},
        ]


class TestStatistics:
    def test_batch_means(self):
        run = replace(healthy(), batch=np.repeat([3, 1], SEQUENCES // 2))
        values = np.where(run.sequence < SEQUENCES // 2, 2.0, 5.0)
        everywhere = np.ones(TOKENS, bool)
        assert run.batch_means(values, everywhere).tolist() == [5, 2]
        assert run.batch_means(values, values == 2).tolist() == [2]

    def test_mean_and_z_take_sequences_as_independent(self):
        run = healthy()
        values = np.where(run.sequence % 2, 3.0, -1.0)
        mean, z = run.mean_and_z(values, np.ones(TOKENS, bool))
        sums = LENGTH * np.where(np.arange(SEQUENCES) % 2, 3.0, -1.0)
        assert mean == pytest.approx(1.0)
        assert z == pytest.approx(sums.sum() / np.sqrt(np.square(sums).sum()))

    def test_mean_and_z_of_no_tokens(self):
        assert healthy().mean_and_z(np.ones(TOKENS), np.zeros(TOKENS, bool)) == (0.0, 0.0)

    def test_best_shift_stays_within_sequences(self):
        run = healthy()
        shifted = np.roll(run.logp.reshape(SEQUENCES, LENGTH), -2, axis=1).ravel()
        shift, distance, unshifted = run.best_shift(run.logp, shifted, np.ones(TOKENS, bool))
        assert (shift, distance) == (-2, 0.0)
        assert unshifted > 0.1

    def test_best_shift_of_single_tokens(self):
        run = FirstPass.of([make_loss([[-1]])])
        assert run.best_shift(run.logp, run.logp - 1, np.ones(1, bool)) == (0, 1.0, 1.0)

    def test_fit_temperature(self):
        run = healthy()
        hotter = run.logp + 0.3 * (run.logp + run.entropy)
        slope, r_squared = run.fit_temperature(hotter, run.logp, np.ones(TOKENS, bool))
        assert (slope, r_squared) == pytest.approx((0.3, 1.0))

    @pytest.mark.parametrize("difference", [0.0, 0.1])
    def test_fit_temperature_of_a_constant_difference(self, difference):
        run = healthy()
        fit = run.fit_temperature(run.logp + difference, run.logp, np.ones(TOKENS, bool))
        assert fit == (0.0, 0.0)

    def test_fit_temperature_without_entropies(self):
        run = replace(healthy(), entropy=UNKNOWN)
        assert run.fit_temperature(run.logp, run.logp_old, np.ones(TOKENS, bool)) == (0.0, 0.0)


class TestLostGradient:
    def run(self, lost):
        """Six batches of four losses each, of which the last follows its advantages or does not."""
        batches = tuple(
            AdvantageSlopes(0.001 * number if lost else 0.05 + 0.001 * number, 0.05, lost, 4)
            for number in range(6)
        )
        return replace(healthy(), movement={k: {0: 0.0, 1: 0.05} for k in range(6)}, advantage_slopes=batches)

    def test_a_last_loss_that_follows_least_in_every_batch(self):
        finding = check_updates(self.run(lost=True))
        assert finding.code == "micro-batch-lost"
        assert "last of 4 micro-batches" in finding.cause

    def test_losses_that_follow_alike(self):
        assert check_updates(self.run(lost=False)).ok
