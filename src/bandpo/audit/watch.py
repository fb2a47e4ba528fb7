"""Warnings that save a day: what makes a run pointless, said once, with the fix.

Thresholds are chosen to stay silent on runs that merely learn: a policy that becomes sure of what earns reward loses
its entropy too, and is not warned of.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import cast

from torch import Tensor

from bandpo.audit.diagnosis import entropy_finding
from bandpo.audit.settings import Setup
from bandpo.radius import Radius
from bandpo.rules import ClipRule, Unclipped, bands

TEMPERATURE_TOLERANCE = (
    0.1  # mean |log ratio| before any update, to leave room for rounding and other kernels
)
RADIUS_FACTOR = 2.5  # from the divergence's default, either way
IDLE_CALLS = 200  # losses in a row without one clipped token


class BandWarning(UserWarning):
    """A run that trains, but not as its settings say."""


class Watch:
    """Looks at the metrics of each log step and warns of each trouble once.

    >>> watch = Watch(FixedClip())
    >>> watch({"calls": 8.0, "on_policy": 0.0, "inert": 0.0}, entropy=1.2, reward=0.3)

    Args:
        clip: The run's rule.
        calls_per_batch: Losses that are made of one generated batch, over all processes, where that is known. Of
            more than these some come after an update.
        framework: The framework whose settings the warnings name, see `bandpo.audit.settings`; None for none.
    """

    def __init__(self, clip: ClipRule, calls_per_batch: float = IDLE_CALLS, *, framework: str | None = None):
        self._setup = Setup(framework)
        self._named = self._setup.named
        self._can_clip, self._calls_per_batch = not isinstance(clip, Unclipped), calls_per_batch
        self._said: set[str] = set()
        self._still = self._idle = 0.0
        self._start: tuple[float, float | None] | None = None

    def before_update(self, metrics: Mapping[str, float]) -> None:
        """Check the first micro-batch, where every ratio should still be 1.

        Args:
            metrics: `Audit.metrics` of it.
        """
        off = metrics.get("log_ratio_abs", 0.0)
        if off > TEMPERATURE_TOLERANCE:
            self._say(
                "temperature",
                f"before any update the mean ratio is {metrics.get('ratio_mean', math.inf):.3g} and the mean "
                f"|log ratio| is {off:.2g}; both policies are the same there, so they should be 1 and 0. The old "
                "log-probabilities seem to be at another temperature, of another vocabulary slice, or of other "
                f"weights: take both at the sampling temperature over the full vocabulary{self._named('sampling')}",
            )

    def __call__(
        self, metrics: Mapping[str, float], *, entropy: float | None = None, reward: float | None = None
    ) -> None:
        """Check one log step.

        Args:
            metrics: `Audit.metrics` since the last.
            entropy: Mean entropy (nats per token); the audit's own if omitted.
            reward: Mean reward, by which a lost entropy is judged.
        """
        calls = metrics["calls"]
        self._still = self._still + calls if metrics["on_policy"] == 1 else 0.0
        if self._still > self._calls_per_batch:
            self._say(
                "ratio",
                f"the ratio was exactly 1 in {self._still:.0f} losses in a row, so no clip rule can act: the old "
                "log-probabilities are the current ones. Use each batch for more than one optimiser step"
                f"{self._named('several updates')}",
            )
        elif self._can_clip and not self._still:
            self._idle = self._idle + calls if metrics["inert"] == 1 else 0.0
            if self._idle >= IDLE_CALLS:
                self._say(
                    "idle",
                    f"no token was clipped in {self._idle:.0f} losses in a row: the rule has no effect on this run. "
                    "The updates are smaller than it allows; use a smaller radius or interval, a larger learning "
                    f"rate{self._named('learning rate')}, or more updates per batch{self._named('updates')}",
                )
        entropy = metrics.get("entropy") if entropy is None else entropy
        if entropy is not None and math.isfinite(entropy):
            self._start = self._start or (entropy, reward)
            first, first_reward = self._start
            rewards = None if reward is None or first_reward is None else (first_reward, reward)
            found = entropy_finding((first, entropy), rewards)
            if found.ok is False:
                self._say(found.code, f"entropy: {found.cause}. Try {self._setup.filled(found.advice)}")

    def _say(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warnings.warn(text, BandWarning, stacklevel=4)


def check_radius(rule: ClipRule) -> None:
    """Warn of a band whose radius is far from what its divergence is used with; rules within rules included.

    Radii of different divergences do not compare: TV 0.05, say, is three to four times tighter than what DPPO uses
    beside KL 0.05.
    """
    for band in bands(rule).values():
        if isinstance(band.radius, Tensor):
            continue  # only its values would tell, and they may be on a device
        radius = cast("float | Radius", band.radius)  # never None: Band filled it in
        least, most = radius.range if isinstance(radius, Radius) else (radius, radius)
        usual = band.divergence.default_radius
        # The nearest value of a radius that changes counts: a schedule may end far from where it started.
        factor = min(max(usual, least), most) / usual
        if not 1 / RADIUS_FACTOR < factor < RADIUS_FACTOR:
            size = f"{factor:.2g} times" if factor > 1 else f"1/{1 / factor:.2g} of"
            warnings.warn(
                f"radius {factor * usual:g} is {size} what {band.divergence!r} is usually given ({usual:g}); radii of "
                "different divergences do not compare. If it is meant, ignore this",
                BandWarning,
                stacklevel=3,
            )
