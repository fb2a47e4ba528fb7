"""When a clip rule can matter: how much of a rare winner's gradient it blocks, as measured, or by a short theory.

docs/when.md has what was measured, and the steps of the theory. `advice` says all of it of one run.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from bandpo.audit.configs import setup_of
from bandpo.audit.diagnosis import STARVED
from bandpo.audit.invariants import Looks
from bandpo.audit.logs import Summary, read_log, summarize
from bandpo.audit.record import read_calls
from bandpo.audit.recorder import record_files
from bandpo.audit.replay import replay_record
from bandpo.audit.settings import Setup
from bandpo.errors import InvalidValue
from bandpo.methods import Method
from bandpo.rules import ClipRule, FixedClip

STALE = 0.5
"""Share from which on Band's upper side gained with stale data, in every network setting and in most tables."""
WIDE, RARE = 2.0, torch.tensor(0.01, dtype=torch.float64).log()
"""An upper bound at this old log-probability from which another added 0.06 at most, on data 8 batches old."""
LONG = 10_000
"""Batches of a long run. It does not meet an answer that is drawn less than once in so many."""


def arrived(updates: float, momentum: float) -> float:
    """S(k) = k − β(1 − β^k)/(1 − β): of k equal gradients from rest, how many have moved the weights by now.

    Momentum owes the rest, and pays it later, blocked or not.

    >>> arrived(3, momentum=0.0), round(arrived(3, momentum=0.9), 3)
    (3.0, 0.561)
    """
    return updates - (momentum - momentum ** (updates + 1)) / (1 - momentum)


@dataclass(frozen=True)
class Placement:
    """A run's place in the theory.

    The theory assumes that each gradient of an answer raises its log-probability by the same amount, ``rise``, which
    momentum spreads over later updates. It assumes that other answers and prompts move it neither up nor down, and
    that the batches before draw it as often.

    Args:
        probability: Probability of the rare token, or of the strategy that it opens, in one sample.
        batch: Samples in a batch that could draw it: of one prompt for an answer to that prompt, of all prompts for a
            strategy that they share.
        epochs: How often each sample is used.
        minibatches: Optimizer steps in an epoch.
        lag: Batches that are trained on between the sampling of a batch and its own first update.
        momentum: β1 of Adam, or that of SGD.
        rise: Nats by which one gradient raises the answer in the end; None where that is not known.
        rule: The clip rule in use.

    Raises:
        ValueError: a number out of range, or an answer that no run would meet.
    """

    probability: float
    batch: int
    epochs: int
    minibatches: int
    lag: int = 0
    momentum: float = 0.9
    rise: float | None = None
    rule: ClipRule = field(default_factory=FixedClip)

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1:
            raise InvalidValue(f"--probability {self.probability:g}: choose one between 0 and 1")
        for name, least in {"batch": 1, "epochs": 1, "minibatches": 1, "lag": 0}.items():
            most = math.inf if name == "batch" else LONG
            if not least <= (value := getattr(self, name)) <= most:
                raise InvalidValue(f"--{name} {value}: choose {least} to {most}")
        if not 0 <= self.momentum < 1:
            raise InvalidValue(f"--beta1 {self.momentum:g}: choose at least 0 and below 1")
        if self.draws < 1 / LONG:
            raise InvalidValue(
                f"--probability {self.probability:g}: a batch of {self.batch} draws it {self.draws:.2g} times, so no "
                "run would meet it; count all samples that could draw it in --batch, or ask for a likelier one"
            )
        room = -math.log(self.probability)
        if self.rise is not None and not 0 < self.rise <= room:
            raise InvalidValue(f"--rise {self.rise:g}: choose nats above 0, up to −log p = {room:.2g}")

    @property
    def draws(self) -> float:
        """How often a batch draws the answer: N·p."""
        return self.batch * self.probability

    @property
    def updates(self) -> int:
        """Optimizer steps on a batch."""
        return self.epochs * self.minibatches

    @property
    def bound(self) -> float:
        """The rule's upper bound on the answer's ratio."""
        return float(self.rule.bounds(torch.tensor(self.probability, dtype=torch.float64).log()).upper)

    @property
    def looks(self) -> float:
        """Updates of a batch that hold the answer, in a batch that draws it; fewer than all if it is rare."""
        return self.updates * self._held / self._chance(self.batch)

    @property
    def stale_looks(self) -> float:
        """Updates that hold it in the batches between the sampling and the first update; 0 without a lag."""
        return self.lag * self.updates * self._held

    @property
    def _held(self) -> float:
        """The chance that an update holds it."""
        return self._chance(self.batch / self.minibatches)

    def _chance(self, samples: float) -> float:
        """That so many samples hold it: 1 − (1 − p)^n."""
        return -math.expm1(samples * math.log1p(-self.probability))

    def moved(self, kept: float = 1.0, *, rest: bool = False) -> float:
        """How many rises the ratio has moved by at the last look that is kept, where such a share of all looks is.

        Stale ones have arrived. Of the batch's own, which are ``updates / looks`` updates apart, momentum owes some. It
        pays meanwhile what it owed of earlier batches, unless they left the answer at ``rest``.
        """
        apart, own = self.updates / self.looks, max(0.0, kept * self.looks - 1)
        owed = own * apart - arrived(own * apart, self.momentum)
        paid = 0.0 if rest else kept * self._held * owed
        return kept * self.stale_looks + arrived(own, self.momentum**apart) + paid

    @property
    def binding_rise(self) -> float:
        """Nats from which the rule holds back an answer that was at rest; infinite where its ratio never leaves 1."""
        moved = self.moved(rest=True)
        return math.log(self.bound) / moved if moved > 0 else math.inf

    def blocked_share(self, rise: float) -> float:
        """Share of the looks, and so of the answer's gradient, that find its ratio beyond the upper bound.

        What is blocked moves nothing. So of all looks, stale ones and the batch's own, as many are kept as bring the
        ratio to the bound; the first always is.

        >>> Placement(0.002, 128, epochs=16, minibatches=1).blocked_share(0.6)  # 2 of 16 are kept
        0.875
        """
        rises, every = math.log(self.bound) / rise, self.looks + self.stale_looks
        more = bisect_right(
            range(2, math.ceil(every) + 1), rises, key=lambda n: self.moved(min(1, n / every))
        )
        return 1 - min(1, (1 + more) / every)


Answer = tuple[str, str, str]
"""Whether the upper side can matter, why, and what to set."""
KEEP = "Keep your rule."
COMPARE = 'Keep your rule, or compare it over seeds and rates with "BandAbove()"{band}.'
FASTER = 'Keep your rule. On stale data "BandAbove()"{band} gained at four times the rate in one case of two.'
HIGHER = '"BandAbove()"{band}, at 1, 2 and 4 times your rate. If one wrong answer dominates, no bound.'
WIDER = 'Keep your rule. From lag 8 on, compare it with "FixedClip(0.2, inf)".'
AUDIT = "Nothing yet. Audit a run: its blocked share decides."


def measured_in(run: Path, method: Method | None = None) -> tuple[Summary, Setup]:
    """What a log or a record tells, as `bandpo audit` reads it, and what was trained: ``method``, if they do not tell.

    Raises:
        ValueError: it cannot be read, or does not tell.
    """
    replay = replay_record(run, method=method) if record_files(run) else None
    rows = replay.rows if replay else read_log(run)
    setup, seen = replay.setup if replay else setup_of(run, rows, method), summarize(rows)
    if replay:
        setup = replace(setup, stale=Looks.of(read_calls(run)).stale)
    if "blocked_mass_below_0.1" not in seen.metrics:
        raise InvalidValue(
            f"{run} does not tell what the clip blocked of rare winners (A > 0, p < 0.1): none was drawn, or the run "
            "was not audited; log with bandpo's adapter, or write a record of it"
        )
    return seen, setup


def advice(
    run: Placement | None, measured: tuple[float, float, float] | None, setup: Setup
) -> list[tuple[str, str]]:
    """Headed sentences: whether the rule can matter, which side of it, what to set, how sure, what would tell more.

    Args:
        run: Its place, where that is known.
        measured: The share of rare winners' gradient that its rule blocked, and the ends of its interval. It overrules
            the theory.
        setup: What it was trained with: the method that blocked the share, and whether its data were old.

    Raises:
        ValueError: neither is given.
    """
    if measured is not None:
        word, why, setting = _measured(*measured, setup)
        sure = "The blocked share was measured. What follows from it was seen in tables and in one small network."
    elif run is not None:
        word, why, setting = expected(run)
        sure = "This is a theory of one answer. A measured share tells more: bandpo where RUN, or --blocked-share."
    else:
        raise InvalidValue(
            "give a run's folder, log or record; --blocked-share; or --probability, --batch, --epochs and --minibatches"
        )
    return [
        ("Can the upper side matter?", f"{word}. {why}"),
        ("What to set", setup.filled(setting)),
        ("And the lower side?", "Keep a fixed one. Band's gained in no network, and cost on fresh data."),
        ("How sure", sure),
    ]


def _measured(share: float, low: float, high: float, setup: Setup) -> Answer:
    within = "" if low == high else f" [{low:.0%}, {high:.0%}]"
    said = f"Your rule blocks {share:.0%}{within} of rare winners' gradient."
    method, stale = setup.method, setup.stale
    room = 1.0 if method is None else _room(method.clip)
    if method is not None and method.level != "token":
        return "Not known", f"{said} It clips whole sequences. The studies clipped tokens.", COMPARE
    if high <= STARVED:
        why = f"{said} Where clip 0.2 blocked up to {STARVED:.0%}, Band's upper side changed nothing at the same rate."
        if stale is False or room >= WIDE:
            return "No", why, KEEP
        return "Not at this rate", why, FASTER
    if room >= WIDE:
        why = f"{said} It lets p = 0.01 rise {room:.3g}-fold. A wider bound, or none, added 0.06 at most."
        return "Not known", why, KEEP if stale is False else WIDER
    if stale is False:
        why = f"{said} Fresh data used more than once gained in tables. In networks no gain was sure."
        return "Not known", why, COMPARE
    if low >= STALE:
        why = f"{said} On data some batches old Band's upper side then gained."
        return "Yes" if stale else "Yes, if your data are stale", why, HIGHER
    if high >= STALE or low <= STARVED:
        return "Not known", f"{said} So wide an interval says nothing yet.", f"{KEEP} Audit more steps of it."
    return "Not known", f"{said} On old data a network gained 0.02 at 47 %, elsewhere 0.1 at 36 %.", COMPARE


def _room(clip: ClipRule) -> float:
    """What it lets a rare token's ratio rise to; 1 where that depends on more than the probability."""
    try:
        return float(clip.bounds(RARE).upper)
    except InvalidValue:
        return 1.0


def expected(run: Placement) -> Answer:
    """What the theory says of the upper side: ``No``, ``Probably not`` or ``Perhaps``; and the reason."""
    more = f"{KEEP} More samples find a rare answer sooner."
    if math.isinf(run.bound):
        return "No", "Your rule has no upper bound, so it holds nothing back.", more
    if run.updates == 1 and not run.lag:
        return "No", "With one update on a fresh batch every ratio is 1, and no rule acts.", more
    binds = (
        f"A batch draws the answer {run.draws:.2g} times. From rest, the bound of {run.bound:.3g} acts if one gradient "
        f"raises it by more than {run.binding_rise:.3g} nats."
    )
    if run.rise is None:
        return "Perhaps", f"{binds} --rise is not known.", AUDIT
    if not (share := run.blocked_share(run.rise)):
        return "Probably not", f"{binds} Yours is {run.rise:.3g}.", more
    return "Perhaps", f"{binds} With {run.rise:.3g} it should block {share:.0%} of its gradient.", AUDIT
