"""Write tokens with Band's decisions, from 70-digit arithmetic, for tests of kernels and trainers of others.

    PYTHONPATH=packages/bandpo/src:tests python scripts/decision_vectors.py [--tokens 250]

The file is upstream/decisions.json. Its numbers are exact in float32. Tokens whose divergence is within 1e−4 of the
radius, or whose ratio is as close to the cap, are left out: rounding decides there.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import struct
from pathlib import Path

import mpmath as mp

import oracle

FILE = Path(__file__).parents[1] / "upstream" / "decisions.json"
RADII = {"KL": (0.05, 0.005), "ReverseKL": (0.05,), "TotalVariation": (0.15,), "PearsonChi2": (0.1,)}
MAX_RATIO = 10.0
ABOUT = (
    "Tokens and Band's decisions: log_ratio = logp - logp_old and logp_old in nats, exact in float32; below and above "
    "say that the ratio is outside of the lower or the upper bound. A clipped loss has no gradient for a token that is "
    "below with A < 0, or above with A > 0."
)


def float32(x: float) -> float:
    """Round a number to float32."""
    return struct.unpack("f", struct.pack("f", x))[0]


def draw_token(draw: random.Random) -> tuple[float, float]:
    """Draw a log-ratio and an old log-probability: rare, usual and almost certain tokens, ratios near and far."""
    kind = draw.randrange(3)
    if kind == 0:
        logp_old = draw.uniform(-69, -6)
    elif kind == 1:
        logp_old = math.log(draw.uniform(0.003, 0.98))
    else:
        logp_old = math.log1p(-(10 ** draw.uniform(-6, -1.5)))
    logp = min(logp_old + draw.gauss(0, 10 ** draw.uniform(-2, 0.6)), -1e-7)
    return float32(logp - logp_old), float32(logp_old)


def decide(divergence: str, radius: float, log_ratio: float, logp_old: float) -> tuple[bool, bool] | None:
    """Return whether a token is below and whether it is above its bounds, or None if that is a matter of rounding."""
    value = oracle.divergence_of_ratio(f"{divergence}()", logp_old, mp.exp(mp.mpf(log_ratio)))
    cap = math.log(MAX_RATIO)
    if abs(value / radius - 1) < 1e-4 or abs(log_ratio - cap) < 1e-4:
        return None
    is_far = bool(value > radius)
    return is_far and log_ratio < 0, (is_far and log_ratio > 0) or log_ratio > cap


def make_case(divergence: str, radius: float, tokens: int) -> dict[str, object]:
    """Return a case of the file, with columns of so many tokens."""
    draw = random.Random(f"{divergence} {radius}")
    columns: dict[str, list[object]] = {"log_ratio": [], "logp_old": [], "below": [], "above": []}
    while len(columns["above"]) < tokens:
        token = draw_token(draw)
        decision = decide(divergence, radius, *token)
        if decision is not None:
            for column, value in zip(columns.values(), (*token, *decision), strict=True):
                column.append(value)
    return {"divergence": divergence, "radius": radius, "max_ratio": MAX_RATIO, **columns}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=250, help="tokens of each case")
    tokens = parser.parse_args().tokens
    cases = [make_case(name, radius, tokens) for name, radii in RADII.items() for radius in radii]
    lines = ",\n".join("    " + json.dumps(case) for case in cases)
    FILE.write_text(
        f'{{\n  "about": {json.dumps(ABOUT)},\n  "cases": [\n{lines}\n  ]\n}}\n', encoding="utf-8"
    )


if __name__ == "__main__":
    main()
