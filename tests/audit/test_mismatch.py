"""Mismatch told apart from movement: numbers worked by hand, sources' definitions, and verdicts on runs gone wrong."""

import math

import pytest
import torch
from typer.testing import CliRunner

from bandpo import GSPO, Recorder, parse
from bandpo.audit.metrics import BINS
from bandpo.audit.mismatch import Mismatch
from bandpo.audit.replay import replay_record
from bandpo.batch import Batch
from bandpo.cli.app import app

pytest.importorskip("pyarrow")


def seen_of(new, old, rollout, advantages, mask=None, *, clip="FixedClip(0.2)", lag=None):
    batch = Batch.read(new, old, advantages, mask)._replace(logp_anchor=rollout)
    return Mismatch.from_batch(batch, parse(clip), lag)


def figures(m):
    """All of them by name."""
    found = m.figures()
    for key, names, label in (("bin", BINS, "{}"), ("lag", m.lags, "lag_{}")):
        for name in names:
            of_it = m.figures(**{key: name})
            found |= {f"{what}/{label.format(name)}": x for what, x in of_it.items()}
    return found


def test_numbers_worked_by_hand():
    """Engine 0.5, 0.1, 0.02; trainer before the update 0.4, 0.3, 0.02; after it 0.4, 0.36, 0.03; clip 0.25."""
    rollout = torch.tensor([[0.5, 0.1, 0.02, 0.9]]).log()
    old = torch.tensor([[0.4, 0.3, 0.02, 0.1]]).log()
    new = torch.tensor([[0.4, 0.36, 0.03, 0.9]]).log()
    mask = torch.tensor([[1, 1, 1, 0]])
    m = seen_of(new, old, rollout, torch.ones(1), mask, clip="FixedClip(0.25, 0.25)")
    found = figures(m)
    w = [0.8, 3.0, 1.0]
    assert found == pytest.approx(
        found
        | {
            "tokens": 3,
            "kl_k1": -sum(math.log(x) for x in w) / 3,
            "kl_k3": sum(x - 1 - math.log(x) for x in w) / 3,
            "extreme": 1 / 3,
            "ess": 4.8**2 / (3 * (0.64 + 9 + 1)),
            "mean_weight": 1.6,
            "blocked_before": 1 / 3,  # 3 > 1.25
            "blocked_moved": 1 / 3,  # 1.5 > 1.25
            "blocked_total": 2 / 3,  # 3.6 and 1.5
            "spent_before": (0.2 / 0.25 + 1 + 0) / 3,
            "spent_moved": (0 + 0.2 / 0.25 + 1) / 3,
            "kl_k3/above_0.1": (0.8 - 1 - math.log(0.8) + 3 - 1 - math.log(3)) / 2,  # p = 0.1 is not below it
            "tokens/lag_unknown": 3,
        },
        rel=1e-5,
    )


@pytest.mark.slow
def test_k1_and_ess_are_those_of_verl():
    """Against verl's own functions, where they are installed."""
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
    g = torch.Generator().manual_seed(0)
    rollout = -torch.rand(6, 20, generator=g) * 4 - 0.1
    old = rollout + 0.2 * torch.randn(6, 20, generator=g)
    mask = (torch.rand(6, 20, generator=g) > 0.3).float()
    theirs = helper.compute_offpolicy_metrics(old, rollout, mask)
    weights = helper.compute_is_metrics(
        rollout_is_weights=(old - rollout).exp(),
        raw_rollout_is_weights=(old - rollout).exp(),
        log_ratio_for_metrics=old - rollout,
        response_mask=mask,
        rollout_is="token",
        rollout_is_threshold=1e9,
        rollout_is_threshold_lower=1e-9,
    )
    m = seen_of(old, old, rollout, torch.ones(6), mask).figures()
    assert m["kl_k1"] == pytest.approx(theirs["kl"], rel=1e-4)
    assert m["kl_k3"] == pytest.approx(theirs["k3_kl"], rel=1e-4)
    assert m["ess"] == pytest.approx(weights["rollout_is_eff_sample_size"], rel=1e-4)


def test_sums_over_parts_are_the_whole():
    g = torch.Generator().manual_seed(1)
    rollout = -torch.rand(6, 20, generator=g) * 4 - 0.1
    old = (rollout + 0.2 * torch.randn(6, 20, generator=g)).clamp(max=-0.01)
    lag = torch.arange(6)[:, None].expand(6, 20)
    tensors = old - 0.1, old, rollout, torch.randn(6, generator=g), torch.ones(6, 20)
    whole = seen_of(*tensors, clip="Band()", lag=lag)
    parts = [[x[k] for x in (*tensors, lag)] for k in (slice(2), slice(2, 6))]
    one, two = (seen_of(*part, clip="Band()", lag=of_it) for *part, of_it in parts)
    assert figures(one + two) == pytest.approx(figures(whole), rel=1e-5)
    assert whole.lags == ["0", "1", "2-3", "4-7"]


def test_what_the_engine_could_not_score_is_left_out():
    old = torch.tensor([[0.4, 0.3]]).log()
    rollout = torch.tensor([[0.4, math.nan]]).log()
    m = seen_of(old, old, rollout, torch.ones(1))
    assert (m.figures()["tokens"], m.figures()["kl_k3"]) == (1, pytest.approx(0, abs=1e-12))
    none = seen_of(old, old, torch.full_like(old, math.nan), torch.ones(1))
    assert none.figures()["tokens"] == 0


def simulated(folder, engine=lambda z, lag, g: z, reported=None, lags=4, move=0.15, **settings):
    """A policy of random logits over 64 tokens; ``engine`` makes its logits of the trainer's and the lag."""
    g = torch.Generator().manual_seed(0)
    with Recorder(folder, framework="simulation", **settings) as recorder:
        for step in range(12):
            shape = (16, 40, 64)
            z = (0.5 + 3 * torch.rand(16, 40, 1, generator=g)) * torch.randn(shape, generator=g)
            sampler = engine(z, step % lags, g)
            tokens = torch.multinomial(sampler.softmax(-1).flatten(0, 1), 1, generator=g).view(16, 40, 1)
            new = z + move * torch.randn(shape, generator=g)
            said = sampler if reported is None else reported(z)
            new, old, rollout = (x.log_softmax(-1).gather(2, tokens).squeeze(2) for x in (new, z, said))
            given = {"logp": new, "logp_old": old, "logp_rollout": rollout}
            given["advantages"] = torch.randn(16, generator=g)
            recorder.add(**given, step=step, version=step - step % lags)
    return replay_record(folder, {"GSPO": GSPO()})


def test_the_command(tmp_path):
    simulated(tmp_path, lambda z, lag, g: z / 0.7, clip="FixedClip(0.2)")
    options = ["--clip=FixedClip(0.1)", "--method=GSPO()", "--method=Band(KL(), 0.05)"]
    ran = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["audit", str(tmp_path), *options])
    assert ran.exit_code == 0, ran.output
    seen = replay_record(tmp_path, {"a": "FixedClip(0.1)"})
    wanted = ["12 steps, 7,680 tokens", "lag 2-3"]
    wanted += ["FixedClip(0.1)", "GSPO()", "Band(KL(), 0.05)"]
    wanted += [f"{seen.audits['a'].metrics()['clip_high']:.2%}"]
    assert [text for text in wanted if text not in ran.output] == []
    with pytest.raises(ValueError, match="unknown name 'TIS'"):
        CliRunner().invoke(app, ["audit", str(tmp_path), "--method=TIS()"], catch_exceptions=False)
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1, "clip_ratio/high_mean": 0.1}\n')
    with pytest.raises(ValueError, match="is a log, whose tokens are gone"):
        CliRunner().invoke(app, ["audit", str(log), "--method=GSPO()"], catch_exceptions=False)
