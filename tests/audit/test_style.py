"""Figures tell rules apart, by colour, line and marker."""

import pytest

from bandpo import ClipRule

pytest.importorskip("matplotlib")

from bandpo.audit.figures import allowed_change, training_curves
from bandpo.audit.style import LOOKS, OTHERS, looks_of
from bandpo.text import parse


def test_a_rule_has_one_look_in_every_figure():
    rules = {text: parse(text, ClipRule) for text in ("Band(KL(), 0.05)", "FixedClip(0.2)", "Unclipped()")}
    drawn = allowed_change(rules).axes[0].lines, allowed_change(dict(reversed(rules.items()))).axes[0].lines
    first, second = ({line.get_label(): line.get_color() for line in lines} for lines in drawn)
    assert first == second == {text: look.colour for text, look in looks_of(rules).items()}
    run = {"run": [{"step": 1, "entropy": 0.5}]}
    lines = training_curves(run, {"run": "Band(KL(), 0.05)"}).axes[0].lines
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
        allowed_change({"Band": parse("Band()", ClipRule), "clip": parse("FixedClip()", ClipRule)}),
    ],
    ids=["training", "change"],
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
