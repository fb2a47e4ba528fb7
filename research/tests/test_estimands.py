"""Each sentence on entropy says whether it is at equal step or at equal reward, on pages, in reports and in advice."""

import pytest

from helpers.estimands import asks_for_an_estimand, sentences_without_estimand
from pages import PAGES, ROOT
from rlvet.lint.known import FRAMEWORKS
from rlvet.records.catalogue import KINDS

ASK = [
    "Neither BandPO nor Clip-Higher surely kept entropy.",
    "Entropy is lower under BandPO than under all three, by 0.035 to 0.042 nats.",
    "`BandPO()` had less entropy than clip 0.2, −0.052 [−0.086, −0.018] nats.",
    "GRPO's clip lets entropy collapse early, and Band prevents it.",
    "Band's lower bound cost entropy there.",
    "BandPO gained nothing sure, and lost variety at two of three rates.",
    "`BandAbove` kept +0.036 [+0.003, +0.070] nats at 5e-05.",
    "A clip of [0.8, 2] ended with 1.93 nats.",
    "Clip-Higher's effect on entropy does not appear.",
    "The rules differ in entropy by at most 0.04.",
    "Entropy of `trl-grpo` ended at 0.105 and that of `trl-band` at 0.026.",
    "Under random rewards no bound ends with almost no entropy.",
]
"""Sentences that compare the entropies of rules."""
DO_NOT_ASK = [
    "If the entropy collapses, lower the learning rate.",
    "If the entropy collapses, check whether the clip blocks rare tokens with A > 0.",
    "Does Band change the entropy against clip 0.2?",
    "The ratio is not 1, by a constant distance of at most 0.05 nats.",
    "Drops 0.02 % of the tokens, drawn from those that reduce the entropy much, and clips to [0, 2].",
    "[Band](rules.md#entropy-at-equal-reward) was run 24 times.",
    "There is no entropy bonus in the loss of the clip, and its KL is 18 nats a token more than that of Band.",
    "`KLCov()` adds a penalty to the 0.2 % of tokens that reduce the entropy most, and has no clip.",
    "BandPO learned more slowly than clip 0.2, by 0.022.",
    "The record contains ids, entropies, the step and the reward.",
    "`top_entropy_quantile` drops tokens before the clip, 20 % more of them.",
    "The entropy is that of the policy in nats.",
]
PAGES_OF_A_SENTENCE = {
    # The estimand is in the sentence, in its bold lead, in the sentence before, or in a heading.
    "# Page\n\nBand kept more entropy at equal\nreward than clip 0.2.": 0,
    "# Page\n\n- **At equal step:** Band kept more entropy than clip 0.2.\n- Band lost 0.1 nats.": 1,
    "# Page\n\nAt equal reward Band kept 0.1 nats. Clip-Higher kept 0.2 nats more.": 0,
    "# Page\n\n## Entropy at equal step\n\n### Old data\n\nBand kept 0.1 nats.\n\n## Next\n\nBand kept 0.1 nats.": 1,
    # A bold lead with both says of no sentence which one it has, and a sentence that names entropy says it itself.
    "# Page\n\n- **Variety at equal reward and at equal step:** Band kept 0.1 nats.": 1,
    "# Page\n\n## At equal reward and at equal step\n\nBand kept 0.1 nats.": 1,
    "# Page\n\nAt equal reward Band kept 0.1 nats. Clip-Higher kept more entropy than Band.": 1,
    # A title is not enough, and neither is another paragraph, or a block of code.
    "# Entropy at equal reward\n\nBand kept 0.1 nats.": 1,
    "# Page\n\nThis is at equal reward.\n\nBand kept 0.1 nats.": 1,
    "# Page\n\n```text\nat equal reward\n```\nBand kept 0.1 nats.": 1,
    # A table has it in its header, in a row, or beside it.
    "# Page\n\n| rule | entropy |\n|---|---|\n| Band | +0.1 |": 1,
    "# Page\n\n| rule | entropy at equal step |\n|---|---|\n| Band | +0.1 |": 0,
    "# Page\n\n| rule | entropy |\n|---|---|\n| Band | +0.1 |\n\nEntropy is at equal step.": 0,
    "# Page\n\nAt equal reward:\n\n| rule | entropy |\n|---|---|\n| Band | +0.1 |": 0,
    "# Page\n\n| what | it is |\n|---|---|\n| Band minus clip, entropy | +0.1 |\n| entropy at equal step | 1 |": 1,
    "# Page\n\n| rule | entropy |\n|---|---|\n| Band | +0.1 |\n\nBetween.\n\nEntropy is at equal step.": 1,
    "# Page\n\n| rule | reward |\n|---|---|\n| Band | +0.1 |": 0,
    # Cells with words are sentences of their own.
    "# Page\n\n| said | here |\n|---|---|\n| The clip lets entropy collapse, and bounds of Band do not | no |": 1,
    "# P\n\n| at equal step | here |\n|---|---|\n| The clip lets entropy collapse, and bounds of Band do not | no |": 0,
}
"""Pages, with the number of sentences and tables in them that need an estimand."""


@pytest.mark.parametrize("sentence", ASK)
def test_a_comparison_of_entropies_asks_for_an_estimand(sentence):
    assert asks_for_an_estimand(sentence)


@pytest.mark.parametrize("sentence", DO_NOT_ASK)
def test_another_sentence_does_not(sentence):
    assert not asks_for_an_estimand(sentence)


@pytest.mark.parametrize(("page", "number"), PAGES_OF_A_SENTENCE.items())
def test_where_the_estimand_may_stand(page, number):
    assert len(sentences_without_estimand(page)) == number


NOT_OF_RULES = {
    # How often rlvet finds simulated faults, of which two are of entropy.
    "research/reports/rlvet/report.md",
    # Word for word as it was committed before the runs.
    "research/reports/network/predictions.md",
}
REPORTS = sorted((ROOT / "research").glob("*.md")) + sorted((ROOT / "research/reports").rglob("*.md"))
READ = [
    page
    for page in [*PAGES, ROOT / "CHANGELOG.md", *REPORTS]
    if page.relative_to(ROOT).as_posix() not in NOT_OF_RULES
]


@pytest.mark.parametrize("page", READ, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_each_sentence_on_entropy_says_at_equal_what(page):
    assert sentences_without_estimand(page.read_text(encoding="utf-8")) == []


def test_so_does_the_advice_of_rlvet():
    texts = []
    for kind in KINDS:
        texts += [kind.meaning, kind.condition, kind.remedy]
    for framework in FRAMEWORKS.values():
        for rule in framework.rules:
            texts += [rule.title, rule.happens, rule.fix, rule.source]
    assert len(texts) > 300
    assert [text for text in texts if sentences_without_estimand(text)] == []
