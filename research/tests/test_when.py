"""What docs/when.md, README and two reports say about speed, ends, entropy and equality follows from their tables.

That each table is of the committed rows is tested in test_map.py.
"""

import re
from itertools import chain

import numpy as np
import pytest

import when_tables
from bandpo_lab.study.interval import signed, student
from pages import ROOT
from studies import smollm2, staleness_report
from studies.equal_reward import equal_step_name
from studies.learning_rates import Curve, simulated_power
from studies.smollm2_report import World, worlds_of

PAGES = ("research/reports/by-kind-of-data.md", "research/reports/rules-compared.md")
WHEN = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
README = (ROOT / "README.md").read_text(encoding="utf-8")
NUMBER = r"([-+]\d+\.\d+)"
INTERVAL = re.compile(rf"{NUMBER} \[{NUMBER}, {NUMBER}\]")


def in_one_line(text):
    return " ".join(text.split())


def table(name):
    """Return the rows of a generated table, each as its cells."""
    lines = WHEN.partition(f"<!-- {name}: begin -->\n")[2].partition(f"<!-- {name}: end -->")[0].splitlines()
    return [line.strip("| ").split(" | ") for line in lines[2:]]


def intervals(cells):
    """Return value, low and high of each cell that holds an interval."""
    matches = [INTERVAL.match(cell) for cell in cells]
    return [tuple(map(float, match.groups())) for match in matches if match]


OLD = re.compile(r"^(lag [248]|long run|SmolLM2, (very )?stale|network, (lag [248]|long run))")


def test_a_high_bound_gains_at_each_rules_best_rate_on_old_data():
    rows = [cells for cells in table("ends") if OLD.match(cells[0])]
    gains = intervals(cells[4] for cells in rows)
    assert len(gains) == 7
    assert all(low > 0 for _, low, _ in gains)
    smallest, largest = min(gains)[0], max(gains)[0]
    prose = in_one_line(WHEN)
    assert f"it added {smallest:.2f} to {largest:.2f} to the mean reward" in prose
    before_and_after = [tuple(map(float, cells[3].split(" → "))) for cells in rows]
    assert max(after / before for before, after in before_and_after) == pytest.approx(2, abs=0.2)
    assert "up to twice the mean reward" in in_one_line((ROOT / "docs/when.md").read_text(encoding="utf-8"))
    interior = sum("edge" not in cells[1] for cells in rows)
    assert interior == 6
    assert "is neither the lowest nor the highest in six of the seven settings" in prose


def test_the_ends_differ_where_the_page_says_so():
    ends = {cells[0]: interval for cells in table("ends") for interval in intervals([cells[6]])}
    alike = [name for name in ends if OLD.match(name) and ends[name][1] < 0 < ends[name][2]]
    assert sorted(alike) == ["lag 2", "lag 4, 4 x 4", "long run"]
    differ = sum(not low < 0 < high for name, (_, low, high) in ends.items() if OLD.match(name))
    assert differ == 4
    assert "The ends of the runs differ surely in four of the seven." in in_one_line(WHEN)
    # No page says that the ends are alike without a condition.
    for page in (
        README,
        (ROOT / "docs/which-method.md").read_text(),
        (ROOT / "docs/questions.md").read_text(),
    ):
        assert "the ends are alike" not in in_one_line(page)


def test_most_best_rates_of_smollm2_are_at_an_edge():
    worlds = worlds_of(smollm2.read_runs(ROOT / "research/results/smollm2/runs.jsonl.gz"))
    # Under random rewards no rate is better than another.
    curves = [world.curve(arm) for world in worlds if world.part.reward != "coin" for arm in world.part.arms]
    edges = sum(curve.at_edge for curve in curves)
    said = f"{edges} of {len(curves)} best rates are the highest or the lowest that was run"
    assert said in in_one_line(WHEN)


def test_a_high_bound_on_reused_data_of_the_easier_task():
    (gain,) = (cells[4] for cells in table("ends") if cells[0] == "lag 0, 4 x 4")
    _, low, _ = intervals([gain])[0]
    assert low == 0, "an interval that begins just above 0"
    prose = in_one_line(WHEN)
    assert f"On the easier task of this network** `BandAbove` gained {gain} of a mean reward" in prose
    lag_0 = staleness_report.worlds_of(when_tables.stale_rows())["lag 0, 4 x 4"]
    assert lag_0.at_best("clip 0.2", "AUC") == pytest.approx(0.60, abs=0.005)
    assert lag_0.difference("BandAbove", "clip 0.2").low > 0
    clip = lag_0.difference("clip [.8, 2]", "clip 0.2")
    assert clip.low < 0 < clip.high
    value, low, high = lag_0.difference("no upper bound", "clip 0.2")
    assert f"having no upper bound lost {-value:.3f} [{-high:.3f}, {-low:.3f}]" in prose


def means_in_tables(data, *arms):
    """Return what rules add to clip 0.2's mean in tables of logits, by optimizer, from the committed report."""
    page = (ROOT / "research/reports/optimizers/map.md").read_text(encoding="utf-8")
    lines = page.partition("## Against clip 0.2\n")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    places = [rows[0].index(arm) for arm in arms]
    return {row[1]: [float(row[place]) for place in places] for row in rows[2:] if row[0] == data}


STANDARD_ADAM = ("adam", "head-and-trunk")


def spread(means):
    values = list(chain.from_iterable(means))
    return f"{min(values):+.2f} to {max(values):+.2f}"


def test_means_in_tables_of_logits():
    prose = in_one_line(WHEN)
    old, reused = (means_in_tables(data, "Band").values() for data in ("stale", "fresh, used more often"))
    band = f"Band minus clip 0.2 is {spread(old)} on old data, and {spread(reused)} on reused data"
    assert band in prose

    two = means_in_tables("stale", "BandAbove", "clip [.8, 2]")
    changed = f"changed the mean by {spread(two[name] for name in STANDARD_ADAM)}"
    assert f"under the standard Adam, `BandAbove` and a clip of [0.8, 2] {changed}" in prose
    assert changed in (ROOT / "docs/which-method.md").read_text()

    high = (
        "Clip-Higher",
        "clip [.8, 2]",
        "clip [.8, 5]",
        "no upper bound",
        "Band",
        "BandAbove",
        "room by mass",
    )
    all_high = means_in_tables("stale", *high)
    said = spread(all_high[name] for name in STANDARD_ADAM)
    assert f"bounds with a higher upper side, Band's among them, changed the mean by {said}" in prose


def test_entropy_at_equal_reward():
    rows = table("equal")
    by_rule = {rule: [] for rule in ("Band", "BandAbove", "room by mass")}
    for rule, constant, *cells in rows:
        if constant != "BandAbove":
            by_rule[rule] += [(constant, *interval) for interval in intervals(cells)]
    above, mass = (
        [value for _, value, low, _ in by_rule[rule] if low > 0] for rule in ("BandAbove", "room by mass")
    )
    assert len(above) == len(mass) == 18
    prose = in_one_line(WHEN)
    assert f"`BandAbove` kept {min(above):.1f} to {max(above):.1f} nats more than each constant" in prose
    assert f"and room by mass {min(mass):.1f} to {max(mass):.1f}" in prose
    which = in_one_line((ROOT / "docs/which-method.md").read_text())
    assert f"{min(above):.1f} to {max(above):.1f} nats more entropy at equal reward" in which
    for rule, constant, *cells in rows:
        if rule == "Band" and constant not in ("no bound", "BandAbove"):
            assert all(low <= 0 for _, low, _ in intervals(cells[:2]))
    beside_above = {rule: intervals(cells) for rule, minus, *cells in rows if minus == "BandAbove"}
    assert all(high < 0 for _, _, high in beside_above["Band"])
    assert all(low > 0 for _, low, _ in beside_above["room by mass"])


def test_entropy_at_equal_reward_in_other_settings():
    for setting, *cells in table("elsewhere"):
        values = intervals(cells[:3])
        if setting.startswith("network"):
            assert all(abs(value) < 0.04 and -0.08 < low < high < 0.08 for value, low, high in values)
            assert all(high < 0.002 for _, _, high in intervals(cells[3:4]))
        elif setting.startswith("SmolLM2, stale"):
            assert all(value > 0 for value, _, _ in values)
            assert all(low > 0 for _, low, _ in values[1:])
    [reused] = [
        intervals(cells[:3]) for setting, *cells in table("elsewhere") if setting == "SmolLM2, reused"
    ]
    assert reused[0][2] < 0 < reused[2][1]


def test_entropy_on_new_seeds():
    rows = {(minus, level): (cell, verdict) for minus, level, cell, _, verdict in table("new seeds")}
    predicted = [verdict for _, verdict in rows.values() if verdict != "–"]
    assert predicted == ["held"] * 4
    assert all(low > 0 for _, low, _ in intervals(cell for cell, _ in rows.values()))
    prose = in_one_line(WHEN)
    (clip, _), (high, _) = (rows[minus, "0.6"] for minus in ("clip 0.2", "clip [.8, 2]"))
    assert (clip[-3:], high[-3:]) == ("(7)", "(8)")
    clip, high = clip[:-4], high[:-4]
    assert (
        f"`BandAbove()` had {clip} nats more than clip 0.2 and {high} more than a clip of [0.8, 2]" in prose
    )
    kept = [value for value, _, _ in intervals([clip, high])]
    assert "kept {:.2f} nats more than clip 0.2 and {:.2f} more than a clip".format(*kept) in prose
    part = smollm2.NEW_SEEDS
    world = World(part, part.rates, smollm2.read_runs(when_tables.NEW_SEEDS))
    for minus in ("clip 0.2", "clip [.8, 2]"):
        assert signed(world.difference_at_rate("BandAbove", minus, 6e-4)) in prose


def at_equal_step(world, part):
    """Return the difference of BandAbove from clip 0.2 in entropy at equal step, by seed the mean over the rates."""
    ours, theirs = (world.curve(arm, equal_step_name(part)).scores for arm in ("BandAbove", "clip 0.2"))
    return signed(student((ours - theirs).mean(0)))


def test_entropy_at_equal_step():
    stale = when_tables.vocabulary()["stale"]
    prose = in_one_line(WHEN)
    every, tenth = (at_equal_step(stale, part) for part in ("all batches", "last tenth"))
    part = smollm2.NEW_SEEDS
    new = at_equal_step(World(part, part.rates, smollm2.read_runs(when_tables.NEW_SEEDS)), "all batches")
    assert f"{every} nats over all batches of the main part and {tenth} over the last tenth of them" in prose
    assert f"and {new} over all batches on the new seeds" in prose
    [(_, _, high)] = intervals([tenth])
    assert high < 0


def test_band_above_beside_a_high_constant():
    rows = {cells[0]: intervals(cells[2:]) for cells in table("high")}
    old = {name: both for name, both in rows.items() if OLD.match(name)}
    assert all(high > 0 for both in old.values() for _, _, high in both)
    surely = [name for name, both in old.items() if all(low > 0.0005 for _, low, _ in both)]
    assert surely == [
        "SmolLM2, stale, no luck",
        "SmolLM2, stale, six layers",
        "network, lag 8",
        "network, lag 4, 4 x 4",
    ]
    page = in_one_line((ROOT / "docs/which-method.md").read_text(encoding="utf-8"))
    assert (len(surely), len(old)) == (4, 11)
    assert "surely faster in four of eleven settings" in page
    assert rows["network, lag 0, 4 x 4"][0][2] < 0
    both_ways = (
        "at best rates and averaged over rates, `BandAbove()` was never surely slower than a clip of [0.8, 2]"
    )
    assert both_ways in in_one_line(WHEN)
    assert both_ways.partition(" than")[0].replace("never", "[never") in page


def test_where_band_above_is_slower_at_a_single_rate():
    """On old data; in reused data it is too."""
    slower = {}
    for name, world in when_tables.learning_worlds():
        if not OLD.match(name) or "BandAbove" not in when_tables.arms_of(world):
            continue
        ours, theirs = (world.curve(arm) for arm in ("BandAbove", "clip [.8, 2]"))
        for rate, gap in zip(ours.rates, ours.scores - theirs.scores, strict=True):
            if (found := student(gap)).high < 0:
                slower[name, rate] = signed(found)
    assert [*slower] == [
        ("network, lag 8", 3.5e-5),
        ("network, lag 8", 7e-5),
        ("network, lag 4, one update", 1.4e-4),
    ]
    low, high, one_update = slower.values()
    assert (
        "At three single rates it was, paired and not adjusted: in the network at lag 8 "
        f"at 3.5e-05, {low}, and 7e-05, {high}, and at lag 4 with one update at 0.00014, {one_update}."
    ) in in_one_line(WHEN)


def test_the_power_is_said():
    rows = {int(cells[0]): cells[1:] for cells in table("power")}
    found = float(rows[8][1].rstrip("%"))
    assert found == pytest.approx(30, abs=5)
    assert "in about three of ten such studies" in in_one_line(WHEN)


def test_power_grows_with_the_gain_and_with_the_seeds():
    rng = np.random.default_rng(1)
    ours, theirs = (Curve([1.0, 2.0], rng.normal(0.5, 0.05, (2, 8))) for _ in range(2))
    none, some, much = (simulated_power(ours, theirs, gain, 8, 0.05, repeats=60) for gain in (0.0, 0.05, 0.5))
    more_seeds = simulated_power(ours, theirs, 0.05, 40, 0.05, repeats=60)
    assert none.greater < 0.15
    assert none.greater < some.greater < more_seeds.greater
    assert much == (1, 0)
    # An interval of forty seeds is narrow enough to declare equality, one of eight is not.
    assert simulated_power(ours, theirs, 0.0, 40, 0.05, repeats=60).equal > none.equal


def answer(text):
    """Return the table of what to use, without the folder of its links."""
    begin = text.index("| your data | what was measured | what to use |")
    return re.sub(r"\]\((\.\./|docs/)?", "](", text[begin:].split("\n\n")[0].split("\n<!--")[0])


def test_the_answer_of_readme_is_the_table_of_the_page():
    page = (ROOT / "docs/when.md").read_text(encoding="utf-8")
    assert answer(README) == answer(page)
    assert len(answer(page).splitlines()) == 2 + 5


def test_the_page_is_two_screens():
    """Words and numbers, without pictures, targets of links, code and the names of rules and metrics."""
    page = (ROOT / "docs/when.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^]]*\]\([^)]*\)|<!--.*?-->", "", page)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    assert len(text.split()) <= 900
    plain = re.sub(r"`[^`]*`|clip 0\.2|\[0\.8, \d\]|@32|\[\d{4}\.\d{5}\]", "", text)
    assert len(re.findall(r"\d+(?:\.\d+)?", plain)) <= 40


def test_what_the_page_on_old_data_says_of_two_studies():
    page = " ".join((ROOT / "docs/old-data.md").read_text().split())
    report = (ROOT / "research/reports/async-trainer/report.md").read_text()
    # The first table has the predicted differences: setting, difference, expectation, seeds, interval, verdict.
    found = {
        (row[0], row[1]): row[2:]
        for row in re.findall(r"^\| (lag \d) \| (\w.*?) \| (.*?) \| (\d+) \| (.*?) \| (\w+) \|", report, re.M)
    }
    assert {row[3] for row in found.values()} == {"held"}
    assert f"All {len(found)} predictions of it held" in page
    assert {row[1] for row in found.values()} == {"12"}
    assert "twelve seeds" in page
    intervals = {key: [float(x) for x in re.findall(r"[+-][\d.]+", row[2])] for key, row in found.items()}
    for lag in ("lag 2", "lag 4"):
        assert all(
            intervals[lag, f"{arm} − clip 0.2"][1] > 0 for arm in ("BandAbove", "BandPO", "clip [.8, 2]")
        )
    assert all(low < 0 < high for (lag, _), (_, low, high) in intervals.items() if lag == "lag 0")
    assert "At a lag of 4 the constant learned a little sooner than `BandAbove()`" in page
    assert intervals["lag 4", "BandAbove − clip [.8, 2]"][0] > -0.03
    assert intervals["lag 4", "BandAbove − clip [.8, 2]"][2] < 0
    _, low, high = intervals["lag 2", "BandAbove − clip [.8, 2]"]
    assert low < 0 < high
    own_loop = page.partition("<!-- loop of our own: begin -->")[2].partition(
        "<!-- loop of our own: end -->"
    )[0]
    at_8 = re.search(r"\| 8 \(32 to 35\) \|.*\| ([+-][\d.]+) \[([+-][\d.]+), [^|]*\] \|", own_loop)
    assert float(at_8[2]) > 0
    [averaged, _] = {cells[0]: cells[2:] for cells in table("high")}["network, lag 8"]
    assert f"Averaged over rates the last number, {at_8[1]}, is {averaged}." in page


HIGH_RULES = ("BandAbove", "clip [.8, 2]")
"""The rules with a high upper bound of the study of stale data."""


def four_updates_old(model=""):
    """Return the setting whose data are four updates old, of both base models or of one."""
    return staleness_report.worlds_of(when_tables.stale_rows())[f"lag 4, one update{model}"]


def test_what_the_report_says_of_data_of_four_updates_of_age():
    both = four_updates_old()
    cell = both.cell
    assert cell.lag * cell.epochs * cell.minibatches == 4
    report = in_one_line(WHEN)
    sentence = "`BandAbove` minus clip 0.2 is {} and a clip of [0.8, 2] minus clip 0.2 {}, each rule at its best rate"
    assert sentence.format(*(signed(both.difference(rule, "clip 0.2")) for rule in HIGH_RULES)) in report
    assert all(both.curve(rule).best == len(cell.rates) - 1 for rule in HIGH_RULES)
    clip = both.curve("clip 0.2").scores
    for rule in HIGH_RULES:
        *first_gaps, last_gap = (signed(student(gap)) for gap in both.curve(rule).scores - clip)
        assert len(first_gaps) == 2
        assert f"{', '.join(first_gaps)} and {last_gap}" in report


@pytest.mark.parametrize(("model", "is_sure"), [("a", True), ("b", False)])
def test_what_the_report_says_of_each_base_model_at_four_updates_of_age(model, is_sure):
    world = four_updates_old(f", model {model}")
    gains = [world.difference(rule, "clip 0.2") for rule in HIGH_RULES]
    assert [gain.low > 0 for gain in gains] == [is_sure, is_sure]
    report = in_one_line(WHEN)
    assert " and ".join(map(signed, gains)) in report
    blocked = f"{100 * world.at_best('clip 0.2', 'blocked'):.0f} %"
    assert f"blocked {blocked}" in report.replace("it blocked", "blocked")


def test_what_the_pages_say_of_data_of_four_updates_of_age():
    page = in_one_line((ROOT / "docs/old-data.md").read_text(encoding="utf-8"))
    link = "[in one of two networks](../research/reports/by-kind-of-data.md#old-data)"
    assert f"At 4 updates, in a loop of our own, they did {link}, with best rates at the edge" in page
    assert "8 updates old or more, a high upper bound learned sooner; 4 old, in one of two networks" in README


def test_two_tables_are_over_all_rates_that_were_run():
    """At lag 8 two rates were added, and the best ones are then no longer at an end."""
    by_name = staleness_report.with_all_rates(when_tables.stale_rows())
    assert {name: len(by_name[name].cell.rates) for name in ("lag 8", "long run")} == {
        "lag 8": 5,
        "long run": 3,
    }
    world = by_name["lag 8"]
    curves = [world.curve(arm) for arm in ("clip 0.2", "BandAbove", "clip [.8, 2]")]
    assert not any(curve.at_edge for curve in curves)
    own_loop = (ROOT / "docs/old-data.md").read_text().partition("<!-- loop of our own: begin -->")[2]
    [at_8] = re.findall(r"^\| 8 \(32 to 35\) \|.*$", own_loop, re.M)
    assert signed(world.difference("clip [.8, 2]", "clip 0.2")) in at_8
    both = world.curve("BandAbove").scores - world.curve("clip [.8, 2]").scores
    high = {cells[0]: cells[2:] for cells in table("high")}
    assert high["network, lag 8"][0] == signed(student(both.mean(0)))
