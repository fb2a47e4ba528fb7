"""The page of `rlvet report`: its data against the library, and the page itself in a browser."""

import json
import math
import re
import statistics
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from bandpo import DCPO, KL, Band, FixedClip, ratio_bounds
from bandpo.audit import Recorder
from bandpo.core import divergences as all_divergences
from bandpo.replay.record import replay_record
from bandpo_lab.study.interval import bootstrap
from pages import ROOT

sys.path.insert(0, str(ROOT / "benchmarks/doctor"))

from log_scenarios import SCENARIOS

from browser import Chromium, calculated, needs_browser, needs_javascript, opened
from rlvet import diagnose
from rlvet.checks import Diagnosis
from rlvet.checks.course import Series
from rlvet.cli.app import app
from rlvet.lint.checks import lint_file
from rlvet.records import first_pass
from rlvet.records.record import read_record
from rlvet.report import write_report
from rlvet.report.audit_steps import audit_table
from rlvet.report.curves import CHARTS, COMPONENTS, SEGMENTS, running_median

pytest.importorskip("pyarrow")

ASSETS = ROOT / "packages/rlvet/src/rlvet/report/assets"

HOSTILE = "</script><img src=x onerror=alert(1)><!--"


def recorded(folder, steps=12):
    """Tokens at three old probabilities, which move by chance."""
    g = torch.Generator().manual_seed(0)
    with Recorder(folder, method="FixedClip(0.2)") as recorder:
        for step in range(steps):
            old = torch.tensor([0.005, 0.05, 0.5]).log().repeat(16, 3)
            new = (old + 0.3 * torch.randn(old.shape, generator=g)).clamp(max=-0.01)
            advantages = torch.randn(16, generator=g)
            ids = torch.randint(9, old.shape, generator=g)
            recorder.add(logp=new, logp_old=old, advantages=advantages, tokens=ids, step=step)
    return folder


def log(path, rows):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def held(page):
    """Return the data in a page."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)
    return json.loads(found)


def test_a_record_gives_each_rule_its_figures_and_the_tokens_that_moved_most(tmp_path):
    record = recorded(tmp_path / "record")
    (run,) = held(write_report([record], tmp_path / "page.html", methods=["DCPO()"]))["runs"]
    seen = replay_record(record, {"DCPO()": "DCPO()"})
    for name, prefix in (("the run", ""), ("DCPO()", "if/DCPO()/")):
        rates = [audit.metrics()["clip_high"] for audit in seen.by_step[name].values()]
        assert run["audit"]["columns"][f"audit/{prefix}clip_high"] == pytest.approx(rates, rel=1e-4)
    assert list(run["rules"]) == [
        "the run",
        "clip 0.2",
        "Clip-Higher",
        "no clip",
        "Band",
        "Band above",
        "DCPO()",
    ]
    loss = next(read_record(record))
    far = abs(loss.log_ratio).flatten()
    tokens = run["tokens"]["0"]
    assert len(tokens) == len(far)
    _, ratio, advantage, *kept = tokens[0]
    assert abs(torch.tensor(ratio).log()) == pytest.approx(float(far.max()), rel=1e-3)
    assert kept[0] == kept[1] == (0 if (ratio - 1) * advantage > 0 and not 0.8 <= ratio <= 1.2 else 1)
    assert kept[3] == 1  # no clip
    assert run["rules"]["Clip-Higher"]["limits"][1][0] == pytest.approx(1.28)
    assert len(run["words"]) == 10


def test_a_run_of_a_file_of_several_is_named_and_so_is_the_reward(tmp_path):
    file = tmp_path / "several.csv"
    lines = [f"{step},{name},{value}" for name, value in (("x", 0.25), ("y", 0.5)) for step in range(40)]
    file.write_text("\n".join(["step,run,my_score", *lines]))
    words = ["report", str(file), "--map", "reward=my_score"]
    assert "--run-name" in str(CliRunner().invoke(app, words).exception)
    result = CliRunner().invoke(app, [*words, "--run-name", "y"])
    assert result.exit_code == 0
    (run,) = held(tmp_path / "report.html")["runs"]
    assert run["name"] == f"{file}, run y"
    assert set(run["curves"]["reward"]["values"]) == {0.5}


def test_where_it_is_written_and_what_is_refused(tmp_path):
    rows = [{"step": 1234567 + k, "reward": k} for k in range(2)]
    run = log(tmp_path / "run" / "metrics.jsonl", rows).parent
    result = CliRunner().invoke(app, ["report", str(run)])
    assert result.output == f"wrote {run / 'report.html'}\n"
    assert held(run / "report.html")["runs"][0]["curves"]["reward"]["steps"] == [1234567, 1234568]
    with pytest.raises(ValueError, match=r"x\.pdf: the report is written as \.html"):
        write_report([run], tmp_path / "x.pdf")
    elsewhere = tmp_path / "new" / "page.html"
    assert CliRunner().invoke(app, ["report", str(run), "--output", str(elsewhere)]).exit_code == 0
    assert [*elsewhere.parent.iterdir()] == [elsewhere]
    nothing = CliRunner().invoke(app, ["report", str(tmp_path / "nothing")])
    assert "is no log of a run" in str(nothing.exception)


def test_nothing_in_a_run_is_read_as_html_and_nothing_is_loaded(tmp_path):
    path = log(tmp_path / "<img src=y>" / "log.jsonl", [{"step": 1, "reward": 0.5, HOSTILE: 1.0}])
    text = write_report([path], tmp_path / "page.html").read_text()
    assert HOSTILE not in text
    assert "<img" not in text
    assert "Content-Security-Policy\" content=\"default-src 'none'" in text
    assert not re.search(r"<(link|img|iframe)|<script src|url\(|@import", text)


def test_the_page_says_how_much_of_a_record_was_looked_at(tmp_path, monkeypatch):
    record = recorded(tmp_path / "run" / "record")
    log(tmp_path / "run" / "metrics.jsonl", [{"step": k, "reward": k / 9} for k in range(3)])
    (run,) = held(write_report([tmp_path / "run"], tmp_path / "page.html"))["runs"]
    assert (run["coverage_text"], run["covered_part"]) == ("looked at all 1,728 tokens of 12 batches", "")
    monkeypatch.setattr(first_pass, "TOKENS", 1000)
    monkeypatch.setattr(first_pass, "FEWEST_TOKENS", 64)
    (run,) = held(write_report([record], tmp_path / "page.html"))["runs"]
    looked_at = run["coverage"]["tokens"]
    share = f"{100 * looked_at / 1728:.2g}%"
    assert 300 < looked_at <= 1000
    assert run["coverage_text"] == f"looked at {looked_at} of 1,728 tokens ({share}), in all 12 batches"
    assert run["covered_part"] == f"{share} of the tokens"
    assert run["coverage"]["total_tokens"] == 1728
    (run,) = held(write_report([tmp_path / "run" / "metrics.jsonl"], tmp_path / "page.html"))["runs"]
    assert (run["coverage_text"], run["covered_part"], run["coverage"]) == ("", "", None)


TRL = {"reward": 0.5, "frac_reward_zero_std": 0.25, "completions/mean_length": 20.0}
VERL = {"critic/score/mean": 0.5, "actor/entropy": 0.2, "actor/pg_clipfrac": 0.01}
SLIME = {"rollout/rewards": 0.5, "rollout/raw_reward": 0.5, "train/ppo_kl": 0.01}


@pytest.mark.parametrize(
    ("logs", "codes"),
    [
        ([TRL], ["from bandpo.integrations.trl import AuditedGRPOTrainer as GRPOTrainer"]),
        ([VERL], ["AuditedPolicyLossConfig"]),
        ([VERL, VERL], ["AuditedPolicyLossConfig"]),
        ([TRL, VERL], ["AuditedGRPOTrainer", "AuditedPolicyLossConfig"]),
        ([{"reward": 0.5}], ["docs/audit.md"]),
        ([SLIME], ["docs/audit.md"]),
        ([VERL, {"reward": 0.5}], ["AuditedPolicyLossConfig", "docs/audit.md"]),
    ],
)
def test_what_adds_the_audit_is_told_for_the_frameworks_of_the_runs(tmp_path, logs, codes):
    paths = [
        log(tmp_path / str(number) / "log.jsonl", [{"step": step, **row} for step in (1, 2, 3)])
        for number, row in enumerate(logs)
    ]
    ways = held(write_report(paths, tmp_path / "page.html"))["audit_ways"]
    assert len(ways) == len(codes)
    assert all(code in way[1] for code, way in zip(codes, ways, strict=True))


@pytest.mark.slow
@needs_browser
def test_in_a_browser_a_record_and_a_log_beside_it(tmp_path):
    record = recorded(tmp_path / "a" / "record")
    log(tmp_path / "a" / "metrics.jsonl", [{"step": k, "reward": k / 9, HOSTILE: k} for k in range(3)])
    rows = [{"step": 1, "reward": float("nan"), "entropy": 0.3}, {"step": 2, "reward": 0.5, "entropy": 0.2}]
    torn = log(tmp_path / "b" / "log.jsonl", rows)
    torn.write_text(torn.read_text() + '{"step": 3, "rew')
    page = write_report([tmp_path / "a", torn], tmp_path / "page.html")
    seen = opened(page, tmp_path)
    assert "Made by rlvet" in seen.text  # at the end: no script failed
    assert "looked at all 1,728 tokens of 12 batches" in seen.text
    assert "img" not in [tag for tag, _ in seen.elements]
    assert HOSTILE in seen.text  # as a column's name
    assert {"reward", "entropy", "clip_high", "audit/approx_kl"} <= {*seen.having("data-panel")}
    assert "cut" not in seen.having("data-panel")
    assert re.search("Not drawn, as no key that rlvet knows has it: [^.]*Answers cut off", seen.text)
    assert "log.jsonl has no picture of single tokens: a log, without the tokens" in seen.text
    assert "the last line is cut off" in seen.text
    assert "nan: 1 of 2 log steps hold NaN" in seen.text
    # Another rule, at the fourth step.
    then = """
      const step = document.getElementById("step");
      step.value = 4; step.dispatchEvent(new Event("input"));
      document.querySelector('[name=rule][value="Band"]').click();"""
    chosen = opened(page, tmp_path, then)
    metrics = replay_record(record, {"Band": "Band()"}).by_step["Band"][3].metrics()
    share, n = (metrics[f"{name}/0.01_to_0.1"] for name in ("clip_high", "tokens_positive"))
    assert f"p 0.01 to 0.1{100 * share:.1f} %" in chosen.text
    assert f"n = {n:.0f}" in chosen.text
    assert "Band, step 3." in chosen.text
    # A Band of one's own blocks what the library's does.
    mine = opened(page, tmp_path, "document.querySelector('[value=\"a Band of yours\"]').click();")
    ours = opened(page, tmp_path, "document.querySelector('[name=rule][value=\"Band\"]').click();")
    counts = [re.findall(r"(kept|blocked, A [<>] 0): (\d+)", one.text) for one in (mine, ours)]
    assert counts[0] == counts[1]
    assert len(counts[0]) == 3


@pytest.mark.slow
@needs_browser
def test_in_a_browser_a_log_that_tells_next_to_nothing(tmp_path):
    path = log(tmp_path / "log.jsonl", [{"step": 1, "data": {"actor/entropy": 0.4}}])
    seen = opened(write_report([path], tmp_path / "page.html"), tmp_path)
    assert seen.having("data-panel") == []
    for text in (
        "no verdict: no key of the log is known to be the reward",
        "One value wherever it was logged, and so not drawn: Entropy (nats per token) 0.4.",
        "What other clip rules would have blocked is not shown",
        "Made by rlvet",
    ):
        assert text in seen.text
    # No section is empty: there are the verdict, the curves' sentence and what the verdict rests on.
    assert [tag for tag, _ in seen.elements].count("section") == 1
    assert [attributes.get("class") for tag, attributes in seen.elements if tag == "details"].count(
        "section"
    ) == 2


def logged_run(steps=100):
    """Return the log of a run whose completions are truncated from the middle on, with two reward components."""
    return [
        {
            "step": step,
            "reward": 0.5 + 0.1 * (step % 3),
            "rewards/format/mean": 0.2 + 0.1 * (step % 2),
            "rewards/format/std": 0.1 * (step % 5),
            "rewards/answer/mean": 0.3 + 0.1 * (step % 3),
            "completions/mean_length": 200 + step,
            "completions/clipped_ratio": 0.02 if step < steps / 2 else 0.9,
            "clip_ratio/high_mean": 0.0,
            "clip_ratio/low_mean": 0.0,
            "grad_norm": 500.0 if step == 7 else 0.5 + 0.01 * (step % 7),
            "learning_rate": 1e-6,
            "my/own": step % 4,
        }
        for step in range(1, steps + 1)
    ]


def test_the_page_holds_the_findings_with_their_onset_and_what_they_rest_on(tmp_path):
    path = log(tmp_path / "metrics.jsonl", logged_run())
    data = held(write_report([path], tmp_path / "page.html"))
    (run,) = data["runs"]
    diagnosis = diagnose(path)
    first = run["findings"][0]
    assert first["code"] == "truncated"
    assert first["onset"] == diagnosis.findings[0].onset == pytest.approx(50, abs=5)
    assert first["quantities"] == ["cut", "length"]
    assert (run["state"], run["basis"], run["no_verdict"]) == ("fault", diagnosis.basis, "")
    assert (run["order_text"], run["legend"]) == (diagnosis.order_text, diagnosis.legend)
    assert run["unread"] == ["rewards/format/std", "my/own"]
    assert {"cut", "length"} <= run["curves"].keys()


@pytest.mark.parametrize(("smallest", "is_log"), [(-2e-9, True), (0.0, True), (-0.5, False)])
def test_values_just_below_0_are_left_out_of_a_logarithmic_axis(smallest, is_log, tmp_path):
    rows = [{"step": step, "reward": 0.5, "kl": 3.0 + step % 5} for step in range(1, 60)]
    rows[0]["kl"] = smallest
    rows[40]["kl"] = 1.45e14
    data = held(write_report([log(tmp_path / "metrics.jsonl", rows)], tmp_path / "page.html"))
    assert [chart["log"] for chart in data["charts"] if chart["name"] == "kl"] == [is_log]


def test_charts_stand_in_order_and_what_is_constant_is_said_in_words(tmp_path):
    path = log(tmp_path / "metrics.jsonl", logged_run())
    data = held(write_report([path], tmp_path / "page.html"))
    charts = {chart["name"]: chart for chart in data["charts"]}
    names = ["reward", "rewards/format", "rewards/answer", "length", "cut", "grad_norm"]
    assert list(charts) == names
    assert [name for name in charts if charts[name]["log"]] == ["grad_norm"]
    constant = {one["name"]: one["values"] for one in data["constant"]}
    assert constant == {"learning_rate": [1e-6], "clip_high": [0], "clip_low": [0]}
    assert data["others"] == ["rewards/format/std", "my/own"]
    assert "Entropy" in data["missing"]


def test_rows_without_steps_are_told_above_the_charts(tmp_path):
    """A step of another run on the same axis may be one of five rows."""
    rows = [{"loss": 0.1, "reward": 0.01 * number, "kl": 0.01} for number in range(40)]
    counted = tmp_path / "counted.log"
    counted.write_text("".join(f"{row}\n" for row in rows))
    known = tmp_path / "known.log"
    known.write_text("".join(f"{row | {'step': 5 * number}}\n" for number, row in enumerate(rows, 1)))
    data = held(write_report([counted, known], tmp_path / "page.html"))
    told = ["a step is the number of a row here" in " ".join(run["remarks"]) for run in data["runs"]]
    assert told == [True, False]


def test_a_constant_curve_is_drawn_if_a_finding_rests_on_it(tmp_path):
    rows = [{"step": step, "reward": step / 40, "learning_rate": 0.0} for step in range(1, 41)]
    data = held(write_report([log(tmp_path / "log.jsonl", rows)], tmp_path / "page.html"))
    assert data["runs"][0]["findings"][0]["code"] == "no-step"
    assert [chart["name"] for chart in data["charts"]] == ["reward", "learning_rate"]


def test_a_single_component_that_is_the_reward_is_not_drawn_twice(tmp_path):
    rows = [{"step": step, "reward": step / 40, "rewards/only/mean": step / 40} for step in range(1, 41)]
    data = held(write_report([log(tmp_path / "log.jsonl", rows)], tmp_path / "page.html"))
    assert [chart["name"] for chart in data["charts"]] == ["reward"]
    assert data["same_as_reward"] == ["Reward: only"]


def test_a_log_and_a_record_are_one_diagnosis(tmp_path):
    recorded(tmp_path / "run" / "record")
    log(tmp_path / "run" / "metrics.jsonl", logged_run())
    (run,) = held(write_report([tmp_path / "run"], tmp_path / "page.html"))["runs"]
    assert "truncated" in [finding["code"] for finding in run["findings"]]
    assert run["coverage_text"]
    assert run["basis"]
    assert {"cut", "audit/approx_kl"} <= run["curves"].keys()


@pytest.mark.slow
def test_the_tests_of_a_record_and_of_a_log_without_a_verdict_are_told_apart(tmp_path):
    recorded(tmp_path / "run" / "record")
    log(tmp_path / "run" / "metrics.jsonl", [{"step": k, "reward": k / 9} for k in range(3)])
    (run,) = held(write_report([tmp_path / "run"], tmp_path / "page.html"))["runs"]
    counts, verdict = run["remarks"][:2]
    numbers = re.fullmatch(r"(\d+) tests of the record passed, and (\d+) of the log", counts)
    assert sum(map(int, numbers.groups())) == len(run["passed"])
    assert (
        verdict
        == "the log alone gets no verdict: 3 log steps with a reward are too few, at least 10 are needed"
    )


def test_a_report_of_a_log_imports_no_torch(tmp_path):
    path = log(tmp_path / "metrics.jsonl", logged_run())
    code = (
        "import sys; from rlvet.report import write_report;"
        f"write_report([{str(path)!r}], {str(tmp_path / 'page.html')!r});"
        "print([name for name in ('torch', 'numpy', 'pyarrow') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_a_long_log_keeps_its_extremes_and_is_a_small_page(tmp_path):
    steps = 20_000
    rows = [
        {"step": step, "reward": math.sin(step / 900), **{f"my/{k}": (step * k) % 7 for k in range(20)}}
        for step in range(steps)
    ]
    rows[12_345]["reward"] = 40.0
    rows[6_789]["reward"] = -30.0
    page = write_report([log(tmp_path / "metrics.jsonl", rows)], tmp_path / "page.html")
    reward = held(page)["runs"][0]["curves"]["reward"]
    assert reward["rows"] == steps
    assert len(reward["values"]) <= 2 * SEGMENTS + 2
    points = dict(zip(reward["steps"], reward["values"], strict=True))
    assert (points[12_345], points[6_789]) == (40, -30)
    assert page.stat().st_size < 1.5e6


def test_a_running_median_is_of_the_rows_around():
    values = [(7 * k) % 31 + k / 10 for k in range(301)]
    medians = running_median(Series(list(range(301)), values))
    assert len(medians.steps) == 250
    assert medians.steps[-1] == 300
    for k, value in zip(map(int, medians.steps), medians.values, strict=True):
        assert value == statistics.median(values[max(0, k - 6) : k + 7])


def test_an_audit_of_many_steps_is_put_together_with_the_same_sums():
    rows = [
        {
            "step": step,
            "audit/clip_high/above_0.1": 0.01 * (step % 9),
            "audit/tokens_positive/above_0.1": 100 + step,
            "audit/if/Band/blocked_mass_below_0.1": 0.02 * (step % 5),
            "audit/mass_positive_below_0.1": 3.0 + step % 4,
            "reward": 1.0,
        }
        for step in range(50)
    ]
    table = audit_table(rows, most_steps=10)
    assert (len(table["steps"]), table["steps_per_row"], table["steps"][1]) == (10, 5, 5)
    columns = table["columns"]
    assert "reward" not in columns
    for share, over in (
        ("clip_high/above_0.1", "tokens_positive/above_0.1"),
        ("if/Band/blocked_mass_below_0.1", "mass_positive_below_0.1"),
    ):
        parts = zip(columns[f"audit/{share}"], columns[f"audit/{over}"], strict=True)
        expected = sum(row[f"audit/{share}"] * row[f"audit/{over}"] for row in rows)
        assert sum(part * whole for part, whole in parts) == pytest.approx(expected)


@pytest.mark.slow
@needs_browser
def test_in_a_browser_the_configuration_follows_the_findings(tmp_path, monkeypatch):
    path = log(tmp_path / "metrics.jsonl", logged_run())
    settings = tmp_path / "grpo.yaml"
    settings.write_text("learning_rate: 1.0e-3\nnum_generations: 1\nloss_type: grpo\n")
    report = lint_file(settings).as_json()
    assert report["findings"]
    without = Diagnosis.as_json
    monkeypatch.setattr(Diagnosis, "as_json", lambda self: without(self) | {"configuration": report})
    seen = opened(write_report([path], tmp_path / "page.html"), tmp_path)
    for finding in report["findings"]:
        places = [
            seen.text.index(text) for text in ("truncated", finding["title"], finding["fix"], "All curves")
        ]
        assert places == sorted(places)


@pytest.mark.slow
@needs_browser
def test_in_a_browser_a_finding_is_a_line_in_its_curves(tmp_path):
    path = log(tmp_path / "metrics.jsonl", logged_run())
    page = write_report([path], tmp_path / "page.html")
    onset = diagnose(path).findings[0].onset
    assert onset is not None
    lines = "[...document.querySelectorAll('[data-panel] .onset')]"
    is_first = "(line) => line.textContent.startsWith('1 ')"
    label = f"1 truncated · step {onset:g}"
    with Chromium(tmp_path) as browser:
        for width in (400, 1280):
            tab = browser.open(page.as_uri(), width=width)
            tab.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
            # A chart is drawn at its width some time after its part opens.
            drawn = f"{lines}.filter({is_first})"
            tab.wait_for(f"{drawn}.length === 2 && {drawn}.every((line) => parseFloat(line.style.left) > 0)")
            shown = tab.evaluate(
                f"{drawn}.map((line) => [line.closest('[data-panel]').dataset.panel, line.textContent, "
                "getComputedStyle(line).borderLeftColor, "
                "parseFloat(line.style.left) / line.parentElement.clientWidth])"
            )
            assert [line[:2] for line in shown] == [["length", label], ["cut", label]]
            for _, _, colour, place in shown:
                assert colour == "rgb(184, 74, 0)"
                assert place == pytest.approx((onset - 1) / 99, abs=0.01)
            assert tab.evaluate("document.documentElement.scrollWidth") <= tab.evaluate("innerWidth") == width
    text = opened(page, tmp_path).text
    assert text.index("truncated: ") < text.index("since step") < text.index("All curves")
    assert "Not read: rewards/format/std, my/own" in text


def broken_run():
    """Return a log whose KL jumps at once, whose gradient and entropy then vanish, and whose reward rises a little."""
    return [
        {
            "step": step,
            "reward": 0.1 + 0.001 * min(step, 45) + 0.01 * (7 * step % 10),
            "kl": [0.0, 0.0, 1.3][step - 1] if step < 4 else 2.3,
            "entropy": 1.0 + 0.1 * (step % 5) if step < 40 else 1e-3 + 1e-5 * (step % 3),
            "grad_norm": 5.0 + step % 7 if step < 36 else 1e-5 * (1 + step % 3),
        }
        for step in range(1, 121)
    ]


@pytest.mark.slow
@needs_browser
def test_in_a_browser_the_verdict_is_whole_and_its_charts_can_be_read(tmp_path):
    path = log(tmp_path / "metrics.jsonl", broken_run())
    diagnosis = diagnose(path)
    page = write_report([path], tmp_path / "page.html")
    first = diagnosis.findings[0]
    # The headline is too short for the reason of the severity.
    assert "the reward rose after that" in first.cause
    assert "the reward rose after that" not in diagnosis.headline
    with Chromium(tmp_path) as browser:
        tab = browser.open(page.as_uri())
        tab.wait_for("document.querySelectorAll('[data-panel] .onset').length > 1")
        text = tab.evaluate("document.querySelector('.verdict').innerText")
        for sentence in (first.cause, diagnosis.order_text, diagnosis.legend):
            assert text.count(sentence) == 1, sentence
        # No line goes through the label of another one that could be read behind it.
        labels = tab.evaluate("""
          [...document.querySelectorAll("[data-panel='entropy'] .onset")].map((line) => {
            const { left, top, right } = line.firstChild.getBoundingClientRect();
            return { line: line.getBoundingClientRect().left, left, top, right };
          })""")
        assert len(labels) == 2
        for label in labels:
            for other in labels:
                goes_through = (
                    other["top"] < label["top"] and label["left"] + 2 < other["line"] < label["right"]
                )
                assert not goes_through, labels


@needs_javascript
def test_the_ticks_of_a_logarithmic_axis_have_room(tmp_path):
    curves = (ASSETS / "curves.js").read_text()
    (function,) = re.findall(r"^function wholePowers.*?^}", curves, re.S | re.M)
    (texts,) = re.findall(r"^function powers.*?^}", (ASSETS / "chart.js").read_text(), re.S | re.M)
    names = "\n".join(re.findall(r"^const (?:LABEL_HEIGHT|AROUND) = \d+;", curves, re.M))
    ticks = [digit * 10.0**power for power in range(-5, 4) for digit in range(1, 10)]

    def shown(height):
        kept = f"wholePowers({{ height: {height} }}, {ticks})"
        script = f"(() => {{ {names}\n{function}\n{texts}\nreturn powers(null, {kept}); }})()"
        return [text for text in calculated(script, tmp_path) if text]

    assert shown(140) == ["1e-5", "0.001", "0.1", "10", "1000"]
    assert shown(400) == ["1e-5", "1e-4", "0.001", "0.01", "0.1", "1", "10", "100", "1000"]


@needs_javascript
def test_a_logarithmic_axis_of_many_powers_has_ticks_of_its_own(tmp_path):
    """Those of uPlot do not end for gradient norms from 1e-22 to 8e15."""
    curves = (ASSETS / "curves.js").read_text()
    functions = "\n".join(
        re.search(rf"^function {name}.*?^}}", curves, re.S | re.M)[0]
        for name in ("logRange", "splitsOfPowers")
    )
    (most,) = re.findall(r"^const MOST_POWERS = \d+;", curves, re.M)

    def ticks(values):
        script = f"(() => {{ {most}\n{functions}\nconst {{ splits }} = splitsOfPowers([[[], {values}]]);"
        return calculated(f"{script} return splits ? splits() : null; }})()", tmp_path)

    assert ticks([1e-3, 10.0]) is None
    powers = ticks([0.0, 3e-22, 8e15])
    assert (len(powers), powers[0], powers[-1]) == (39, pytest.approx(1e-22), pytest.approx(1e16))


@pytest.mark.slow
@needs_browser
def test_in_a_browser_the_page_of_each_fault_is_whole(tmp_path):
    """A finding may rest on a quantity that has no chart of its own, such as the largest advantage."""
    with Chromium(tmp_path) as browser:
        for number, (name, scenario) in enumerate(SCENARIOS.items()):
            path = log(tmp_path / f"{number}/metrics.jsonl", scenario.rows(1))
            page = write_report([path], tmp_path / f"{number}.html")
            tab = browser.open(page.as_uri())
            tab.wait_for("document.readyState === 'complete'")
            text = tab.evaluate("document.body.innerText")
            assert "This file loads nothing from elsewhere" in text, name
            assert "could not be drawn" not in text, name


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_a_finding_rests_on_has_a_chart(name, tmp_path):
    path = log(tmp_path / "metrics.jsonl", SCENARIOS[name].rows(1))
    content = held(write_report([path], tmp_path / "page.html"))
    drawn = {chart["name"] for chart in content["charts"]} | {"clip"}
    for finding in content["runs"][0]["findings"]:
        assert {*finding["quantities"]} & content["runs"][0]["curves"].keys() <= drawn, finding["code"]


@pytest.mark.slow
@needs_browser
def test_in_a_browser_the_value_under_the_cursor_is_shown(tmp_path):
    page = write_report([log(tmp_path / "metrics.jsonl", logged_run())], tmp_path / "page.html")
    value_at_the_right_end = """(() => {
      const figure = document.querySelector("[data-panel=length]");
      const over = figure.querySelector(".u-over");
      const box = over.getBoundingClientRect();
      const place = { clientX: Math.floor(box.right - 0.5), clientY: box.top + 9, bubbles: true };
      over.dispatchEvent(new MouseEvent("mousemove", place));
      return figure.querySelector(".value").textContent;
    })()"""
    with Chromium(tmp_path) as browser:
        tab = browser.open(page.as_uri())
        tab.evaluate("document.querySelector('[data-panel=length]').closest('details').open = true")
        tab.wait_for("document.querySelector('[data-panel=length] .u-over').clientWidth > 250")
        shown = tab.wait_for(value_at_the_right_end)
    assert shown == "step 100: 300, median 299"


@pytest.mark.slow
@needs_browser
def test_in_a_browser_the_titles_of_all_panels_fit(tmp_path, monkeypatch):
    """Those of every chart (`clip` is one of those without sides), and of a component and a metric with long names."""
    long_name = "a_reward_function_with_a_name_that_is_longer_than_a_panel_is_wide"
    names = [
        *(name for name in CHARTS if name not in (COMPONENTS, "clip")),
        COMPONENTS + long_name,
        "my/" + long_name,
    ]
    drawn = {name: Series([1, 2, 3], [0.1, 0.2 + number, 0.3]) for number, name in enumerate(names)}
    monkeypatch.setattr("rlvet.report.page.collect_curves", lambda *_: drawn)
    page = write_report([log(tmp_path / "metrics.jsonl", logged_run())], tmp_path / "page.html")
    titles_and_fits = """(() => {
      const others = document.querySelector(".controls select");
      others.selectedIndex = others.length - 1;
      others.dispatchEvent(new Event("change"));
      return JSON.stringify([...document.querySelectorAll("[data-panel] h3")].map((title) =>
        [title.textContent, title.scrollWidth <= title.clientWidth]));
    })()"""
    with Chromium(tmp_path) as browser:
        for width in (320, 760, 1280):
            titles = json.loads(browser.open(page.as_uri(), width=width).wait_for(titles_and_fits))
            assert len(titles) == len(names)
            assert [title for title, fits in titles if not fits] == []


RADII = (1e-4, 0.01, 0.05, 0.3)
SPREAD = [1e-6, 1e-4, 0.003, 0.08, 0.3, 0.5, 0.75, 0.97, 0.9999]
P = torch.tensor(SPREAD, dtype=torch.float64)


def close(found, bounds):
    """Log-bounds of a page to 1e-7 of themselves, a hundred times what rounding makes of them."""
    ends = torch.tensor([[float(end) for end in pair] for pair in found], dtype=torch.float64)
    torch.testing.assert_close(ends, torch.stack([bounds.log_lower, bounds.log_upper], 1), rtol=1e-7, atol=0)


@needs_javascript
def test_the_formulas_of_the_pages_are_the_library_s(tmp_path):
    bands = calculated(
        f"""Object.fromEntries(Object.keys(bandpo.divergences).map((name) => [name, {{
          radius: bandpo.divergences[name].radius,
          bounds: {list(RADII)}.map((radius) => {SPREAD}.map((p) => bandpo.band(name, radius, Infinity)(p)))
            .map((row) => row.map(({{ lower, upper }}) => [lower, upper])) }}]))""",
        tmp_path,
    )
    assert bands
    for name, found in bands.items():
        divergence = getattr(all_divergences, name)()
        assert found["radius"] == divergence.default_radius, (
            f"packages/rlvet/src/rlvet/report/assets/bounds.js, {name}: write radius: {divergence.default_radius}"
        )
        for radius, row in zip(RADII, found["bounds"], strict=True):
            close(row, ratio_bounds(P.log(), divergence, radius))


@needs_javascript
def test_rules_and_intervals_of_the_pages_are_the_library_s_and_scipy_s(tmp_path):
    rules = {
        'band("KL", 0.05)': Band(KL(), 0.05),
        "fixed(0.2, 0.28)": FixedClip(0.2, 0.28),
        "dcpo(0.16, 0.2)": DCPO(),
    }
    for text, rule in rules.items():
        pairs = calculated(
            f"{SPREAD}.map(bandpo.{text}).map(({{ lower, upper }}) => [lower, upper])", tmp_path
        )
        close(pairs, rule.bounds(P.log()))
    from scipy import stats

    cases = [[0, 3], [1, 40], [17, 17]]
    wilson = calculated(f"{cases}.map(([k, n]) => bandpo.wilson(k / n, n))", tmp_path)
    for (k, n), found in zip(cases, wilson, strict=True):
        assert found == pytest.approx(stats.binomtest(k, n).proportion_ci(method="wilson"), abs=1e-9)
    g = torch.Generator().manual_seed(0)
    whole = 10 + 90 * torch.rand(60, generator=g)
    part = whole * torch.rand(60, generator=g) ** 2
    drawn = bootstrap((part, whole), lambda a, b, axis: a.sum(axis) / b.sum(axis), paired=True)
    found = calculated(f"bandpo.shareOver({torch.stack([part, whole], 1).tolist()})", tmp_path)
    assert found["share"] == pytest.approx(drawn.value, rel=1e-6)
    assert [found["low"], found["high"]] == pytest.approx([drawn.low, drawn.high], abs=0.15 * drawn.half)


def audited_log(steps=40):
    """Return the log of a run that learns, whose clip drops most of the gradient on rare winners."""
    return [
        {
            "step": step,
            "reward": 0.1 + 0.8 * step / steps,
            "entropy": 1.0 - 0.95 * step / steps,
            "grad_norm": 0.5 + 0.01 * (step % 7),
            "audit/clip_high": 0.02,
            "audit/clip_low": 0.01,
            "audit/tokens": 1000,
            "audit/tokens_positive_below_0.1": 50,
            "audit/mass_positive_below_0.1": 10.0,
            "audit/blocked_mass_below_0.1": 0.7 + 0.1 * (step % 3),
            "audit/if/Band/blocked_mass_below_0.1": 0.1,
        }
        for step in range(1, steps + 1)
    ]


EFFECT = "of the gradient on 2,000 rare winners (p < 0.1, A > 0) the run dropped 80 % (much), Band would have"


def test_a_log_with_metrics_of_the_audit_opens_with_what_the_rule_dropped(tmp_path):
    path = log(tmp_path / "metrics.jsonl", audited_log())
    (run,) = held(write_report([path], tmp_path / "page.html"))["runs"]
    assert run["opening"][0].startswith(EFFECT)
    assert run["expected_fall"].startswith("entropy fell by 9")
    assert run["expected_fall"] in str(diagnose(path))
    assert run["rule_colors"] == {"the run": "ink", "Band": "rule-band"}
    (other,) = held(write_report([log(tmp_path / "other.jsonl", logged_run())], tmp_path / "page.html"))[
        "runs"
    ]
    assert "opening" not in other
    assert other["expected_fall"] == ""


def test_what_a_metric_did_in_passing_is_below_the_verdict(tmp_path):
    rows = [
        {"step": step, "reward": (0.2 if 300 <= step <= 400 else 0.6) + step % 7 / 100, "entropy": 1.0}
        for step in range(1, 1001)
    ]
    path = log(tmp_path / "metrics.jsonl", rows)
    (run,) = held(write_report([path], tmp_path / "page.html"))["runs"]
    constant, line = run["remarks"]
    assert constant == "one value in all 1000 log steps, so check that it is measured: entropy 1"
    assert line.startswith("in passing, from step 300 to 400: reward 0.6")
    assert line in str(diagnose(path))


@pytest.mark.slow
@needs_browser
def test_in_a_browser_the_effect_the_verdict_and_three_curves_are_open(tmp_path):
    page = write_report([log(tmp_path / "metrics.jsonl", audited_log())], tmp_path / "page.html")
    seen = opened(page, tmp_path)
    texts = (
        EFFECT,
        "nothing is wrong",
        "entropy fell by 9",
        "Gradient of rare winners blocked",
        "All curves",
    )
    places = [seen.text.index(text) for text in texts]
    assert places == sorted(places)
    open_panels = """JSON.stringify([...document.querySelectorAll("[data-panel]")]
      .filter((panel) => !panel.closest("details:not([open])")).map((panel) => panel.dataset.panel))"""
    with Chromium(tmp_path) as browser:
        for width in (390, 1280):
            tab = browser.open(page.as_uri(), width=width)
            shown = json.loads(tab.evaluate(open_panels))
            assert shown == ["reward", "entropy", "audit/blocked_mass_below_0.1"]
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            # A link to a folded curve opens its section.
            tab.evaluate("location.hash = document.querySelector('details figure[id]').id")
            assert tab.wait_for("document.querySelector('details.section').open")
        assert tab.complaints() == []


def test_without_javascript_the_page_has_what_it_says_first(tmp_path):
    rows = [{"step": step, "reward": 0.5, "note": "<b>"} for step in range(1, 41)]
    log = tmp_path / "<i>.jsonl"
    log.write_text("\n".join(map(json.dumps, rows)))
    page = write_report([log], tmp_path / "report.html").read_text(encoding="utf-8")
    [text] = re.findall("<noscript>(.*?)</noscript>", page, re.DOTALL)
    assert "/&lt;i&gt;.jsonl: reward-flat: the reward is 0.5 in every one of the last 40 log steps" in text
