"""Tests of the listings of blocked tokens and of tokens on which engine and trainer disagree."""

import math

import pytest
import torch
from typer.testing import CliRunner

from bandpo import parse
from bandpo.audit import Recorder
from bandpo.replay.blocked_tokens import (
    BlockedTokens,
    DisagreeingToken,
    DisagreeingTokens,
    format_disagreeing_tokens,
)
from rlvet import open_run
from rlvet.cli.app import app

pytest.importorskip("pyarrow")


def costliest(record, *arguments, **settings):
    blocked = BlockedTokens(*arguments, **settings)
    open_run(record).scan([blocked])
    return blocked.result()


def test_the_costliest_blocked_words_in_their_answers(tmp_path):
    old = torch.tensor([[0.5, 0.01, 0.5], [0.5, 0.5, 0.2]]).log()
    columns = {
        "logp_old": old,
        "tokens": torch.tensor([[7, 8, 9], [4, 5, 6]]),
        "advantages": torch.tensor([2.0, -1.0]),
    }
    with Recorder(tmp_path, method="FixedClip(0.2)") as recorder:
        for up in (0.02, 0.04):  # the second time it costs more, and it counts once
            logp = torch.tensor([[0.5, up, 0.5], [0.5, 0.5, 0.1]]).log()
            recorder.add(logp=logp, **columns, step=3)
    rare, common = costliest(tmp_path)
    assert (rare.answer, rare.at, rare.step, rare.advantage) == ([7, 8, 9], 1, 3, 2.0)
    assert (rare.cost, rare.p, rare.ratio) == pytest.approx((8.0, 0.01, 4.0), rel=1e-4)
    assert [rare.kept[rule] for rule in ("the run", "Clip-Higher", "Band", "no clip")] == [0, 0, 1, 1]
    assert (common.answer[common.at], common.cost) == (6, pytest.approx(0.5, rel=1e-4))
    result = CliRunner().invoke(app, ["diagnose", str(tmp_path), "--words"])
    assert " 1. 7 ⟦8⟧ 9\n    step 3: p 0.01, ratio 4, A +2; gradient kept by the run 0%" in result.output


def test_without_ids_or_a_policy_in_training_no_token_is_shown(tmp_path):
    old = torch.tensor([[0.5, 0.01]]).log()
    new = torch.tensor([[0.5, 0.04]]).log()
    advantages = torch.ones(1)
    with Recorder(tmp_path, method="FixedClip(0.2)") as recorder:
        recorder.add(logp=new, logp_old=old, advantages=advantages)
        recorder.add(logp_old=old, advantages=advantages, tokens=torch.tensor([[7, 8]]))
    assert costliest(tmp_path) == []


def test_the_user_names_the_rule_of_a_record_that_names_none(tmp_path):
    """The default is FixedClip(0.2)."""
    old = torch.tensor([[0.5, 0.1, 0.1]]).log()
    new = torch.tensor([[0.5, 0.13, 0.17]]).log()
    batch = {"logp": new, "logp_old": old, "advantages": torch.ones(1), "tokens": torch.tensor([[7, 8, 9]])}
    for folder, method in (("none", None), ("named", "FixedClip(0.2)")):
        with Recorder(tmp_path / folder, method=method) as recorder:
            recorder.add(**batch, step=1)
    wider = parse("FixedClip(0.5)")
    assert [token.at for token in costliest(tmp_path / "none")] == [2, 1]
    assert [token.at for token in costliest(tmp_path / "none", wider)] == [2]
    with pytest.raises(ValueError, match="names its method, FixedClip"):
        costliest(tmp_path / "named", wider)
    assert [token.at for token in costliest(tmp_path / "named", count=1)] == [2]
    assert list(costliest(tmp_path / "named", rules={"mine": "Unclipped()"})[0].kept) == ["the run", "mine"]


def disagreeing_record(folder, bypass=False):
    """Two answers, in each of which the engine has another probability for one token."""
    new = torch.tensor([[0.5, 0.01, 0.5], [0.5, 0.5, 0.2]]).log()
    engine = torch.tensor([[0.5, 0.4, 0.5], [0.5, 0.5, 0.1]]).log()
    mask = torch.tensor([[False, True, True], [True, True, True]])
    with Recorder(folder, method="FixedClip(0.2)") as recorder:
        for update in (0, 1):  # the second look holds the same tokens
            moved = (new + 0.5 * update).clamp(max=-0.01)
            recorder.add(
                logp=moved,
                logp_old=engine if bypass else new,
                logp_rollout=engine,
                advantages=torch.tensor([2.0, -1.0]),
                mask=mask,
                tokens=torch.tensor([[7, 8, 9], [4, 5, 6]]),
                step=3,
                generation=3,
                update=update,
            )
    return folder


@pytest.mark.parametrize("bypass", [False, True])
def test_the_words_on_which_engine_and_trainer_disagree(tmp_path, bypass):
    tokens = DisagreeingTokens()
    open_run(disagreeing_record(tmp_path, bypass)).scan([tokens])
    far, near = tokens.result()
    assert (far.answer, far.at, far.step) == ([8, 9], 0, 3)
    assert (far.p, far.p_engine) == pytest.approx((0.01, 0.4), rel=1e-4)
    assert near.distance == pytest.approx(math.log(2), rel=1e-4)
    result = CliRunner().invoke(app, ["diagnose", str(tmp_path), "--words"])
    # The old log-probabilities are the engine's, and no age says whether the policy has moved since sampling.
    stale = ", or the policy has moved since sampling" if bypass else ""
    assert f"engine and trainer disagree{stale}, the farthest apart first:\n 1.  ⟦8⟧ 9\n" in result.output
    assert "    step 3: p 0.01 in the trainer, 0.4 in the engine (-3.69 nats)" in result.output


def test_an_old_token_that_moved_is_no_disagreement_of_engine_and_trainer(tmp_path):
    """Two tokens of each answer are equally far from the engine, which sampled; one answer is fresh."""
    engine = torch.full((2, 2), 0.5).log()
    with Recorder(tmp_path, anchor="rollout") as recorder:
        recorder.add(
            logp=engine - 1,
            logp_old=engine,
            logp_rollout=engine,
            advantages=torch.ones(2),
            tokens=torch.tensor([[1, 2], [3, 4]]),
            step=9,
            version=torch.tensor([9, 5]),
        )
    tokens = DisagreeingTokens()
    open_run(tmp_path).scan([tokens])
    assert [token.answer for token in tokens.result()] == [[1, 2], [1, 2]]
    assert not tokens.may_be_stale


def test_words_that_disagree_are_escaped_in_a_terminal():
    token = DisagreeingToken(1.0, None, [0, 1, 2], 1, 0.2, 0.1)
    text = format_disagreeing_tokens([token], lambda ids: "\x1b[31m" * len(ids))
    assert "\x1b" not in text
    assert "\\x1b" in text


def test_rounding_is_no_disagreement(tmp_path):
    old = torch.tensor([[0.5, 0.01]]).log()
    with Recorder(tmp_path, method="FixedClip(0.2)") as recorder:
        recorder.add(
            logp=old,
            logp_old=old,
            logp_rollout=old - 0.02,
            advantages=torch.ones(1),
            tokens=torch.tensor([[7, 8]]),
        )
    tokens = DisagreeingTokens()
    open_run(tmp_path).scan([tokens])
    assert tokens.result() == []
    result = CliRunner().invoke(app, ["diagnose", str(tmp_path), "--words"])
    assert "no token whose id and engine are recorded is 0.1 nats apart" in result.output
