"""The palette: a rule has one colour in figures, reports and pages, and no other file has a colour."""

import re

import pytest

from bandpo_lab.output.style import line_styles
from bandpo_lab.toy import demo
from pages import ROOT
from rlvet.report.palette import COLOURS, PAGE, colours_of, css_variables, rule_colour
from rlvet.runs.metric_names import COUNTERFACTUALS

SAME = {
    "band": ("BandPO()", "Band(KL(), 0.05)", "Band", "BandPO", "Band over Band"),
    "band-above": ("BandAbove()", "BandAbove", "Band above", "Band over .8"),
    "clip": ("FixedClip(0.2)", "FixedClip(0.2, 0.2)", "clip 0.2", "1.2 over .8"),
    "clip-higher": ("FixedClip(0.2, 0.28)", "Clip-Higher", "DAPO()", "1.28 over .8"),
    "clip-2": ("FixedClip(0.2, 1.0)", "clip [.8, 2]", "2 over .8"),
    "no-bound": ("no clip", "no bound"),
    "no-upper-bound": ("no upper bound",),
    "dcpo": ("DCPO", "DCPO()"),
}
DRAWING = ("*.css", "*.js", "*.html", "*.jinja", "*.mplstyle", "*.py")
FOLDERS = ("docs", "packages/*/src", "scripts", "research/studies", "examples", "benchmarks")
COLOUR = re.compile(
    r"""#(?:[0-9a-fA-F]{3}|[0-9a-fA-F]{6}|[0-9a-fA-F]{8})(?![\w/-])|\b(?:rgba?|hsla?)\(|["'](?:C\d|tab:\w+)["']"""
)


def lines_with_colours(file):
    lines = file.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if COLOUR.search(re.sub(r"[\w./-]+#\d+", "", line))]


@pytest.mark.parametrize(
    "line", ["color: #fff;", "stroke: '#0072b2'", "rgb(0, 0, 0)", 'color="C1"', "#12345678;"]
)
def test_a_colour_is_recognised(line, tmp_path):
    file = tmp_path / "file.css"
    file.write_text(f"{line}\n/* pytorch/pytorch#190533, docs/trl.md#settings */\n")
    assert lines_with_colours(file) == [line]


def test_no_other_file_has_a_colour():
    files = [
        file
        for folder in FOLDERS
        for kind in DRAWING
        for root in ROOT.glob(folder)
        for file in root.rglob(kind)
    ]
    assert len(files) > 100
    written = {
        str(file.relative_to(ROOT)): lines
        for file in files
        if not file.name.startswith("uPlot") and (lines := lines_with_colours(file))
    }
    assert not written, "colours are in packages/rlvet/src/rlvet/report/assets/palette.json"


@pytest.mark.parametrize("colour", SAME)
def test_every_name_of_a_rule_has_its_colour(colour):
    assert {rule_colour(name) for name in SAME[colour]} == {f"rule-{colour}"}
    styles = line_styles(SAME[colour])
    assert {style.colour for style in styles.values()} == {COLOURS[f"rule-{colour}"].light}
    assert len({style.line for style in styles.values()}) >= min(4, len(styles))


def test_rules_that_are_drawn_together_differ():
    for names in (COUNTERFACTUALS, demo.METHODS):
        colours = colours_of(names)
        assert all(colour.startswith("rule-") for colour in colours.values())
        assert len(set(colours.values())) == len(names)
    for theme in ("light", "dark"):
        hues = [getattr(colour, theme) for colour in COLOURS.values()]
        assert len(set(hues)) == len(hues)


@pytest.mark.parametrize(
    "name", ["GSPO()", "the run", "1.2 over .3", "a lr of 1e-5", "Bandits()", "clip 0.25"]
)
def test_what_is_no_such_rule_has_another_colour(name):
    assert rule_colour(name) is None


def luminance(colour):
    """Return the relative luminance of WCAG 2."""
    channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in channels]
    return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(first, second):
    low, high = sorted(map(luminance, (first, second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_can_be_told_from_the_page(theme):
    paper = getattr(PAGE["paper"], theme)
    for name, colour in COLOURS.items():
        # Clip-Higher's orange is the least on white; its lines are dashed, with triangles.
        assert contrast(getattr(colour, theme), paper) > 2.1, name
    for name in ("ink", "soft", "good", "stop", "fix", "look", "mark"):
        assert contrast(getattr(PAGE[name], theme), paper) > 4.5, name


def test_css_has_every_colour_in_both_themes():
    for text in (css_variables(), css_variables(dark="[data-theme=dark]")):
        for name in (*PAGE, *COLOURS):
            assert len(re.findall(rf" --{name}: #[0-9a-f]{{6}};", text)) == 2
