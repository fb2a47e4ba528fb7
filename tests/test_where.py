"""`bandpo where`: a reader's place in the theory and in the map."""

import itertools
import json
import math
import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("typer")
from typer.testing import CliRunner

from bandpo import Band, FixedClip, Recorder
from bandpo.audit.settings import Setup
from bandpo.cli.app import app
from bandpo.where import Placement, advice, expected

OURS = Placement(0.002, 128, 4, 4)


@pytest.mark.parametrize(("updates", "rise"), [(4, 0.325), (8, 0.079), (16, 0.023)])
def test_from_rest_a_clip_binds_above_so_many_nats(updates, rise):
    """Clip 0.2 binds only if g·S(U − 1) > ln 1.2; figures from elsewhere."""
    assert Placement(0.002, 128, updates, 1).binding_rise == pytest.approx(rise, abs=5e-4)


def simulated(rise, beta, epochs, minibatches, lag, draws, *, adam, batches=600):
    """Share of looks beyond 1.2 where one number is trained, its answer drawn by chance: no formula of the theory."""
    chance, none = random.Random(0), (1 - draws / 128) ** (128 / minibatches)
    held = [[chance.random() > none for _ in range(minibatches)] for _ in range(batches)]
    place, momentum, versions, blocked = 0.0, 0.0, [], []
    for batch in range(batches):
        versions.append(place)
        old = versions[max(batch - lag, 0)]
        for update in range(epochs * minibatches):
            gradient = 0.0
            if held[batch - lag][update % minibatches]:
                out = math.exp(place - old) > 1.2
                blocked.append(out)
                gradient = 0.0 if out else 1.0
            if adam:  # its second moment is that of all other weights: 1
                momentum = beta * momentum + (1 - beta) * gradient
                place += rise * momentum
            else:  # at a rate with which a gradient makes the rise in the end
                momentum = beta * momentum + gradient
                place += rise * (1 - beta) * momentum
    return sum(blocked) / len(blocked)


def test_the_theory_gives_the_blocked_share_of_a_simulation():
    """Over optimizers, rises, epochs × minibatches, lags and draws."""
    uses = [(1, 1), (1, 4), (4, 1), (4, 4), (1, 16), (16, 1)]
    gaps, without_lag = [], []
    for beta, (epochs, minibatches), lag, draws, rise in itertools.product(
        (0.0, 0.9), uses, (0, 1, 4, 8), (0.1, 0.25, 1.0, 10.0), (0.01, 0.05, 0.2, 0.5)
    ):
        run = Placement(draws / 128, 128, epochs, minibatches, lag, beta)
        seen = simulated(rise, beta, epochs, minibatches, lag, draws, adam=beta == 0.9 and lag == 4)
        gaps.append(run.blocked_share(rise) - seen)
        without_lag.append(replace(run, lag=0).blocked_share(rise) - seen)
    assert sum(map(abs, gaps)) / len(gaps) < 0.04
    assert abs(sum(gaps)) / len(gaps) < 0.01
    assert sum(map(abs, without_lag)) / len(gaps) > 0.15


@pytest.mark.parametrize(
    ("minibatches", "lag", "share"),
    [(4, 4, 0.65), (4, 4, 0.59), (4, 8, 0.68), (4, 8, 0.76), (1, 4, 0.70), (1, 4, 0.52)],
)  # what a program written apart from this one saw clip 0.2 block
def test_stale_data_are_not_told_that_no_rule_matters(minibatches, lag, share):
    run = Placement(0.002, 128, 1, minibatches, lag)
    assert expected(run)[0] == "Perhaps"
    assert run.blocked_share(0.3) == pytest.approx(share, abs=0.25)
    said = dict(advice(run, (share,) * 3, Setup(stale=True)))
    assert said["Can the upper side matter?"].startswith("Yes. Your rule blocks")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, "Perhaps"),
        ({"rise": 0.5}, "Perhaps"),
        ({"rise": 0.05}, "Probably not"),  # from rest, 4 looks need 0.1 nats
        ({"rise": 0.05, "momentum": 0.0}, "Probably not"),  # 3 earlier looks
        ({"rise": 0.07, "momentum": 0.0}, "Perhaps"),
        ({"rise": 0.05, "epochs": 16, "minibatches": 1}, "Perhaps"),
        ({"rise": 0.05, "epochs": 1, "minibatches": 16}, "Probably not"),  # seen once
        ({"epochs": 1, "minibatches": 1}, "No"),
        ({"rule": FixedClip(0.2, math.inf), "lag": 4}, "No"),
        ({"rule": Band(), "rise": 0.5}, "Probably not"),  # its bound is 10
    ],
    ids=str,
)
def test_what_the_theory_expects_of_a_run(change, word):
    assert expected(replace(OURS, **change))[0] == word


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"probability": 0.0}, "--probability 0: choose one between"),
        ({"probability": 1e-300}, "--probability 1e-300: a batch of 128 draws it 1.3e-298 times, so no run"),
        ({"batch": 0}, "--batch 0: choose 1 to inf"),
        ({"lag": -4}, "--lag -4: choose 0 to 10000"),
        ({"momentum": 1.0}, "--beta1 1: choose at least 0 and below 1"),
        ({"rise": 6.3}, "--rise 6.3: choose nats above 0, up to −log p = 6.2"),
        ({"rise": 0.0}, "--rise 0: choose nats above 0, up to −log p = 6.2"),
    ],
)
def test_a_run_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(OURS, **change)


def told(*options):
    result = CliRunner().invoke(app, ["where", *map(str, options)])
    if result.exception is not None:
        raise result.exception
    return " ".join(result.output.split())


PLACE = ["--probability", "0.002", "--batch", "128", "--minibatches", "4", "--epochs"]
STALE = ["--blocked-share", 0.6, "--lag", 4]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            [*PLACE, 4],
            "0.26 times. From rest, the bound of 1.2 acts if one gradient raises it by more than 0.099",
        ),
        ([*PLACE, 1, "--run-method", "FixedClip(0.2, inf)"], "Your rule has no upper bound"),
        ([*PLACE, 1, "--blocked-share", 0.9, "--lag", 4], "Yes. Your rule blocks 90% of rare winners'"),
        ([*PLACE, 1, "--blocked-share", 0.4, "--lag", 4], "Not known. Your rule blocks 40%"),
        (["--blocked-share", 0.9, "--lag", 0], "Not known. Your rule blocks 90%"),
        (["--blocked-share", 0.9], "Yes, if your data are stale. Your rule"),
        (["--blocked-share", 0.08, "--lag", 0], "No. Your rule blocks 8%"),
        (["--blocked-share", 0.08], "Not at this rate. Your rule blocks 8%"),
        ([*STALE, "--run-method", "DAPO()"], "Yes. Your rule blocks 60%"),
        (
            [*STALE, "--run-method", "BandAbove()"],
            "Not known. Your rule blocks 60% of rare winners' gradient. It lets",
        ),
        ([*STALE, "--run-method", "Band(KL(), ByEntropy(0.02, 0.1))"], "Yes. Your rule"),
        (
            [*STALE, "--run-method", "GSPO()"],
            "Not known. Your rule blocks 60% of rare winners' gradient. It clips",
        ),
    ],
)
def test_the_command_says_whether_the_rule_can_matter(options, said):
    assert said in told(*options)


def test_the_answers_as_json():
    answers = json.loads(told("--blocked-share", 0.2, "--json"))
    assert answers["blocked_share"] == 0.2
    assert answers["Can the upper side matter?"].startswith("Not known.")


def test_the_command_reads_a_log_and_a_record(tmp_path):
    fresh = {"step": 1, "entropy": 1.0}
    winners = {"audit/tokens": 9, "audit/tokens_positive_below_0.1": 7, "audit/mass_positive_below_0.1": 3.0}
    log, line = tmp_path / "verl.jsonl", json.dumps(fresh | winners | {"audit/blocked_mass_below_0.1": 0.6})
    log.write_text(line)
    few = told(log)  # one step shows no differences
    assert "Not known. Your rule blocks 60% [0%, 100%] of rare winners' gradient. So wide an interval" in few
    log.write_text("\n".join([line] * 10))
    assert "Yes, if your data are stale. Your rule blocks 60%" in told(log)
    assert "70 rare winners" in told(log, *PLACE, 1)
    (tmp_path / "config.yaml").write_text("importance_sampling_level: token\nlag: 4")
    assert "Yes. Your rule blocks 60%" in told(log)  # as the configuration tells
    assert "Not known. Your rule blocks 60%" in told(log, "--lag", 0)
    old = torch.tensor([[0.01, 0.02, 0.5]]).log()
    ratios = torch.tensor([[2.0, 1.5, 1.5]]).log()  # of rare winners' gradient 2 in 3.5 is blocked
    for age, word in {None: "Yes, if your data are stale", 4: "Yes", 0: "Not known"}.items():
        with Recorder(tmp_path / f"{age}", clip="FixedClip(0.2, 0.6)") as recorder:
            for step in range(10):
                told_age = {"step": step, "version": None if age is None else step - age}
                recorder.add(logp=old + ratios, logp_old=old, advantages=torch.ones(1), **told_age)
        assert f"{word}. Your rule blocks 57%" in told(tmp_path / f"{age}")
    assert "The bound of 1.6 acts" not in told(tmp_path / "None", *PLACE, 4)  # measured, so no theory
    log.write_text(json.dumps(fresh))
    for arguments, message in (
        ([log], "does not tell what the clip blocked of rare winners"),
        ([log, "--blocked-share", 0.1], "say the same; leave one out"),
        (["--probability", 0.1], "give a run"),
    ):
        with pytest.raises(ValueError, match=message):
            told(*arguments)
