"""Each invariant, broken on purpose in a simulated run and in logs; and runs in which nothing is wrong."""

import json
import math
import re

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from bandpo import Recorder
from bandpo.audit import invariants
from bandpo.audit.diagnosis import Diagnosis, diagnose
from bandpo.audit.record import read_calls
from bandpo.audit.words import costliest
from bandpo.cli.app import app

pytest.importorskip("pyarrow")

PROMPTS, GROUP, VOCABULARY, UPDATES = 8, 4, 24, 3


def simulate(folder, seed=0, *, batches=8, length=12, move=0.05, parts=False, **fault):
    """Logits that are drawn anew for each prompt and place, so that every entropy is exact; an engine of its own.

    ``fault`` names functions that replace what a healthy run has: ``engine(z, batch, g)`` the engine's logits,
    ``reports(z, batch)`` those whose log-probabilities it tells, ``old(z, g)`` and ``new(z, g)`` the trainer's,
    ``ids(drawn, g)`` the tokens, ``reward(ids, g)`` theirs, ``spoil(given)`` the record. ``parts`` splits a batch.
    """
    g, same = torch.Generator().manual_seed(seed), lambda z, *_: z
    with Recorder(folder, method="FixedClip(0.2)", anchor=fault.get("anchor", "trainer")) as recorder:
        for batch in range(batches):
            z = (0.5 + 3 * torch.rand(PROMPTS, 1, length, 1, generator=g)).expand(-1, GROUP, -1, -1)
            z = (z * torch.randn(PROMPTS, 1, length, VOCABULARY, generator=g)).flatten(0, 1)
            sampler = fault.get("engine", same)(z, batch, g)
            ids = torch.multinomial(sampler.softmax(-1).flatten(0, 1), 1, generator=g).view(len(z), -1, 1)
            said = fault["reports"](z, batch) if "reports" in fault else sampler
            drawn, ids = ids, fault.get("ids", same)(ids, g)
            reward = fault.get("reward", lambda ids, g: (ids % 2).float().mean(1))(ids.squeeze(2), g)
            advantages = (reward.view(-1, GROUP) - reward.view(-1, GROUP).mean(1, keepdim=True)).flatten()

            def of(logits, ids=ids):
                return logits.log_softmax(-1).gather(2, ids).squeeze(2)

            old = of(fault.get("old", same)(z, g))
            for update in range(UPDATES):
                moved = z + update * move * torch.randn(z.shape, generator=g)
                new = fault.get("new", same)(moved, g).log_softmax(-1)
                given = {
                    "logp": of(new),
                    "logp_old": old,
                    "logp_rollout": of(said, drawn),
                    "entropy": -(new.exp() * new).sum(-1),
                    "advantages": advantages,
                    "reward": reward,
                    "group": torch.arange(PROMPTS).repeat_interleave(GROUP),
                    "tokens": ids.squeeze(2),
                    "truncated": torch.zeros(len(z), dtype=torch.bool),
                    "version": batch,
                }
                given = fault.get("spoil", same)(given)
                if parts:
                    given = {name: x[update::UPDATES] for name, x in given.items() if name != "version"}
                    recorder.add(**given, step=batch * UPDATES + update, version=batch * UPDATES)
                else:
                    recorder.add(**given, step=batch, generation=batch, update=update)
    return folder


def noise(size):
    return lambda z, *rest: z + size * torch.randn(z.shape, generator=rest[-1])


def nucleus(z, *_):
    ordered, places = z.softmax(-1).sort(-1, descending=True)
    kept = torch.zeros_like(z, dtype=torch.bool).scatter(-1, places, ordered.cumsum(-1) - ordered < 0.9)
    return z.masked_fill(~kept, -1e9)


def changed(**how):
    """A spoiler of what is recorded: by name a function of all that is given; None leaves it out."""

    def spoil(given):
        made = {name: make(given) if make else None for name, make in how.items()}
        return {name: x for name, x in (given | made).items() if x is not None}

    return spoil


def behind(z, batch, g):
    return noise(0.25 * min(batch, 4))(z, g)


def padded(name, at):
    """Four places that nobody sampled, at the start or the end: the engine tells 0, the trainer is astonished."""

    def make(given):
        values = {"logp": -6.0, "logp_old": -6.0, "logp_rollout": 0.0, "entropy": 1.0, "tokens": 0}
        extra = torch.full((len(given[name]), 4), values[name], dtype=given[name].dtype)
        return torch.cat([extra, given[name]] if at == "start" else [given[name], extra], 1)

    return make


def at_the(end):
    return changed(
        **{name: padded(name, end) for name in ("logp", "logp_old", "logp_rollout", "entropy", "tokens")}
    )


CUT = {"truncated": lambda d: torch.ones(32).bool()}
NO_VERSION = changed(version=None)
FAULTS = {
    "colder engine": ("temperature", {"engine": lambda z, *_: z / 0.7}),
    "raw log-probabilities": ("temperature", {"reports": lambda z, _: 0.7 * z}),
    "old temperature": ("temperature", {"old": lambda z, _: z / 1.4}),
    "top-p": ("top-p", {"engine": nucleus}),
    "top-p, raw": ("top-p", {"engine": nucleus, "reports": lambda z, _: z}),
    "stale": ("stale", {"engine": behind, "spoil": changed(version=lambda d: max(0, d["version"] - 4))}),
    "stale, no versions": ("stale", {"engine": behind, "spoil": NO_VERSION}),
    "bypass": ("stale", {"engine": behind, "spoil": changed(logp_old=lambda d: d["logp_rollout"])}),
    "dead sync": ("weight-sync", {"engine": behind}),
    "noisy engine": ("engine-mismatch", {"engine": noise(0.3)}),
    "retokenised": (
        "retokenised",
        {"ids": lambda x, g: torch.where(torch.rand(x.shape, generator=g) < 0.02, 0, x)},
    ),
    "shifted": ("shift", {"spoil": changed(logp_old=lambda d: d["logp_old"].roll(1, 1))}),
    "both shifted": (
        "shift",
        {
            "spoil": changed(
                **{name: lambda d, name=name: d[name].roll(-1, 1) for name in ("logp", "logp_old")}
            )
        },
    ),
    "prompt": ("mask", {"spoil": at_the("start")}),
    "padding": ("mask", {"spoil": at_the("end")}),
    "dropout": ("dropout", {"new": noise(0.3)}),
    "no advantages": ("no-signal", {"spoil": changed(advantages=lambda d: 0 * d["advantages"])}),
    "scale": ("advantage-scale", {"spoil": changed(advantages=lambda d: 4000 * d["advantages"])}),
    "sign": ("reward-sign", {"spoil": changed(advantages=lambda d: -d["advantages"])}),
    "groups": (
        "grouping",
        {
            "spoil": changed(
                advantages=lambda d: d["reward"] - d["reward"].view(GROUP, -1).mean(0).repeat(GROUP)
            )
        },
    ),
    "flat": ("reward-flat", {"spoil": changed(reward=lambda d: 0 * d["reward"])}),
    "flat and cut off": ("truncated", {"spoil": changed(reward=lambda d: 0 * d["reward"], **CUT)}),
    "random": ("reward-noise", {"length": 1, "reward": lambda ids, g: torch.rand(len(ids), generator=g)}),
    "nan": ("nan", {"spoil": changed(logp=lambda d: d["logp"].index_fill(0, torch.tensor(2), math.nan))}),
    "far": ("step-too-large", {"move": 4.0}),
    "cut off": ("truncated", {"spoil": changed(**CUT)}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_told_from_the_others(name, tmp_path):
    code, fault = FAULTS[name]
    found = diagnose(simulate(tmp_path, **fault))
    assert (found.findings[0].code, found.healthy) == (code, False), found.headline
    assert found.findings[0].advice


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_is_left_in_peace(seed, tmp_path):
    """Rounding in the engine, other lengths; none of 20 may be alarmed (1 of 20 is what is promised)."""
    found = diagnose(simulate(tmp_path, seed, length=(4, 12, 40)[seed % 3], engine=noise(0.01 * (seed % 2))))
    assert found.healthy, found.headline
    assert found.headline.startswith(("ok: ", "rare-tokens-blocked: "))


@pytest.mark.parametrize(
    ("anchor", "engine", "code"),
    [
        ("rollout", noise(0.01), "ok"),
        ("trainer", noise(0.01), "engine-mismatch"),
        ("rollout", lambda z, *_: z / 0.7, "temperature"),
        ("rollout", behind, "stale"),
    ],
)
def test_where_the_old_policy_is_meant_to_be_the_engine_rounding_is_no_fault(anchor, engine, code, tmp_path):
    spoil = changed(logp_old=lambda d: d["logp_rollout"])
    found = diagnose(simulate(tmp_path, anchor=anchor, engine=engine, spoil=spoil))
    assert found.headline.partition(":")[0].split()[0] == code


@pytest.mark.parametrize(("size", "code"), [(0.0, "ok"), (0.01, "engine-mismatch")])
@pytest.mark.parametrize("seed", range(3))
def test_a_later_part_of_a_batch_is_not_stale(size, code, seed, tmp_path):
    spoil = changed(logp_old=lambda d: d["logp_rollout"])
    found = diagnose(simulate(tmp_path, seed, length=4, engine=noise(size), spoil=spoil, parts=True))
    assert found.headline.partition(":")[0] in (code, code.replace("ok", "rare-tokens-blocked"))


def test_what_cannot_be_tested_is_named(tmp_path):
    bare = changed(
        **dict.fromkeys(("entropy", "logp_rollout", "reward", "group", "tokens", "truncated", "version"))
    )
    found = diagnose(simulate(tmp_path, spoil=bare))
    assert found.healthy
    assert found.untested["surprisal equals entropy"] == "record entropy= and update="
    assert "engine and trainer agree" in found.untested


def test_the_command(tmp_path):
    simulate(tmp_path / "sick", engine=lambda z, *_: z / 0.7)
    simulate(tmp_path / "well")
    sick = CliRunner().invoke(app, ["diagnose", str(tmp_path / "sick"), "--json"])
    said = json.loads(sick.output)
    assert (sick.exit_code, said["findings"][0]["code"], said["findings"][0]["ok"]) == (
        1,
        "temperature",
        False,
    )
    assert "learning rate" not in sick.output
    well = CliRunner().invoke(app, ["diagnose", str(tmp_path / "well")])
    assert (well.exit_code, "passed: values are numbers; the ratio is 1" in well.output) == (0, True)
    with pytest.raises(ValueError, match="is no log of a run"):
        CliRunner().invoke(app, ["diagnose", str(tmp_path / "none")], catch_exceptions=False)


def trl_log(folder, steps=300, **course):
    """TRL's log of a run whose reward rises all along, but for what ``course`` says, each a function of 0 to 1."""
    g = np.random.default_rng(0)
    healthy = {
        "reward": lambda t: 0.1 + 0.6 * t,
        "entropy": lambda t: 1.2 - 0.3 * t,
        "grad_norm": lambda t: 0.3,
    }
    healthy |= {"frac_reward_zero_std": lambda t: 0.2, "completions/clipped_ratio": lambda t: 0.02}
    healthy |= {"clip_ratio/region_mean": lambda t: 0.002}
    rows = []
    for step in range(1, steps + 1):
        values = {name: f(step / steps) for name, f in (healthy | course).items()}
        values["reward"] = min(1.0, values["reward"] + 0.03 * g.standard_normal())
        rows.append({"step": step, "completions/mean_length": 90.0} | values)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    return folder


def test_trls_default_run_is_told_that_nothing_is_wrong(tmp_path):
    found = diagnose(trl_log(tmp_path, **{"clip_ratio/region_mean": lambda t: 0.0}))
    assert (found.healthy, found.findings[0].code) == (True, "on-policy")
    assert "nothing to change" in found.findings[0].advice


def test_a_plateau_is_found_and_explained(tmp_path):
    def flat(t):
        return 0.1 + min(t, 0.3)

    found = diagnose(trl_log(tmp_path, reward=flat))
    assert found.findings[0].code == "plateau"
    since = int(found.headline.split("since step ")[1].split(":")[0])
    assert abs(since - 90) < 15
    assert "nothing that is logged explains it; the clip drops 0.2% and is not the cause" in found.headline
    stuck = {"frac_reward_zero_std": lambda t: min(0.7, 0.2 + t), "entropy": lambda t: 1.2 * 0.05**t}
    stuck["completions/clipped_ratio"] = lambda t: 0.6
    found = diagnose(trl_log(tmp_path, reward=flat, **stuck))
    assert [f.code for f in found.findings] == ["plateau", "truncated", "no-signal", "entropy-collapse"]
    assert "70% of groups carry no signal" in found.headline
    assert "entropy_coef" in found.findings[-1].advice


FALLS = {"reward": lambda t: 0.6 if t < 0.5 else 0.0, "grad_norm": lambda t: 0.3 if t < 0.5 else 8.0}
COURSES = [
    (
        FALLS,
        r"collapse: from step \d+ on reward 0\.6\d* → -?0\.00\d*, grad_norm 0.3 → 8: the clip drops 0.2%",
        False,
    ),
    (FALLS | {"completions/clipped_ratio": lambda t: t}, "collapse: .*: 75% of answers are cut off", False),
    (
        {"learning_rate": lambda t: 0.0, "reward": lambda t: 0.3},
        "plateau: .*learning_rate never exceeds 0",
        False,
    ),
    ({"learning_rate": lambda t: 1e-6}, "ok: ", True),
    ({"grad_norm": lambda t: 0.0, "reward": lambda t: 0.3}, "plateau: .*: grad_norm never exceeds 0;", False),
    (
        {"reward": lambda t: 1.0, "frac_reward_zero_std": lambda t: 0.9},
        "plateau: .* these prompts are solved",
        True,
    ),
]


@pytest.mark.parametrize(("course", "headline", "healthy"), COURSES)
def test_a_fall_a_rate_of_0_and_a_solved_task(course, headline, healthy, tmp_path):
    found = diagnose(trl_log(tmp_path, **course))
    assert (bool(re.match(headline, found.headline)), found.healthy) == (True, healthy), found.headline


@pytest.mark.parametrize(("steps", "codes"), [(4, []), (7, []), (8, ["no-signal"])])
def test_the_groups_of_a_few_log_steps_are_too_few(steps, codes, tmp_path):
    found = diagnose(trl_log(tmp_path, steps=steps, frac_reward_zero_std=lambda t: 1.0)).findings
    assert [f.code for f in found] == codes


@pytest.mark.parametrize("noise", range(5))
def test_a_run_that_rises_has_no_plateau(noise, tmp_path):
    found = diagnose(trl_log(tmp_path, steps=60 * (noise + 1), reward=lambda t: 0.8 * math.sqrt(t)))
    assert (found.healthy, found.findings) == (True, [])


def test_a_line_with_nan_is_a_finding_and_no_line_is_dropped(tmp_path):
    found = diagnose(trl_log(tmp_path, grad_norm=lambda t: math.nan if t > 0.5 else 0.3))
    assert found.headline == "nan: 150 of 300 log steps hold NaN or infinite values, first step 151"


def test_verls_log(tmp_path):
    log = tmp_path / "verl.jsonl"
    rows = [
        {"critic/score/mean": 0.1, "actor/entropy": 1.2 * 0.97**k, "actor/pg_clipfrac": 0.001}
        for k in range(100)
    ]
    log.write_text("".join(json.dumps({"step": k, "data": row}) + "\n" for k, row in enumerate(rows)))
    found = diagnose(log)
    assert [f.code for f in found.findings] == ["plateau", "entropy-collapse"]
    assert "actor_rollout_ref.actor.entropy_coeff" in found.findings[1].advice


def test_the_costliest_blocked_words_in_their_answers(tmp_path):
    old = torch.tensor([[0.5, 0.01, 0.5], [0.5, 0.5, 0.2]]).log()
    given = {
        "logp_old": old,
        "tokens": torch.tensor([[7, 8, 9], [4, 5, 6]]),
        "advantages": torch.tensor([2.0, -1.0]),
    }
    with Recorder(tmp_path, method="FixedClip(0.2)") as recorder:
        for up in (0.02, 0.04):  # the second time it costs more, and it counts once
            logp = torch.tensor([[0.5, up, 0.5], [0.5, 0.5, 0.1]]).log()
            recorder.add(logp=logp, **given, step=3)
    rare, common = costliest(read_calls(tmp_path))
    assert (rare.answer, rare.at, rare.step, rare.advantage) == ([7, 8, 9], 1, 3, 2.0)
    assert (rare.cost, rare.p, rare.ratio) == pytest.approx((8.0, 0.01, 4.0), rel=1e-4)
    assert [rare.kept[rule] for rule in ("the run", "Clip-Higher", "Band", "no clip")] == [0, 0, 1, 1]
    assert (common.answer[common.at], common.cost) == (6, pytest.approx(0.5, rel=1e-4))
    result = CliRunner().invoke(app, ["diagnose", str(tmp_path), "--words"])
    assert " 1. 7 ⟦8⟧ 9\n    step 3: p 0.01, ratio 4, A +2; gradient kept by the run 0%" in result.output


TOKENS_OF_A_LOSS = PROMPTS * GROUP * 12


def test_a_record_that_was_looked_at_as_a_whole_is_said_to_be(tmp_path):
    found = diagnose(simulate(tmp_path))
    losses = 8 * UPDATES
    assert found.coverage.complete
    assert found.coverage.as_json() == {
        "tokens": losses * TOKENS_OF_A_LOSS,
        "total_tokens": losses * TOKENS_OF_A_LOSS,
        "losses": losses,
        "total_losses": losses,
    }
    assert str(found.coverage) == "looked at all 9,216 tokens of 24 losses"
    result = CliRunner().invoke(app, ["diagnose", str(tmp_path)])
    assert f"\n{found.coverage}\n" in result.output
    assert "\npassed: values are numbers" in result.output


def test_of_a_long_record_it_is_said_how_much_was_looked_at(tmp_path, monkeypatch):
    # The fourth batch is the first that is left out.
    monkeypatch.setattr(invariants, "TOKENS", 2 * TOKENS_OF_A_LOSS + 1)
    found = diagnose(simulate(tmp_path))
    assert not found.coverage.complete
    assert found.coverage.as_json() == {
        "tokens": 3 * UPDATES * TOKENS_OF_A_LOSS,
        "total_tokens": 8 * UPDATES * TOKENS_OF_A_LOSS,
        "losses": 3 * UPDATES,
        "total_losses": 8 * UPDATES,
    }
    said = "looked at 3,456 of 9,216 tokens (the first 9 of 24 losses)"
    assert str(found.coverage) == said
    # Nothing that is said to be right is said of more than that.
    assert (
        found.headline
        == "ok: nothing is wrong in what could be tested of the first 9 of 24 losses (10 tests)"
    )
    printed = CliRunner().invoke(app, ["diagnose", str(tmp_path)]).output
    assert f"\n{said}\n" in printed
    assert "\npassed in the first 9 of 24 losses: values are numbers" in printed
    of_scripts = json.loads(CliRunner().invoke(app, ["diagnose", str(tmp_path), "--json"]).output)
    assert of_scripts["coverage"] == found.coverage.as_json()
    assert said in found._repr_html_()


def test_a_fault_in_a_long_record_is_said_beside_how_much_was_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(invariants, "TOKENS", 1)
    folder = simulate(tmp_path, new=lambda z, g: z / 0.7)
    result = CliRunner().invoke(app, ["diagnose", str(folder)])
    assert result.exit_code == 1
    assert "\nlooked at 1,152 of 9,216 tokens (the first 3 of 24 losses)\n" in result.output


def test_tokens_of_sequences_that_are_left_out_do_not_count_as_looked_at(tmp_path):
    old = torch.full((4, 6), -1.0)
    spoilt = old.clone()
    spoilt[1, 2] = math.nan
    with Recorder(tmp_path) as recorder:
        for logp in (old, spoilt):
            recorder.add(logp=logp, logp_old=old, advantages=torch.tensor([1.0, -1.0, 1.0, -1.0]))
    assert str(diagnose(tmp_path).coverage) == "looked at all 42 tokens of 2 losses"


def test_a_log_holds_no_tokens_to_look_at(tmp_path):
    found = diagnose(trl_log(tmp_path))
    assert found.coverage is None
    assert found.as_json()["coverage"] is None
    assert "looked at" not in CliRunner().invoke(app, ["diagnose", str(tmp_path)]).output
    assert Diagnosis(found.tested).headline == found.headline
