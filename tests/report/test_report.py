"""The page of `bandpo report`: its data against the library, and the page itself in a browser."""

import json
import re

import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

from bandpo import DCPO, KL, Band, FixedClip, Recorder, ratio_bounds
from bandpo import divergences as all_divergences
from bandpo.audit.replay import replay_record
from bandpo.cli.app import app
from bandpo.doctor import first_pass
from bandpo.report import write_report
from bandpo.runs.record import read_record
from bandpo_lab.interval import bootstrap
from browser import calculated, needs_browser, needs_javascript, opened

pytest.importorskip("pyarrow")

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
    """The data in a page."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)
    return json.loads(found)


def test_a_record_gives_each_rule_its_figures_and_the_tokens_that_moved_most(tmp_path):
    record = recorded(tmp_path / "record")
    (run,) = held(write_report([record], tmp_path / "page.html", methods=["DCPO()"]))["runs"]
    seen = replay_record(record, {"DCPO()": "DCPO()"})
    for name, prefix in (("the run", ""), ("DCPO()", "if/DCPO()/")):
        rates = [audit.metrics()["clip_high"] for audit in seen.by_step[name].values()]
        assert run["columns"][f"audit/{prefix}clip_high"] == pytest.approx(rates, rel=1e-4)
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


def test_where_it_is_written_and_what_is_refused(tmp_path):
    rows = [{"step": 1234567 + k, "reward": 0.5} for k in range(2)]
    run = log(tmp_path / "run" / "metrics.jsonl", rows).parent
    result = CliRunner().invoke(app, ["report", str(run)])
    assert result.output == f"wrote {run / 'report.html'}\n"
    assert held(run / "report.html")["runs"][0]["steps"] == [1234567, 1234568]
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
    assert (run["looked_at"], run["part"]) == ("looked at all 1,728 tokens of 12 losses", "")
    monkeypatch.setattr(first_pass, "TOKENS", 300)
    (run,) = held(write_report([record], tmp_path / "page.html"))["runs"]
    assert run["looked_at"] == "looked at 432 of 1,728 tokens (the first 3 of 12 losses)"
    assert run["part"] == "the first 3 of 12 losses"
    assert run["coverage"]["total_tokens"] == 1728
    (run,) = held(write_report([tmp_path / "run" / "metrics.jsonl"], tmp_path / "page.html"))["runs"]
    assert (run["looked_at"], run["part"], run["coverage"]) == ("", "", None)


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
    assert "Made by bandpo" in seen.text  # at the end: no script failed
    assert "looked at all 1,728 tokens of 12 losses" in seen.text
    assert "img" not in [tag for tag, _ in seen.elements]
    assert HOSTILE in seen.text  # as a column's name
    assert {"reward", "entropy", "clip_high", "audit/approx_kl"} <= {*seen.having("data-panel")}
    assert "cut" not in seen.having("data-panel")
    assert "Not drawn, as no run tells it: " in seen.text
    assert "Answers cut off (share)" in seen.text
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
    assert seen.having("data-panel") == ["entropy"]
    for said in (
        "Not drawn: no run tells what its clip did",
        "only a record keeps the ids",
        "Made by bandpo",
    ):
        assert said in seen.text


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
        assert found["radius"] == divergence.default_radius
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
