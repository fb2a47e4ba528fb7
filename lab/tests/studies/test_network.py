"""The network study: its worlds, its rules, its terms, its analysis on made-up runs, and what the pages say of it."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("trl")
from bandpo import Band, ClipRule, parse
from bandpo_lab.study.collect import RunResult
from bandpo_lab.study.execute import read_results
from bandpo_lab.study.plan import parse_study
from bandpo_lab.study.statistics import Results, random_halves
from bandpo_lab.tasks.multiplication import problems
from pages import ROOT
from studies import network, network_report
from studies.mirror import Mirror
from studies.network import ABOVE, OnCurve, curves, effect, effects, on_curves, read_predictions
from studies.rewards import coin_flips, two_stages

FOLDER = ROOT / "studies"
STUDY = parse_study((FOLDER / "network.yaml").read_text())
PREDICTIONS = read_predictions(FOLDER / "network-predictions.md")


def test_predictions_are_about_arms_that_ran(tmp_path):
    assert len(PREDICTIONS) == 10
    for p in PREDICTIONS:
        [first, *_] = [e for e in STUDY.experiments.values() if e.world == p.world]
        assert {p.arm, p.minus} <= set(STUDY.arms_of(first))
    (tmp_path / "page.md").write_text("| active | Band | clip 0.2 | AUC | higher | it is |\n")
    with pytest.raises(ValueError, match="no table of predictions: greater, less or equal"):
        read_predictions(tmp_path / "page.md")


def test_the_mirror_gives_band_to_the_wrong_tokens():
    p = torch.tensor([0.01, 0.3, 0.9], dtype=torch.float64)
    mirror, band = Mirror().bounds(p.log()), Band().bounds((1 - p).log())
    torch.testing.assert_close(mirror.log_upper, band.log_upper)
    torch.testing.assert_close(mirror.log_lower, band.log_lower)
    assert parse("studies.mirror.Mirror(0.05)", ClipRule) == Mirror()
    assert Mirror().bounds(torch.zeros(1)).upper.isfinite().all()  # of p = 1


def state(step, last=320):
    return SimpleNamespace(global_step=step, max_steps=last)


def test_before_the_switch_the_scratchpad_is_rewarded_as_often_as_what_stands_beside_it():
    problem = problems("train", 1)[0]
    texts = ["|2", "|4", "|6", "|7"] * 4 + [problem.scratchpad] * 16
    prompts, answers = [problem.prompt] * 32, [problem.answer] * 32
    scored = [two_stages(texts, answers, prompts, state(step)) for step in range(100)]
    assert all(rewards[:16] == [1.0, 1.0, 1.0, 0.0] * 4 for rewards in scored)
    share = np.mean([rewards[16:] for rewards in scored])
    assert share == pytest.approx(0.75, abs=4 * (0.75 * 0.25 / 1600) ** 0.5)
    assert two_stages(texts, answers, prompts, state(160))[16:] == [1.0] * 16
    alone = two_stages([problem.scratchpad] * 16, answers[:16], prompts[:16], state(0))
    assert 0 < sum(alone) < 16  # with nothing beside it: a fair coin


def test_coins_are_fair_and_blind():
    flips = [coin_flips(["|1"] * 100, state(step)) for step in range(40)]
    assert np.mean(flips) == pytest.approx(0.5, abs=4 * 0.5 / 4000**0.5)
    assert flips[0] != flips[1]
    assert coin_flips(["<"] * 100, state(0)) == flips[0]


# The analysis ---------------------------------------------------------------------------------------------------------


def ended(world, rate, arm, seed, reward, entropy=0.5):
    flat = {"reward": [reward] * 20, "entropy": [entropy] * 20}
    experiment = f"{world}, learning_rate {rate}"
    return OnCurve(world, rate, RunResult(experiment, arm, seed, None, 1.0, {}, {}, flat, {}))


@pytest.fixture
def made_up():
    """Band above: + 0.1 in every world but paper, at its better rate; Band's lower side: − 0.1; noise of ± 0.01."""
    rng, gain = np.random.default_rng(0), {"Band above, clip below": 0.1, "no bound above, clip below": 0.1}
    return [
        ended(
            world, rate, arm, seed,
            0.4 + (world != "paper") * gain.get(arm, 0) + (rate == 1.0e-4) * 0.1 + rng.uniform(-0.01, 0.01),
            entropy=0.5 - 0.2 * (arm == "clip above, Band below"),
        )
        for world in ("active", "paper", "plenty", "two stages", "coin flips")
        for rate in (5.0e-5, 1.0e-4, 2.0e-4)
        for arm in STUDY.arms
        for seed in range(8)
    ]  # fmt: skip


def test_verdicts_on_runs_whose_truth_is_known(made_up):
    found = effects(made_up, PREDICTIONS)
    verdicts = [network.verdict(e.interval, p.expects) for p, e in found.items()]
    # A clip as wide as Band is as good; plenty gains.
    assert verdicts == ["held"] * 5 + ["failed", "failed"] + ["held"] * 3


def results(worlds, seconds=1.0):
    """Of all runs of these worlds, and of half of the others'."""
    ended, rng = [], np.random.default_rng(0)
    for k, run in enumerate(STUDY.reported({})):
        e = STUDY.experiments[run.experiment]
        if e.world in worlds or k % 2:
            batches = int(run.options["max_steps"] / run.options["logging_steps"])
            reward = 0.3 + 0.1 * (run.arm == "Band above, clip below") + rng.uniform(-0.01, 0.01)
            curves = {name: [reward] * batches for name in ("reward", "entropy", "clip_high", "clip_low")}
            ended.append({
                "experiment": run.experiment, "arm": run.arm, "seed": run.seed, "tuning": None,
                "seconds": seconds, "before": {}, "after": {}, "curves": curves, "by_bin": {},
            })  # fmt: skip
    text = (FOLDER / "network.yaml").read_text()
    return {"study": text, "runs": ended, "versions": {"torch": "2"}, "commit": "abc", "failed": []}


def test_a_world_is_looked_at_once_all_of_its_runs_have_ended():
    found = Results.from_file(results({"paper"}))
    assert network.progress(found)["paper"] == (100, 100)
    assert network.progress(found)["active"] == (140, 280)
    runs = on_curves(found)
    assert {run.world for run in runs} == {"paper"}
    assert len(runs) == 100
    assert {run.rate for run in runs} == {1.4e-4, 2.0e-4, 2.8e-4, 4.0e-4, 5.6e-4}
    assert [p.world for p in effects(runs, PREDICTIONS)] == ["paper"]


@pytest.fixture(scope="module")
def studies():
    return [Results.from_file(read_results(ROOT / "results" / name)) for name in ("network", "network-more")]


@pytest.mark.slow
def test_further_seeds_join_their_world_once_all_of_them_have_ended():
    first, text = results({"active"}), (FOLDER / "network-more.yaml").read_text()
    active = (run for run in first["runs"] if run["experiment"].startswith("active"))
    runs = [run | {"seed": run["seed"] + 8} for run in active]
    more = first | {"study": text, "runs": runs}
    cut = more | {"runs": runs[:-1]}
    one, other, unfinished = map(Results.from_file, (first, more, cut))
    assert {run.run.seed for run in on_curves(one, other)} == set(range(16))
    assert on_curves(one, unfinished) == on_curves(one)
    page = network_report.network_page(PREDICTIONS, first, cut)
    assert "more seeds of active (279 of 280 runs)" in page.lead[-1]
    assert not any("the further ones alone" in text for text in page.lead)
    assert page.sections[-1].title == "How the further seeds were made"


@pytest.mark.slow
def test_the_page_says_what_is_known_and_what_is_not(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(results({"paper", "coin flips"})))
    network_report.main([str(FOLDER / "network-predictions.md"), str(tmp_path)])
    text = (tmp_path / "report.md").read_text()
    assert "Not looked at yet: plenty (40 of 80 runs), active (140 of 280 runs), two stages (80 of" in text
    assert text.count("not run yet: ") == sum(p.world not in ("paper", "coin flips") for p in PREDICTIONS)
    assert re.search(r"equal to within 0.05 \| \+0\.\d+ \[\+0\.0\d+, \+0\.1\d+\] \| 100% \| failed \|", text)
    assert "## Paper" in text
    assert "## Active" not in text
    assert (tmp_path / "report.html").exists()


def test_an_effect_is_that_of_interquartile_means():
    ours, theirs = np.array([0.0, 0.4, 0.6, 9.0]), np.array([-9.0, 0.1, 0.1, 0.2])
    found = effect(ours, theirs)
    assert found.interval.value == pytest.approx(0.5 - 0.1)
    assert found.improved == 13 / 16  # 0.0 beats one of four, 0.4, 0.6 and 9.0 all of them: 13 of 16
    assert effect(ours, ours) == ((0.0, 0.0, 0.0), 0.5)


def test_collapse_and_entropy_at_matched_reward():
    run = ended("active", 1.0e-4, "Band", 0, 0.01).run
    assert network.collapsed(run)
    assert network.entropy_at_half(run) is None
    run.curves["reward"][:] = [0.1] * 5 + [0.9] * 15
    run.curves["entropy"][:] = np.linspace(2, 0.1, 20)
    assert not network.collapsed(run)
    assert network.entropy_at_half(run) == run.curves["entropy"][int(run.metric("batches to half")) - 1]


def test_the_page_has_the_movement_that_was_measured():
    found = json.loads((ROOT / "results/momentum.json").read_text())
    page = (ROOT / "docs/theory.md").read_text()
    for beta1 in (0.9, 0.0):
        these = [run for run in found if run["beta1"] == beta1]
        assert [run["seed"] for run in these] == [0, 1, 2, 3]
        for side, name in (("raised", "up"), ("lowered", "down")):
            moves = [run[side] for run in these]
            over = [[move[when] for move in moves] for when in ("before", "after")]
            cells = [f"{np.mean(x):+.2f} ({min(x):+.2f} to {max(x):+.2f})" for x in over]
            tokens, onward = sum(m["tokens"] for m in moves), np.mean([m["onward"] for m in moves])
            assert f"| {beta1:g} | {name} | {tokens:,} | {cells[0]} | {cells[1]} | {onward:.0%} |" in page
        assert f"{np.mean([run['reward'] for run in these]):.2f} with " in page


@pytest.mark.slow
def test_every_figure_of_the_page_is_the_data_s(studies):
    """Its intervals, its table of sides, two scores at a highest rate, and what README says of the upper side."""
    runs = on_curves(*studies)
    page = (ROOT / "docs" / "when.md").read_text()
    # The pretrained model between them is another study, held by its own test.
    said, _, rest = page[page.index("## What a network says") :].partition("## What a pretrained model says")
    said += rest[rest.index("## What to set") : rest.index("## Place your own run")]
    by_side = {
        world: network.sides(runs, world, network_report.metric_of(world, PREDICTIONS))
        for world in dict.fromkeys(run.world for run in runs)
    }
    active = curves(runs, "active", "AUC")
    fitted = (active[arm].cross_fitted(random_halves(16)) for arm in ("as wide as Band", "clip 0.2"))
    room = read_predictions(FOLDER / "network-room-predictions.md")
    room_runs = on_curves(Results.from_file(read_results(ROOT / "results/network-room")))
    known = [effect(*fitted), *effects(runs, PREDICTIONS).values(), *effects(room_runs, room).values()]
    known += [e for one in studies for e in effects(on_curves(one), PREDICTIONS).values()]
    known += [e for each in by_side.values() for e in each.values()]
    found = re.findall(r"[+-]0\.\d{3} \[[^]]*\]", said)
    assert len(found) == 28
    assert set(found) <= set(map(str, known))
    names = {"the paper's geometry": "paper"} | {name: name for name in ("plenty", "active", "two stages")}
    rows = re.findall(r"^\| ([a-z' ]+) \| \d+ \| [\d.]+ \| \d+ \| (.*) \| (.*) \|$", said, re.M)
    assert [row[0] for row in rows] == list(names)
    for name, *cells in rows:
        texts = {side: str(e) for side, e in by_side[names[name]].items()}
        assert cells == [texts["upper, mean"], texts["lower, mean"]]
    for world in ("plenty", "active", "two stages"):
        over_clip, under_band = by_side[world]["upper, over clip"], by_side[world]["lower, under Band"]
        assert f"| {world} | {over_clip} | {under_band} |" in said
    unbound, above = (active[arm].scores[-1] for arm in ("no bound above, clip below", ABOVE))
    last = f"{network.interquartile_mean(unbound):.3f}, where Band above is at {network.interquartile_mean(above):.3f}"
    assert f"falls to {last}" in said
    means = [round(by_side[w]["upper, mean"].interval.value, 2) for w in ("plenty", "active", "two stages")]
    by = f"by {min(means)} to {max(means)}"
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"then raised the mean reward {by}; " in readme
    assert f"reward {by}. Its *lower*" in " ".join(page.split())
    assert abs(by_side["paper"]["upper, mean"].interval.value) < 0.01
