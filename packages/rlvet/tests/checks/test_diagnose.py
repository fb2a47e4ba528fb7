"""Each fault of a simulated run and of a log is named; and nothing is, where nothing is wrong."""

import json
import math
import re

import pytest
import torch
from typer.testing import CliRunner

from bandpo.audit import Recorder
from bandpo.replay.blocked_tokens import BlockedTokens
from helpers.rlvet_alone import diagnosed_without_torch, token_part
from helpers.simulated_runs import (
    FAULTS,
    GROUP,
    LENGTH,
    PROMPTS,
    UPDATES,
    behind,
    changed,
    noise,
    nucleus,
    simulate,
    trl_log,
)
from rlvet import diagnose, open_run
from rlvet.checks.diagnosis import Diagnosis
from rlvet.cli.app import app
from rlvet.records import first_pass
from selection import mostly_slow

pytest.importorskip("pyarrow")


@pytest.mark.parametrize("name", mostly_slow(FAULTS, 3))
def test_each_fault_is_told_from_the_others(name, tmp_path):
    code, fault = FAULTS[name]
    diagnosis = diagnose(simulate(tmp_path, **fault))
    assert (diagnosis.findings[0].code, diagnosis.healthy) == (code, False), diagnosis.headline
    assert diagnosis.findings[0].advice


@pytest.mark.parametrize(
    "seed", [seed if seed < 6 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(20)]
)
def test_a_healthy_run_is_left_in_peace(seed, tmp_path):
    """Rounding in the engine, other lengths; none of 20 may be alarmed (1 of 20 is what is promised)."""
    diagnosis = diagnose(
        simulate(tmp_path, seed, length=(4, 12, 40)[seed % 3], engine=noise(0.01 * (seed % 2)))
    )
    assert diagnosis.healthy, diagnosis.headline
    assert diagnosis.headline.startswith(("ok: ", "rare-tokens-blocked: "))


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
    diagnosis = diagnose(simulate(tmp_path, anchor=anchor, engine=engine, spoil=spoil))
    assert diagnosis.headline.partition(":")[0].split()[0] == code


@pytest.mark.parametrize(("size", "code"), [(0.0, "ok"), (0.01, "engine-mismatch")])
@pytest.mark.parametrize("seed", range(3))
def test_a_later_part_of_a_batch_is_not_stale(size, code, seed, tmp_path):
    spoil = changed(logp_old=lambda d: d["logp_rollout"])
    diagnosis = diagnose(simulate(tmp_path, seed, length=4, engine=noise(size), spoil=spoil, parts=True))
    assert diagnosis.headline.partition(":")[0] in (code, code.replace("ok", "rare-tokens-blocked"))


def test_what_cannot_be_tested_is_named(tmp_path):
    bare = changed(
        **dict.fromkeys(("entropy", "logp_rollout", "reward", "group", "tokens", "truncated", "version"))
    )
    diagnosis = diagnose(simulate(tmp_path, spoil=bare))
    assert diagnosis.healthy
    assert diagnosis.untested["surprisal equals entropy"] == "record entropy= and update="
    assert "engine and trainer agree" in diagnosis.untested


def test_the_command(tmp_path):
    simulate(tmp_path / "sick", engine=lambda z, *_: z / 0.7)
    simulate(tmp_path / "well")
    sick = CliRunner().invoke(app, ["diagnose", str(tmp_path / "sick"), "--json"])
    first = json.loads(sick.output)["findings"][0]
    assert (sick.exit_code, first["code"], first["ok"]) == (1, "temperature", False)
    assert "learning rate" not in sick.output
    well = CliRunner().invoke(app, ["diagnose", str(tmp_path / "well"), "-v"])
    assert (
        well.exit_code,
        "passed: values are numbers; every group has all of its answers" in well.output,
    ) == (
        0,
        True,
    )
    with pytest.raises(ValueError, match="is no log of a run"):
        CliRunner().invoke(app, ["diagnose", str(tmp_path / "none")], catch_exceptions=False)


@pytest.mark.parametrize(
    ("cut", "kl", "severity", "codes"),
    [
        (0.02, 0.1, "note", {"stop": 0, "fix": 0, "look": 0, "note": 0}),
        (0.4, 0.1, "look", {"stop": 0, "fix": 0, "look": 1, "note": 1}),
        (0.9, 0.1, "fix", {"stop": 0, "fix": 1, "look": 1, "note": 1}),
        (0.02, 1e4, "stop", {"stop": 1, "fix": 1, "look": 1, "note": 1}),
    ],
)
def test_the_exit_status_follows_the_severity(cut, kl, severity, codes, tmp_path):
    metrics = {"completions/clipped_ratio": lambda t: cut, "kl": lambda t: kl * max(0.0, t - 0.5)}
    trl_log(tmp_path, **metrics)
    for fail_on, code in codes.items():
        result = CliRunner().invoke(app, ["diagnose", str(tmp_path), "--fail-on", fail_on])
        assert result.exit_code == code, (fail_on, result.output)
    default = CliRunner().invoke(app, ["diagnose", str(tmp_path)])
    assert default.exit_code == codes["fix"]
    if codes["look"]:
        assert f" ({severity})" in default.output


def test_markdown_for_the_summary_of_a_job(tmp_path):
    trl_log(tmp_path, **{"completions/clipped_ratio": lambda t: 0.9, "my|`key`\x1b": lambda t: 1.0})
    result = CliRunner().invoke(app, ["diagnose", str(tmp_path), "--format", "markdown"])
    lines = result.output.splitlines()
    cut = (
        "truncated: 90% of answers are cut off, as from the start; the reward went 0.127 → 0.664 all the same"
    )
    assert lines[0] == f"**rlvet diagnose:** `{cut}`"
    assert "| severity | finding | since step | what to do | since then |" in lines
    (row,) = [line for line in lines if line.startswith("| fix |")]
    assert row.count(" | ") == 4
    assert "max_completion_length" in row
    # A key of the run ends neither the code nor a cell, and no control character is printed.
    assert "Not read: `my\\|'key'\\x1b`" in result.output
    (untested,) = [line for line in lines if line.startswith("Undecided: `")]
    assert "engine and trainer agree, as logged" in untested
    as_json = CliRunner().invoke(app, ["diagnose", str(tmp_path), "--json", "--format", "markdown"])
    assert "engine and trainer agree, as logged" in json.loads(as_json.output)["untested"]
    assert json.loads(as_json.output)["findings"][0]["severity"] == "fix"
    assert (result.exit_code, as_json.exit_code) == (1, 1)


def test_trls_default_run_is_told_that_nothing_is_wrong(tmp_path):
    diagnosis = diagnose(trl_log(tmp_path, **{"clip_ratio/region_mean": lambda t: 0.0}))
    assert (diagnosis.healthy, diagnosis.findings[0].code) == (True, "on-policy")
    assert "nothing to change" in diagnosis.findings[0].advice


def test_a_plateau_is_found_and_explained(tmp_path):
    def flat(t):
        return 0.1 + min(t, 0.3)

    diagnosis = diagnose(trl_log(tmp_path, reward=flat))
    assert diagnosis.findings[0].code == "plateau"
    since = int(re.search(r"from step (\d+) to 300", diagnosis.headline)[1])
    assert abs(since - 90) < 15
    assert (diagnosis.findings[0].severity, diagnosis.findings[0].onset, diagnosis.healthy) == (
        "look",
        since,
        True,
    )
    assert re.search(
        r"((it rises|a line through it rises by [\d.e-]+,) by at most 0\.0\d+"
        r"|a rise( of more than 0\.0\d+)? is excluded) \(two standard errors\)$",
        diagnosis.findings[0].cause,
    )
    stuck = {"frac_reward_zero_std": lambda t: min(0.7, 0.2 + t), "entropy": lambda t: 1.2 * 0.05**t}
    stuck["completions/clipped_ratio"] = lambda t: 0.6
    diagnosis = diagnose(trl_log(tmp_path, reward=flat, **stuck))
    assert [f.code for f in diagnosis.findings] == ["truncated", "no-signal", "entropy-collapse", "plateau"]
    assert "70% of groups teach nothing" in diagnosis.findings[1].cause
    assert "entropy_coef" in diagnosis.findings[2].advice


FALLS = {"reward": lambda t: 0.6 if t < 0.5 else 0.0, "grad_norm": lambda t: 0.3 if t < 0.5 else 8.0}
COURSES = [
    (
        FALLS,
        r"collapse: reward 0\.6\d* → -?0\.00\d*, grad_norm 0.3 → 8, entropy 1\.\d* → 0\.\d*, from the best tenth "
        r"of the run to the last",
        False,
    ),
    (FALLS | {"completions/clipped_ratio": lambda t: t}, "truncated: 75% of answers are cut off", False),
    (
        {"learning_rate": lambda t: 0.0, "reward": lambda t: 0.3},
        "no-step: learning_rate never exceeds 0",
        False,
    ),
    ({"learning_rate": lambda t: 1e-6}, "ok: ", True),
    ({"grad_norm": lambda t: 0.0, "reward": lambda t: 0.3}, "no-step: grad_norm never exceeds 0", False),
    (
        {"reward": lambda t: 1.0, "frac_reward_zero_std": lambda t: 0.9},
        "no-signal: 90% of groups teach nothing in the later half of the run; these prompts are solved",
        True,
    ),
]


@pytest.mark.parametrize(("course", "headline", "healthy"), COURSES)
def test_a_fall_a_rate_of_0_and_a_solved_task(course, headline, healthy, tmp_path):
    diagnosis = diagnose(trl_log(tmp_path, **course))
    assert (bool(re.match(headline, diagnosis.headline)), diagnosis.healthy) == (True, healthy), (
        diagnosis.headline
    )


@pytest.mark.parametrize(("steps", "codes"), [(4, []), (7, []), (8, ["no-signal"])])
def test_the_groups_of_a_few_log_steps_are_too_few(steps, codes, tmp_path):
    diagnosis = diagnose(trl_log(tmp_path, steps=steps, frac_reward_zero_std=lambda t: 1.0)).findings
    assert [f.code for f in diagnosis] == codes


@pytest.mark.parametrize("noise", range(5))
def test_a_run_that_rises_has_no_plateau(noise, tmp_path):
    diagnosis = diagnose(trl_log(tmp_path, steps=60 * (noise + 1), reward=lambda t: 0.8 * math.sqrt(t)))
    assert (diagnosis.healthy, diagnosis.findings) == (True, [])


def test_a_line_with_nan_is_a_finding_and_no_line_is_dropped(tmp_path):
    diagnosis = diagnose(trl_log(tmp_path, grad_norm=lambda t: math.nan if t > 0.5 else 0.3))
    assert diagnosis.headline == "nan: 150 of 300 log steps hold NaN or infinite values, first step 151"


def test_verls_log(tmp_path):
    log = tmp_path / "verl.jsonl"
    rows = [
        {"critic/score/mean": 0.1, "actor/entropy": 1.2 * 0.97**k, "actor/pg_clipfrac": 0.001}
        for k in range(100)
    ]
    log.write_text("".join(json.dumps({"step": k, "data": row}) + "\n" for k, row in enumerate(rows)))
    diagnosis = diagnose(log)
    assert [f.code for f in diagnosis.findings] == ["reward-flat", "entropy-collapse"]
    assert "actor_rollout_ref.actor.entropy_coeff" in diagnosis.findings[1].advice


TOKENS_OF_A_LOSS = PROMPTS * GROUP * LENGTH


def test_a_record_that_was_looked_at_as_a_whole_is_said_to_be(tmp_path):
    diagnosis = diagnose(simulate(tmp_path))
    tokens = 8 * TOKENS_OF_A_LOSS
    assert diagnosis.coverage.complete
    assert diagnosis.coverage.as_json() == {
        "tokens": tokens,
        "total_tokens": tokens,
        "batches": 8,
        "total_batches": 8,
    }
    assert str(diagnosis.coverage) == "looked at all 3,072 tokens of 8 batches"
    result = CliRunner().invoke(app, ["diagnose", str(tmp_path), "--verbose"])
    assert f"\n{diagnosis.coverage}\n" in result.output
    assert "\npassed: values are numbers" in result.output


@pytest.fixture
def _small_budget(monkeypatch):
    monkeypatch.setattr(first_pass, "TOKENS", 8 * TOKENS_OF_A_LOSS // 2)
    monkeypatch.setattr(first_pass, "FEWEST_TOKENS", 64)


@pytest.mark.usefixtures("_small_budget")
def test_of_a_long_record_it_is_said_how_much_was_looked_at(tmp_path):
    diagnosis = diagnose(simulate(tmp_path))
    coverage = diagnosis.coverage
    assert not coverage.complete
    assert (coverage.total_tokens, coverage.batches, coverage.total_batches) == (3072, 8, 8)
    assert coverage.tokens <= 1536
    share = f"{100 * coverage.tokens / 3072:.2g}%"
    text = f"looked at {coverage.tokens:,} of 3,072 tokens ({share}), in all 8 batches"
    assert str(coverage) == text
    # Nothing that is said to be right is said of more than that.
    assert diagnosis.headline.startswith(
        f"ok: nothing is wrong in what could be tested of {share} of the tokens ("
    )
    assert f"checks passed in {share} of the tokens, " in str(diagnosis)
    printed = CliRunner().invoke(app, ["diagnose", str(tmp_path), "--verbose"]).output
    assert f"\n{text}\n" in printed
    assert f"\npassed in {share} of the tokens: values are numbers" in printed
    of_scripts = json.loads(CliRunner().invoke(app, ["diagnose", str(tmp_path), "--json"]).output)
    assert of_scripts["coverage"] == coverage.as_json()
    assert text in diagnosis._repr_html_()


@pytest.mark.usefixtures("_small_budget")
def test_a_fault_in_a_long_record_is_said_beside_how_much_was_looked_at(tmp_path):
    folder = simulate(tmp_path, new=lambda z, g: z / 0.7)
    result = CliRunner().invoke(app, ["diagnose", str(folder)])
    assert result.exit_code == 1
    assert " of 3,072 tokens (" in result.output


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"engine": lambda z, batch, g: z / (0.6 if batch >= 5 else 1.0)}, "temperature"),
        ({"engine": lambda z, batch, g: nucleus(z) if batch >= 5 else z}, "top-p"),
    ],
)
@pytest.mark.usefixtures("_small_budget")
def test_a_fault_that_begins_midway_is_found_with_its_onset(fault, code, tmp_path):
    finding = diagnose(simulate(tmp_path, **fault)).findings[0]
    assert (finding.code, finding.onset) == (code, 5)
    assert "before step 5 they agree" in finding.cause


def test_tokens_of_sequences_that_are_left_out_do_not_count_as_looked_at(tmp_path):
    old = torch.full((4, 6), -1.0)
    spoilt = old.clone()
    spoilt[1, 2] = math.nan
    with Recorder(tmp_path) as recorder:
        for logp in (old, spoilt):
            recorder.add(logp=logp, logp_old=old, advantages=torch.tensor([1.0, -1.0, 1.0, -1.0]))
    assert str(diagnose(tmp_path).coverage) == "looked at all 24 tokens of 2 batches"


def test_a_log_holds_no_tokens_to_look_at(tmp_path):
    diagnosis = diagnose(trl_log(tmp_path))
    assert diagnosis.coverage is None
    assert diagnosis.as_json()["coverage"] is None
    assert "looked at" not in CliRunner().invoke(app, ["diagnose", str(tmp_path)]).output
    assert Diagnosis(diagnosis.tested).headline == diagnosis.headline


CHECKED_WITHOUT_TORCH = ("colder engine", "both shifted", "padding", "groups", "nan", "random")


@pytest.mark.slow
def test_without_torch_the_tokens_of_a_record_are_diagnosed_alike(tmp_path):
    """Of a healthy run, and of faults of every check of tokens."""
    folders = [simulate(tmp_path / "healthy", engine=noise(0.01))]
    folders += [simulate(tmp_path / name, **FAULTS[name][1]) for name in CHECKED_WITHOUT_TORCH]
    for folder, without in zip(folders, diagnosed_without_torch(*folders), strict=True):
        diagnosis = diagnose(folder)
        assert token_part(without["findings"]) == token_part(
            [[*finding.as_json().values()] for finding in diagnosis.tested]
        )
        assert without["coverage"] == diagnosis.coverage.as_json()
        assert without["setup"] == str(diagnosis.setup)
        if diagnosis.healthy:
            assert "the log holds numbers" in [finding[2] for finding in without["findings"]]
        else:
            assert len(without["findings"]) == len(diagnosis.tested)


def test_without_torch_a_log_is_diagnosed_alike(tmp_path):
    trl_log(tmp_path, grad_norm=lambda t: math.nan if t > 0.5 else 0.3)
    (without,) = diagnosed_without_torch(tmp_path)
    assert without["findings"] == json.loads(
        json.dumps([[*finding.as_json().values()] for finding in diagnose(tmp_path).tested])
    )


class Steps:
    """A collector of the losses' steps."""

    def __init__(self):
        self.steps = []

    def add(self, batch):
        self.steps.append((batch.step, batch.update))


def test_further_collectors_are_fed_by_the_same_pass(tmp_path):
    folder = simulate(tmp_path)
    steps, blocked = Steps(), BlockedTokens()
    diagnosis = diagnose(open_run(folder), collectors=[steps, blocked])
    assert steps.steps == [(batch, update) for batch in range(8) for update in range(UPDATES)]
    apart = BlockedTokens()
    open_run(folder).scan([apart])
    assert blocked.result() == apart.result() != []
    assert diagnosis.as_json() == diagnose(folder).as_json()


def test_a_rule_that_cannot_be_replayed_does_not_hide_what_the_tokens_show(tmp_path):
    """The bounds surround the engine's log-probabilities, which were not recorded."""
    spoil = changed(logp_rollout=None, logp_old=lambda d: d["logp_old"].roll(1, 1))
    assert diagnose(simulate(tmp_path, anchor="rollout", spoil=spoil)).findings[0].code == "shift"


def test_identical_answers_come_before_what_they_look_like(tmp_path):
    """At a temperature near 0, the first tokens of a group are equal, and no reward differs from the others."""
    cold = {"engine": lambda z, *_: 5000 * z, "reports": lambda z, *_: z}
    diagnosis = diagnose(simulate(tmp_path / "first", **cold))
    assert diagnosis.headline.startswith("no-signal: all answers to a prompt are the same in ")
    assert "mask" not in [finding.code for finding in diagnosis.findings]
    random_advantages = changed(advantages=lambda d: torch.randn(d["advantages"].shape))
    findings = diagnose(simulate(tmp_path / "second", **cold, spoil=random_advantages)).findings
    assert findings[0].code == "no-signal"
    assert not any("do not depend on the reward" in finding.cause for finding in findings)
    assert "no-signal" not in diagnose(simulate(tmp_path / "third")).headline


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            [
                {"step": s} | ({"reward": 0.3 + s / 900} if s % 8 == 1 else {}) | {"loss": 0.1}
                for s in range(1, 81)
            ],
            "always enough for a verdict: a log of about 240 steps; 10 of 80 log steps have a reward, one in 8 steps",
        ),
        (
            [
                {"step": s, "kl": 0.1} | ({"reward": 0.3 + s / 900} if s % 4 == 1 else {})
                for s in range(1, 25)
            ],
            "a verdict needs a log of about 40 steps: 6 of 24 log steps have a reward, one in 4 steps",
        ),
        (
            [{"step": s, "reward": 0.3 + s / 900} for s in range(1, 5)],
            "a verdict needs a log of about 10 steps",
        ),
        (
            [{"step": s, "reward": 0.3 + s / 900} for s in range(1, 20)],
            "always enough for a verdict: a log of about 30 steps",
        ),
        (
            [{"step": 10 * s, "reward": 0.3 + s / 900} for s in range(1, 7)],
            "a verdict needs every step in the log, and not one in 10",
        ),
        (
            [{"step": 2 * s, "reward": 0.3 + s / 900} for s in range(1, 5)],
            "a verdict needs every step in the log, and not one in 2, and at least 10 steps",
        ),
    ],
    ids=[
        "rows without a known metric",
        "one reward a generated batch",
        "few steps",
        "no trend",
        "logged rarely",
        "rarely and few",
    ],
)
def test_without_a_verdict_it_says_what_a_log_needs_for_one(tmp_path, rows, sentence):
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    diagnosis = diagnose(log)
    assert diagnosis.no_verdict
    if "needs" in sentence:
        sentence = f"{sentence}; 30 log steps with a reward are always enough"
    assert sentence in str(diagnosis).splitlines()
    assert sentence in diagnosis.as_json()["notes"]


@pytest.mark.parametrize(
    "rows",
    [
        [{"step": 1, "reward": 0.3}],
        [{"step": s, "entropy": 0.3 + s / 100} for s in range(1, 9)],
        [{"step": s, "reward": 0.3 + s / 900, "entropy": 0.5 + s % 3 / 50} for s in range(1, 60)],
    ],
    ids=["one step", "no reward", "a verdict"],
)
def test_what_a_verdict_needs_is_not_guessed(tmp_path, rows):
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "a verdict needs" not in str(diagnose(log))
