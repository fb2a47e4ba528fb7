"""Movement of tokens after they were blocked."""

import pytest
import torch

from bandpo import Recorder, policy_loss
from bandpo.audit import after_block
from bandpo.audit.replay import replay_record

CLIP = "FixedClip(0.2)"


def record(folder, looks, advantages, method=CLIP, steps=None):
    """A record of one loss for each row of log-ratios, over the same sequences of one token."""
    logp_old = -1 - torch.arange(len(advantages)).float().unsqueeze(-1) / 8
    with Recorder(folder, method=method) as recorder:
        for log_ratios, step in zip(looks, steps or [None] * len(looks), strict=True):
            moved = torch.tensor(log_ratios).unsqueeze(-1)
            given = {"logp_old": logp_old, "advantages": torch.tensor(advantages), "step": step}
            recorder.add(logp=logp_old + moved, **given)
    return folder


def near(tokens, before, after, onward):
    return tokens, pytest.approx(before), pytest.approx(after, abs=1e-6), onward


def test_numbers_worked_by_hand_and_what_two_looks_or_no_method_tell(tmp_path):
    looks = [
        [0.0, 0.0, 0.0, 0.0],
        [0.3, -0.5, 0.1, 0.3],  # the first is blocked above ln 1.2, the second below ln 0.8
        [0.4, -0.6, 0.5, 0.2],  # 0.1 on; 0.1 on; blocked now
        [0.9, -0.4, 0.3, 0.1],  # not newly blocked any more, twice; 0.2 back
    ]
    seen = replay_record(record(tmp_path, looks, [1.0, -2.0, 0.5, 0.0]))
    assert seen.moves["raised"] == near(2, (0.3 + 0.4) / 2, (0.1 - 0.2) / 2, 0.5)
    assert seen.moves["lowered"] == near(1, 0.5, 0.1, 1.0)
    assert not replay_record(record(tmp_path / "two", [[0.0], [0.3]], [1.0])).moves
    unknown = record(tmp_path / "unknown", [[0.0], [0.3], [0.4]], [1.0], method=None)
    assert not replay_record(unknown).moves


@pytest.mark.parametrize(
    ("looks", "steps", "expected"),
    [
        # a token that comes back is blocked anew
        ((0.0, 0.3, 0.1, 0.3, 0.35), None, near(2, (0.3 + 0.2) / 2, (-0.2 + 0.05) / 2, 0.5)),
        # micro-batches of one update may hold the same sequence: looks at the same weights are one
        ((0.0, 0.0, 0.3, 0.3, 0.4, 0.4), (0, 0, 1, 1, 2, 2), near(1, 0.3, 0.1, 1.0)),
        # what stands still from step to step has stopped
        ((0.0, 0.3, 0.3), (0, 1, 2), near(1, 0.3, 0.0, 0.0)),
    ],
)
def test_looks_at_one_token(looks, steps, expected, tmp_path):
    [moves] = replay_record(record(tmp_path, [[x] for x in looks], [1.0], steps=steps)).moves.values()
    assert moves == expected


def test_what_is_not_seen_again_is_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(after_block, "FORGOTTEN", 3)
    logp_old = torch.tensor([[-1.0]])

    def moves(gap):
        folder = tmp_path / str(gap)
        with Recorder(folder, method=CLIP) as recorder:
            for moved in (0.0, 0.3, *[None] * gap, 0.4):
                old = logp_old if moved is not None else torch.tensor([[-2.0]])
                recorder.add(logp=old + (moved or 0.0), logp_old=old, advantages=torch.ones(1))
        return replay_record(folder).moves

    assert moves(0)
    assert not moves(7)


def test_sequences_move_as_their_tokens_do_on_average(tmp_path):
    logp_old = torch.tensor([[-1.0, -2.0]])
    with Recorder(tmp_path, method="GSPO(0.2, 0.2)") as recorder:
        for moved in (0.0, 0.3, 0.4):
            logp = logp_old + torch.tensor([[moved, 0.1 + moved]])
            recorder.add(logp=logp, logp_old=logp_old, advantages=torch.ones(1))
    assert replay_record(tmp_path).moves["raised"] == (2, pytest.approx(0.3), pytest.approx(0.1), 1.0)


@pytest.mark.parametrize(("momentum", "stops"), [(0.0, True), (0.9, False)])
def test_momentum_carries_blocked_tokens_on(momentum, stops, tmp_path):
    """Forty contexts of their own, so that no token is moved by another's gradient."""
    logits = torch.randn(40, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    optimizer = torch.optim.SGD([logits], lr=8.0, momentum=momentum)
    advantages = torch.ones(40).index_fill_(0, torch.arange(20), -1.0)

    def logp():
        return logits.log_softmax(-1)[:, :1]

    logp_old = logp().detach()
    with Recorder(tmp_path, method=CLIP) as recorder:
        for _ in range(12):
            recorder.add(logp=logp(), logp_old=logp_old, advantages=advantages)
            optimizer.zero_grad()
            policy_loss(logp(), logp_old, advantages, method=CLIP).loss.backward()
            optimizer.step()
    seen = replay_record(tmp_path)
    for moves in seen.moves.values():
        assert moves.tokens > 10
        assert moves.before > 0.01
        assert (abs(moves.after) < 1e-6) == stops
        assert moves.onward == (not stops)
    assert len(seen.moves) == 2
