"""Does room for rare tokens alone do as well in a network? A verdict on each prediction of network-room-predictions.md.

bandpo study studies/network-room.yaml --output-dir results/network-room
python -m studies.network_room results/network-room
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bandpo_lab.study.execute import read_results
from studies.network import ABOVE, CLIP, Prediction, effects, scored, verdict

RARE = "Band above for rare tokens, clip below"
PREDICTIONS = (
    Prediction("the upper side helps in plenty", "plenty", ABOVE, CLIP, "greater"),
    Prediction("so does room for rare tokens alone", "plenty", RARE, CLIP, "greater"),
    Prediction("by as much", "plenty", RARE, ABOVE, "equal"),
)


def rows(results: Mapping[str, Any]) -> list[list[str]]:
    """Once all runs have ended, for each prediction: both arms, their difference in AUC, what was expected, verdict."""
    return [
        [p.arm, p.minus, str(found), p.expects, verdict(found, p.expects)]
        for p, found in effects(scored(results), PREDICTIONS)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    [folder] = map(Path, sys.argv[1:] if arguments is None else arguments)
    for row in rows(read_results(folder)):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
