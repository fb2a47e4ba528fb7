import json
import math
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bandpo import Audit, FixedClip
from bandpo.audit.findings import all_findings
from bandpo.audit.logs import read_log, summarize
from bandpo.audit.metrics import logged
from bandpo.audit.settings import Setup
from bandpo.cli.app import app
from bandpo.text import parse


def row(step, **changed):
    """One log step of an audited TRL run."""
    audit = {"tokens": 1000, "calls": 4, "on_policy": 0.25, "inert": 0.5, "radius_used": 0.1}
    audit |= {"clip_high": 0.01, "clip_low": 0.02, "clip_high/0.01_to_0.1": 0.4, "clip_high_below_0.1": 0.4}
    audit |= {"blocked_mass_below_0.1": 0.3, "blocked_mass_below_0.01": 0.5}
    audit |= {"if/Band/clip_high": 0.005, "if/Band/clip_low": 0.01, "if/Band/blocked_mass_below_0.1": 0.02}
    audit |= {"tokens_positive/0.01_to_0.1": 100, "tokens_positive_below_0.1": 100}
    audit |= {"mass_positive_below_0.1": 50, "mass_positive_below_0.01": 20}
    trl = {"step": step, "entropy": 1.0, "reward": 0.1, "clip_ratio/high_mean": 0.5, "note": "text"}
    return trl | {"nan": None} | {f"audit/{k}": v for k, v in (audit | changed).items()}


def verdicts(*rows, framework=None):
    return all_findings(summarize([dict(r) for r in rows]), Setup(framework))


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_reads_three_formats_alike(tmp_path):
    rows = [row(1), row(2) | {"audit_detail": {"audit/upper": 2.0}}]
    write(tmp_path / "run" / "metrics.jsonl", rows)
    for step in (9, 10):  # of several checkpoints the newest counts
        history = [*rows, {"step": 2, "train_runtime": 1.0}] if step == 10 else rows[:1]
        write(tmp_path / f"trl/checkpoint-{step}/trainer_state.json", [{"log_history": history}])
    ours, trl = read_log(tmp_path / "run"), read_log(tmp_path / "trl")
    assert ours == trl
    assert [r["step"] for r in ours] == [1, 2]
    assert ours[0]["clip_high"] == 0.01  # the audit's, not TRL's mean of means
    assert ours[1]["audit/upper"] == 2.0  # the detail of a row is laid beside the rest
    verl = [
        {"step": 1, "data": {"actor/entropy": 0.7, "critic/score/mean": 0.2, "actor/pg_clipfrac": 0.03}},
        {"step": 2, "data": {"val-core/acc": 0.5}},
    ]
    (only,) = read_log(write(tmp_path / "verl.jsonl", verl))
    assert only.items() >= {"step": 1, "entropy": 0.7, "reward": 0.2, "clip": 0.03}.items()
    assert summarize([only]).clipped == 0.03


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("trainer_state.json", '{"log_history": [{"step": 1', "is no trainer_state.json, or only a part"),
        ("metrics.jsonl", None, "is no log of a run; give a run folder"),
        ("metrics.jsonl", '{"step": 1, "data": 2}\n', "metrics.jsonl, line 1: data is a int, not an object"),
        ("metrics.jsonl", '{"step": 1, "loss": 2.0}\n', "logs none of entropy, reward"),
    ],
)
def test_says_what_is_wrong_with_a_log(name, content, message, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_log(path)


def test_a_log_that_is_cut_off_or_still_being_written_is_read_up_to_there(tmp_path, monkeypatch):
    """By `bandpo audit` too."""
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "run" / "metrics.jsonl", [row(1), row(2)])
    with path.open("a") as file:
        file.write(json.dumps(row(3))[:30])
    with pytest.warns(UserWarning, match=r"run/metrics.jsonl, line 3: the last line is cut off"):
        result = CliRunner().invoke(app, ["audit", "run"])
    assert result.exit_code == 0, result.output
    assert "run, 2 steps" in result.output


def test_rates_are_weighted_with_what_they_were_taken_over(tmp_path):
    few = {"tokens": 1000, "clip_high": 0.1, "tokens_positive/0.01_to_0.1": 10, "clip_high/0.01_to_0.1": 1.0}
    many = {"tokens": 9000, "clip_high": 0.0, "tokens_positive/0.01_to_0.1": 90, "clip_high/0.01_to_0.1": 0.0}
    light = {"mass_positive_below_0.1": 1, "blocked_mass_below_0.1": 1.0}
    heavy = {"mass_positive_below_0.1": 3, "blocked_mass_below_0.1": 0.0}
    rows = read_log(write(tmp_path / "log.jsonl", [row(1, **few, **light), row(2, **many, **heavy)]))
    d = summarize(rows)
    expected = {"clip_high": 0.01, "clip_high/0.01_to_0.1": 0.1, "tokens_positive/0.01_to_0.1": 100}
    expected |= {"blocked_mass_below_0.1": 0.25, "tokens": 10_000}
    assert d.metrics.items() >= {name: pytest.approx(x) for name, x in expected.items()}.items()
    assert "clip_high/above_0.1" not in d.metrics


def rare(*rows):
    return verdicts(*rows)["Does it suppress rare tokens?"]


READ = {"clip_high": 0.01, "clip_low": 0.02}  # as `read_log` names them
NONE = dict.fromkeys(READ, 0.0)


@pytest.mark.parametrize(
    ("question", "logged", "ok", "text"),
    [
        ("Does the clip act?", row(1), None, "no clip rate was logged"),
        ("Does the clip act?", row(1) | READ, True, "yes, on 3% of tokens; 50% of losses had no clipped"),
        ("Does the clip act?", row(1, on_policy=1.0) | READ, False, "exactly 1"),
        ("Does the clip act?", row(1, inert=1.0) | NONE, False, "no token was clipped"),
        # CISPO, SAPO
        ("Does the clip act?", row(1, inert=0.25) | NONE, True, "weights tokens anew in 75% of losses"),
        ("Is the step the right size?", row(1), True, "spends on average 10.0% of the radius"),
        ("Is the step the right size?", row(1, radius_used=3.0), False, "300.0%"),
        ("Is the step the right size?", {"step": 1, "entropy": 1.0}, None, "does not say"),
        ("Is it losing entropy?", row(1), True, "1 → 1 nats"),
        ("Does it suppress rare tokens?", {"step": 1, "entropy": 1.0}, None, "AuditedGRPOTrainer"),
    ],
)
def test_verdicts(question, logged, ok, text):
    found = verdicts(logged, framework="trl")[question]
    assert found.ok is ok
    assert text in found.answer + found.try_next


def test_rare_tokens_are_starved_where_the_whole_interval_says_so():
    tokens = {"clip_high_below_0.1": 0.2}
    rows = [row(k, **{"blocked_mass_below_0.1": share}, **tokens) for k, share in enumerate([0.2, 0.4] * 10)]
    found = rare(*rows)
    assert found.ok is False
    own, low, high = map(float, re.findall(r"([\d.]+)%", found.answer)[:3])
    assert own == 30
    spread = 1.96 * 10 / math.sqrt(20)  # of the mean of 20 steps whose standard deviation is 10 points
    assert (low, high) == pytest.approx((30 - spread, 30 + spread), abs=0.7)
    assert "2.0% (400 of 2000 such tokens)" in found.answer
    assert found.try_next == "Band(KL(), 0.05)"
    found = rare(*(row(k, **{"if/Band/blocked_mass_below_0.1": 0.29}) for k in range(20)))
    assert (found.ok, "smaller steps" in found.try_next) == (False, True)
    free = {"blocked_mass_below_0.1": 0.001, "clip_high_below_0.1": 0.0}
    assert rare(*(row(k, **free) for k in range(20))).ok is True


def test_six_clipped_tokens_of_146_are_no_verdict():
    """The Band demo: all of what is blocked lies in few batches."""
    hit = {"clip_high_below_0.1": 0.75, "blocked_mass_below_0.1": 0.9, "mass_positive_below_0.1": 5}
    free = {"clip_high_below_0.1": 0.0, "blocked_mass_below_0.1": 0.0, "mass_positive_below_0.1": 2}
    few = {"tokens_positive_below_0.1": 4}
    rows = [row(k, **few, **(hit if k in (7, 21) else free)) for k in range(36)]
    found = rare(*rows)
    assert found.ok is None
    assert "(6 of 144 such tokens): too few to tell whether it is more than 5%" in found.answer
    assert found.try_next == ""


def test_few_tokens_without_a_clipped_one_and_few_steps_are_no_verdict_either():
    none = {"clip_high_below_0.1": 0.0, "blocked_mass_below_0.1": 0.0}
    few, many = ({"tokens_positive_below_0.1": count} for count in (3, 30))
    found = rare(*(row(k, **none, **few) for k in range(12)))
    assert found.ok is None
    # 1 - 0.025 ** (1 / 36): what 36 tokens without a clipped one exclude
    assert "0.0% [0.0%, 9.7%]" in found.answer
    assert rare(*(row(k, **none, **many) for k in range(12))).ok is True
    found = rare(*(row(k) for k in range(9)))
    assert found.ok is None
    assert "in 9 log steps: too few to tell" in found.answer


def test_the_verdict_of_the_few_metrics_is_that_of_all(tmp_path):
    def rows(*, detail):
        g = torch.Generator().manual_seed(0)
        for step in range(1, 13):
            logp_old = -torch.rand(8, 64, generator=g) * 9 - 0.01
            logp = (logp_old + 0.3 * torch.randn(8, 64, generator=g)).clamp(max=-1e-3)
            seen = Audit.from_batch(logp, logp_old, torch.randn(8, generator=g), clip=FixedClip(0.2))
            metrics = {name: round(value, 6) for name, value in seen.metrics().items()}
            yield {"step": step, "entropy": 1.0, "reward": 0.5} | logged(metrics, detail=detail)

    few = read_log(write(tmp_path / "few.jsonl", rows(detail=False)))
    every = read_log(write(tmp_path / "all.jsonl", rows(detail=True)))
    assert all_findings(summarize(few)) == all_findings(summarize(every))
    oks = [finding.ok for finding in all_findings(summarize(few)).values()]
    assert oks == [True, None, False, True, True]


@pytest.mark.parametrize(
    ("course", "ok", "text"),
    [
        ([(1.0, 0.1), (0.02, 0.9)], True, "it was earned"),
        ([(1.0, 0.1), (0.02, 0.1)], False, "nothing was earned"),
        ([(1.0, 0.1), (3.0, 0.1)], False, "drifts towards noise"),
        ([(1.0, 0.1), (0.5, 0.1)], True, "1 → 0.5 nats"),
    ],
)
def test_entropy_is_judged_with_the_reward(course, ok, text):
    rows = [{"step": float(k), "entropy": h, "reward": r} for k, (h, r) in enumerate(course)]
    finding = verdicts(*rows)["Is it losing entropy?"]
    assert finding.ok is ok
    assert text in finding.answer


def test_the_command_compares_runs_and_draws(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    write(tmp_path / "a" / "metrics.jsonl", [row(1), row(2)])
    history = [{"step": 1, "entropy": 0.4, "clip_ratio/high_mean": 0.0}]
    write(tmp_path / "b" / "trainer_state.json", [{"log_history": history}])
    result = CliRunner().invoke(app, ["audit", "a", "b", "--output", "figure.png"])
    assert result.exit_code == 0, result.output
    assert "it blocks 30.0% of the gradient" in result.output
    assert "in 2 log steps: too few" in result.output
    assert "never: no token was clipped" in result.output
    assert "Band would clip high" in result.output
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    failed = CliRunner().invoke(app, ["audit", "nowhere"])
    assert isinstance(failed.exception, ValueError)


@pytest.mark.parametrize(
    ("said", "method"),
    [("FixedClip(0.2)", "Method(FixedClip(0.2), level='sequence')"), ("DAPO()", "DAPO()")],
)
def test_a_run_folder_tells_its_method(said, method, tmp_path):
    said = {"method": said, "importance_sampling_level": "sequence"}
    (tmp_path / "config.yaml").write_text(json.dumps({"arguments": said}))
    found = Setup.of_log(tmp_path, [row(1)], method="GMPO()").method  # which the folder overrules
    assert repr(found) == repr(parse(method))


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """The current folder, with a module that leaves a file behind where it is imported; and a rule in it, as text."""
    name = f"evil_{abs(hash(tmp_path))}"  # a text is read once in a process
    (tmp_path / f"{name}.py").write_text(
        "import pathlib\nfrom bandpo import Unclipped\npathlib.Path('imported').touch()\nclass X(Unclipped): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return f"{name}.X()"


@pytest.mark.parametrize("method", ["EVIL", "Method(Sides(FixedClip(), EVIL), EVIL)"])
def test_a_run_folder_cannot_have_its_modules_imported(method, evil):
    """Nor can a log; the user's own word has it imported."""
    said = {"method": method, "importance_sampling_level": "token"}
    Path("config.yaml").write_text(json.dumps({"arguments": said}).replace("EVIL", evil))
    rows = [row(1) | {"method": evil}, row(2)]
    write(Path("metrics.jsonl"), rows)
    Path("trainer_state.json").write_text(json.dumps({"log_history": rows, "clip": evil}))
    with pytest.warns(UserWarning, match=r"X would have to be imported.*name it yourself by --run-method"):
        result = CliRunner().invoke(app, ["audit", ".", "trainer_state.json"])
    assert result.exit_code == 0, result.output
    assert not Path("imported").exists()
    rows = read_log(".")
    assert Setup.of_log(Path(), rows, method=evil).method.clip == parse(evil).clip
    assert Path("imported").exists()
