"""What the page on records says of whether a clip can matter is what the rows of two studies give."""

import re

from pages import ROOT
from studies.clip_matters import Setting, best_threshold, count_weak, judge, read_settings, with_true_rewards

PAGE = " ".join((ROOT / "docs/audit.md").read_text(encoding="utf-8").split())


def test_the_page_has_the_counts():
    settings = read_settings()
    true = with_true_rewards(settings)
    verdicts = judge(true)
    weak = count_weak(true)
    assert f"In {weak.mattered} of {weak.others} settings" in PAGE
    assert f"In the {weak.nothing} settings" in PAGE
    assert re.search(rf"at most {weak.largest:.3f}", PAGE)
    assert (
        f"In the {weak.little} settings in which it dropped 1 to 5 %, by at most {weak.largest_little:.3f}"
        in PAGE
    )
    assert "a threshold was hardly better than a vote of the other settings" in PAGE
    # This is true of settings whose rewards can differ.
    assert verdicts.right - verdicts.right_votes <= 1


def setting(cell, blocked, matters):
    return Setting(cell, 1.0, blocked, matters, 0.1 if matters else 0.0)


def test_a_cell_does_not_fix_its_own_threshold():
    """The others put the threshold between 0.1 and 0.3, and with the cell b it would be above 0.26."""
    settings = [setting(cell, *one) for cell in "ac" for one in ((0.1, False), (0.3, True))]
    own = [setting("b", 0.25, False), setting("b", 0.26, False)]
    assert best_threshold(settings) == 0.2
    assert best_threshold(settings + own) == 0.28
    verdicts = judge(settings + own)
    assert verdicts.wrong == own
    assert (verdicts.right, verdicts.none, verdicts.right_none) == (4, 2, 2)


def test_the_smallest_of_equal_thresholds_is_taken():
    assert best_threshold([setting("a", 0.2, True), setting("a", 0.4, True)]) == 0.0
    assert best_threshold([setting("a", 0.2, False), setting("a", 0.4, False)]) == 1.01
