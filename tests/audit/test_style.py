"""Figures tell rules apart: by colour, to colour-blind readers, and in grey by line and marker."""

from itertools import combinations

import numpy as np
import pytest

from bandpo import ClipRule

pytest.importorskip("matplotlib")

from bandpo.audit.figures import allowed_change, audit_figure, clipped_regions, training_curves
from bandpo.audit.style import LOOKS, OTHERS, looks_of
from bandpo.text import parse

# Machado, Oliveira and Fernandes (2009), severity 1, for linear RGB.
VISION = {
    "all cones": np.eye(3),
    "no red cones": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "no green cones": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "no blue cones": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
    "grey": [[0.2126, 0.7152, 0.0722]] * 3,
}
CLEARLY = 10.0
"""Distance in CIELAB; 2.3 is just noticeable (Sharma, 2003)."""


def lab(colour: str, vision) -> np.ndarray:
    """CIELAB, at daylight D65, of a colour as one sees it."""
    rgb = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.asarray(vision) @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x = to_xyz @ seen / to_xyz.sum(axis=1)
    f = np.where(x > 0.008856, np.cbrt(x), 7.787 * x + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", VISION)
def test_rules_are_told_apart_by_colour_or_else_by_line(vision):
    for (one, a), (other, b) in combinations(LOOKS.items(), 2):
        apart = np.linalg.norm(lab(a.colour, VISION[vision]) - lab(b.colour, VISION[vision]))
        assert apart > CLEARLY or a.line != b.line, (one, other, apart)


def test_a_rule_has_one_look_in_every_figure():
    rules = {text: parse(text, ClipRule) for text in ("Band(KL(), 0.05)", "FixedClip(0.2)", "Unclipped()")}
    drawn = allowed_change(rules).axes[0].lines, allowed_change(dict(reversed(rules.items()))).axes[0].lines
    first, second = ({line.get_label(): line.get_color() for line in lines} for lines in drawn)
    assert first == second == {text: look.colour for text, look in looks_of(rules).items()}
    run = {"run": [{"step": 1, "entropy": 0.5}]}
    for draw in (training_curves, audit_figure):
        lines = draw(run, {"run": "Band(KL(), 0.05)"}).axes[0].lines
        assert lines[0].get_color() == first["Band(KL(), 0.05)"]


def test_many_labels_get_a_look_each_and_none_of_a_rule_that_is_there():
    every = [*LOOKS.values(), *OTHERS]
    assert len({look.colour for look in every}) == len({look.marker for look in every}) == len(every)
    looks = looks_of({"band": "Band()", **{f"run {k}": None for k in range(12)}})
    assert len({look.colour for look in looks.values()}) == 13
    assert looks["band"] == LOOKS["Band-KL"]


@pytest.mark.parametrize(
    "figure",
    [
        training_curves({"a": [{"step": 1, "reward": 0.1, "mean@4": 0.3}], "b": [{"step": 1, "reward": 1}]}),
        audit_figure({"a": [{"step": 1.0, "entropy": 0.5, "clip_high": 0.1}], "b": [{"step": 1.0}]}),
        allowed_change({"Band": parse("Band()", ClipRule), "clip": parse("FixedClip()", ClipRule)}),
        clipped_regions({"Band": parse("Band()", ClipRule), "clip": parse("FixedClip()", ClipRule)}),
    ],
    ids=["training", "audit", "change", "regions"],
)
def test_axes_are_labelled_and_the_legend_stands_beside_them(figure):
    figure.draw_without_rendering()
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert all(axes.get_xlabel() for axes in shown)
    assert shown[0].get_ylabel()
    (legend,) = figure.legends
    assert not any(axes.get_legend() for axes in shown)
    box = legend.get_window_extent()
    assert not any(box.overlaps(axes.get_tightbbox()) for axes in shown)
    assert all(figure.bbox.padded(1).contains(*corner) for corner in legend.get_window_extent().corners())
