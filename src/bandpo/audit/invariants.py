"""What every run assumes, tested on its record: is the ratio 1 at first, are tokens drawn from the policy?

Each test is a function from `Looks`, the first sight of every sequence, to a `Finding`. Only where all of them pass
does a word about the clip mean anything. docs/diagnose.md has the rate of false alarms.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from bandpo.audit.files import shipped
from bandpo.audit.record import Call

SURE = 4.0
"""Standard errors beyond which a mean is no accident: six tests of skewed sums give less than 1 false alarm in 20."""
ROUNDING = 0.02
"""Mean abs log-ratio (nats) of two passes of one policy by other kernels; bfloat16 gives up to half of it."""
EXACT = 1e-3
"""The same in one precision."""
FAR_APART = 2e-3
"""KL (nats per token) that bfloat16 does not reach by ten times."""
FIT = 0.75
"""R² of a temperature: two temperatures give 0.9 and more, all else but top-p below 0.1."""
AWAY = 0.2
"""Share of a distance that a right shift leaves at most; rounding alone leaves hundredths."""
EDGE = 2
"""Tokens at either end of a sequence in which prompts and padding show; each has more."""
STRANGE = 0.5
"""Nats per token above the entropy that tokens nobody sampled have, of which an engine says nothing; of stale weights
the last tokens of a sequence have it too."""
IMPOSSIBLE = 2.0
"""The same where an engine spoke of them, or none is known: one in e² is all that a policy gives them."""
NO_SIGNAL = 0.98
"""Share of sequences without advantage from which a batch has no signal."""
HUGE = 100.0
"""An advantage that no group's normalisation gives: of G sequences it is √G at most."""
UNCENTRED = 0.05
"""Share of the advantages' square that is their groups' means; 0 with the right groups, 1/G with wrong ones."""
OFF = 0.01
"""How far from 1 a mean weight must be to matter, and the share of tokens that is none."""
MOST = 0.5
"""Share of answers cut off, or of groups without signal, that is a cause."""
PAIRS = 20
"""Pairs of equal answers from which their rewards are compared."""
TOKENS = 2**21
"""Tokens from which no more are kept, so that memory is bounded; `Coverage` counts those that are left out."""


class Finding(NamedTuple):
    """What was tested, and what it means. As made, it passed."""

    code: str
    ok: bool | None
    """None where nothing is wrong, or where it cannot be tested."""
    tested: str
    figure: float | None = None
    error: float | None = None
    """Standard error of the figure, from its values by batch."""
    n: int = 0
    """Tokens, sequences or log steps that it was taken over."""
    cause: str = ""
    or_else: tuple[str, ...] = ()
    """Codes of causes that cannot be told from it here."""
    advice: str = ""

    @classmethod
    def of(cls, tested: str, by_batch: Tensor, n: int) -> Finding:
        """A test that passed, on the mean of a figure over batches."""
        error = float(by_batch.std() / math.sqrt(len(by_batch))) if len(by_batch) > 1 else None
        return cls("ok", True, tested, float(by_batch.mean()), error, n)

    def named(self, code: str, cause: str, *or_else: str, ok: bool | None = False) -> Finding:
        """What it is if it did not pass."""
        return self._replace(code=code, ok=ok, cause=cause, or_else=or_else, advice=shipped("advice")[code])


def untested(tested: str, advice: str = "") -> Finding:
    """What the run does not tell, and what would."""
    return Finding("ok", None, tested, advice=advice)


class Coverage(NamedTuple):
    """How much of a record was looked at.

    Losses are in the order in which they are read: by file, and so by process. A token counts in each loss that holds
    it, as in `bandpo audit`; those of sequences that hold NaN do not count.

    >>> str(Coverage(12288, 12288, 24, 24))
    'looked at all 12,288 tokens of 24 losses'
    >>> str(Coverage(2_097_152, 61_300_000, 34, 1000))
    'looked at 2,097,152 of 61,300,000 tokens (the first 34 of 1,000 losses)'
    """

    tokens: int = 0
    """Tokens of the losses that were looked at."""
    total_tokens: int = 0
    """Tokens of the record."""
    losses: int = 0
    """Losses that were looked at: the first of the record."""
    total_losses: int = 0
    """Losses of the record."""

    @property
    def complete(self) -> bool:
        """Whether nothing was left out."""
        return self.losses == self.total_losses

    @property
    def part(self) -> str:
        """The part of the record that was looked at, for a sentence; empty where it is all of it."""
        if self.complete:
            return ""
        first = "the first" if self.losses == 1 else f"the first {self.losses:,}"
        return f"{first} of {self.total_losses:,} losses"

    def __str__(self) -> str:
        if self.complete:
            losses = "1 loss" if self.losses == 1 else f"{self.losses:,} losses"
            return f"looked at all {self.tokens:,} tokens of {losses}"
        return f"looked at {self.tokens:,} of {self.total_tokens:,} tokens ({self.part})"

    def with_loss(self, tokens: int, looked_at: bool) -> Coverage:
        """Count one more loss of the record."""
        return Coverage(
            self.tokens + tokens * looked_at,
            self.total_tokens + tokens,
            self.losses + looked_at,
            self.total_losses + 1,
        )

    def as_json(self) -> dict[str, int]:
        """Return the four counts by name."""
        return self._asdict()


NONE, NO_ROWS, NO_FLAGS = (torch.zeros(0, dtype=d) for d in (torch.float64, torch.int64, torch.bool))


@dataclass
class Looks:
    """Tokens, one after the other, of every sequence when it was first seen; NaN where something was not recorded."""

    logp: Tensor = NONE
    old: Tensor = NONE
    engine: Tensor = NONE
    entropy: Tensor = NONE
    lag: Tensor = NONE
    place: Tensor = NONE
    """From the start of the sequence, 0 first."""
    left: Tensor = NONE
    """Tokens that follow in the sequence."""
    row: Tensor = NO_ROWS
    """Number of the sequence. Each tensor from here on has one value a sequence."""
    before: Tensor = NO_FLAGS
    """Whether no update had been made on its batch."""
    batch: Tensor = NONE
    advantage: Tensor = NONE
    """NaN where its tokens differ in it."""
    group: Tensor = NONE
    reward: Tensor = NONE
    truncated: Tensor = NONE
    words: Sequence[int | None] = ()
    """A number for the tokens of each sequence, the same for the same tokens."""
    bad: int = 0
    """Sequences with NaN or log-probabilities above 0."""
    meant: bool = False
    """Whether the run's method refers to the engine's log-probabilities."""
    moved: Mapping[int, float] = field(default_factory=dict)
    """Of each batch the mean abs log-ratio at its last look."""
    begun: Mapping[int, int] = field(default_factory=dict)
    """Of each batch the step of its first look."""
    coverage: Coverage = field(default_factory=Coverage)
    """How much of the record the tokens are of."""

    @classmethod
    def of(cls, calls: Iterable[Call]) -> Looks:
        """Those of a record."""
        parts: defaultdict[str, list[Tensor]] = defaultdict(list)
        words: list[int | None] = []
        known: set[int] = set()
        begun: dict[int, int] = {}
        moved: dict[int, float] = {}
        bad = kept = losses = again = rows = 0
        meant = full = False
        coverage = Coverage()
        for number, call in enumerate(calls):
            told, bad, where = call.batch, bad + call.bad, call.batch.mask.bool()
            meant = call.anchor == "rollout"
            step = number if call.step is None else call.step
            batch = step if call.generation is None else call.generation
            if call.generation is None is call.update and call.lag is not None and where.any():
                batch = step - int(call.lag[where].min())  # the newest version that drew it
            first = batch not in begun if call.update is None else call.update == 0
            begun.setdefault(batch, step)
            keys = [
                hash(tuple(x.numpy().tobytes().rstrip(b"\0") for x in row))  # however far it was padded
                for row in zip(told.logp_old, told.advantages, strict=True)
            ]
            new = torch.tensor([key not in known for key in keys]) & where.any(1)
            known.update(keys)
            losses, rows = losses + (call.update is None), rows + int(where.any(1).sum())
            again += int((~new & where.any(1)).sum())
            if where.any() and call.known:
                moved[batch] = float(told.log_ratio[where].abs().mean())
            # From the first loss that is left out on, none counts as looked at. Every loss is read in any case, for
            # its bad sequences, so that the count of the record costs nothing.
            full = full or (kept > TOKENS and bool(new.any()))
            coverage = coverage.with_loss(int(where.sum()), looked_at=not full)
            if full or not new.any():
                continue
            where, advantage, token = where[new], told.advantages[new], call.token
            unknown, lengths = torch.full(where.shape, math.nan), where.sum(1)
            of_tokens = {
                "logp": told.logp if call.known else None,
                "old": told.logp_old,
                "engine": told.logp_anchor,
            }
            of_tokens |= {"entropy": told.entropy, "lag": call.lag}
            of_rows = {"group": call.group, "reward": call.reward, "truncated": call.truncated}
            place = where.cumsum(1) - 1
            began = advantage.gather(1, where.int().argmax(1, keepdim=True))
            one = ((advantage == began) | ~where).all(1)
            columns = {
                name: (unknown if x is None else x[new])[where].double() for name, x in of_tokens.items()
            }
            columns |= {
                name: (unknown[:, 0] if x is None else x[new]).double() for name, x in of_rows.items()
            }
            columns |= {
                "place": place[where],
                "left": (lengths[:, None] - 1 - place)[where],
                "row": torch.arange(len(lengths)).repeat_interleave(lengths) + len(words),
                "before": torch.full_like(one, first),
                "off": torch.full(one.shape, float(told.log_ratio[new][where].abs().mean())),
                "batch": torch.full_like(lengths, batch),
                "advantage": torch.where(one, began[:, 0].double(), math.nan),
            }
            for name, x in columns.items():
                parts[name].append(x)
            words += [
                None if token is None else hash(ids[counted].numpy().tobytes())
                for ids, counted in zip(where if token is None else token[new], where, strict=True)
            ]
            kept += len(columns["row"])
        whole = {name: torch.cat(some) for name, some in parts.items()}
        off = whole.pop("off", NONE)
        found = cls(**whole, words=words, bad=bad, meant=meant, moved=moved, begun=begun, coverage=coverage)
        # Where steps count losses, any but the first may follow an update on its batch.
        if 1 < losses == len(begun):
            near = off <= ROUNDING
            if near.any() and (meant or not found.bypass):
                found.before &= near
            elif 2 * again < rows:  # one pass; some answers are alike
                found.before &= found.batch == found.batch[:1]
        return found

    @property
    def bypass(self) -> bool:
        """Whether the old log-probabilities are the engine's own."""
        given = ~self.engine.isnan()
        return bool(given.any() and torch.equal(self.old[given], self.engine[given]))

    @property
    def stale(self) -> bool | None:
        """Whether most tokens were some batches old before any update on theirs; None where no version tells."""
        lag = self.lag[self.first]
        return bool(lag.nanmedian() > 0) if lag.isfinite().any() else None

    @property
    def excess(self) -> Tensor:
        """Surprisal less entropy, whose mean is 0 where tokens are drawn from the policy; 0 where it is not known."""
        return (-torch.where(self.logp.isnan(), self.old, self.logp) - self.entropy).nan_to_num(0.0)

    @property
    def first(self) -> Tensor:
        """Tokens at which no update had been made."""
        return self.before[self.row]

    def by_batch(self, x: Tensor, which: Tensor) -> Tensor:
        """The mean of ``x`` over some tokens of each batch that has any."""
        _, batch = self.batch[self.row[which]].unique(return_inverse=True)
        count = torch.bincount(batch).double()
        return torch.zeros_like(count).index_add_(0, batch, x[which]) / count

    def course(self) -> list[dict[str, float]]:
        """One row for each batch, as a log has it: reward, entropy, answers cut off, and how far its tokens moved."""
        found = []
        for batch in self.batch.unique().tolist():
            of, number = self.batch == batch, int(batch)
            row = {"step": self.begun[number], "moved": self.moved.get(number, math.nan)}
            told = {"reward": self.reward[of], "cut": self.truncated[of]}
            told["entropy"] = self.entropy[self.first & of[self.row]]
            row |= {name: float(x.nanmean()) for name, x in told.items()}
            found.append({name: x for name, x in row.items() if not math.isnan(x)})
        return found

    def clustered(self, x: Tensor, which: Tensor) -> tuple[float, float]:
        """Mean, and z: how many standard errors it is from 0, sequences being independent."""
        sums = torch.zeros(len(self.before), dtype=torch.float64).index_add_(0, self.row[which], x[which])
        spread = float(sums.square().sum().sqrt())
        total = float(sums.sum())
        return total / max(1, int(which.sum())), total / spread if spread else 0.0

    def shifted(self, a: Tensor, b: Tensor) -> tuple[int, float, float]:
        """The shift of ``b`` at which it is nearest to ``a``; the mean distance there, and without a shift."""
        found = {0: float((a - b).abs().nanmean())}
        for shift in (-2, -1, 1, 2):
            moved, same = b.roll(-shift), self.row == self.row.roll(-shift)
            if same.any():
                found[shift] = float((a - moved)[same].abs().nanmean())
        best = min(found, key=lambda shift: found[shift])
        return best, found[best], found[0]

    def temperature(self, a: Tensor, b: Tensor, which: Tensor) -> tuple[float, float]:
        """Slope and R² of a − b over b + H: of the same logits at two temperatures the slope is their quotient − 1."""
        which = which & ~(a + b + self.entropy).isnan()
        y, x = (a - b)[which], (b + self.entropy)[which]
        if len(y) < 3:
            return 0.0, 0.0
        y, x = y - y.mean(), x - x.mean()
        xx, yy, xy = float(x @ x), float(y @ y), float(x @ y)
        return (xy / xx, xy**2 / (xx * yy)) if min(xx, yy) > 1e-9 * len(y) else (0.0, 0.0)


def numbers(d: Looks) -> Finding:
    """No sequence has a value that cannot be right."""
    n = d.bad + len(d.before)
    seen = Finding("ok", True, "values are numbers", d.bad / max(1, n), None, n)
    cause = f"{d.bad} of {n} sequences hold NaN, an infinite value or a log-probability above 0"
    return seen.named("nan", cause) if d.bad else seen


def ratio(d: Looks) -> Finding:
    """Before any update the new policy is the old one."""
    # Known staleness moves the ratio, and is no fault of the trainer's own log-probabilities.
    first = d.first if d.bypass else d.first & ~(d.lag > 0)
    tested, n = "the ratio is 1 at the first look", int(first.sum())
    if not n or d.logp[first].isnan().all():
        return untested(tested, "record update= with each loss")
    off = d.by_batch((d.logp - d.old).abs(), first)
    seen = Finding.of(tested, off, n)
    # But for stale weights, a fault of this kind is in every batch.
    if float(off.mean()) <= (ROUNDING if d.meant else EXACT) or (
        not d.bypass and float(off.min()) <= ROUNDING
    ):
        return seen
    shift, left, whole = d.shifted(d.logp, d.old)
    if shift and left < AWAY * whole:
        return seen.named("shift", f"logp_old is {shift:+d} tokens from logp: there the ratio is 1")
    slope, fit = d.temperature(d.logp, d.old, first)
    if fit > FIT:
        cause = f"logp_old is at {1 + slope:.2f} times the temperature of logp (R² {fit:.2f})"
        return seen.named("temperature", cause)
    if d.bypass and (_grows(off) or bool((d.lag[first] > 0).any())):
        cause = "logp_old is the engine's, of other weights than the trainer's"
        return seen.named("stale", cause, "weight-sync")
    if float(off.mean()) > ROUNDING:
        cause = "two passes over the same tokens differ, and no shift or temperature explains it"
        return seen.named("dropout", cause, "engine-mismatch", *_untold(d))
    return seen.named("engine-mismatch", "logp_old is the engine's, of other kernels or another precision")


def _grows(by_batch: Tensor) -> bool:
    """Whether a distance begins near 0 and is larger later, as between weights that drift apart."""
    return len(by_batch) > 1 and float(by_batch[0]) < AWAY * float(by_batch.max())


def engine(d: Looks) -> Finding:
    """The engine's log-probabilities are the trainer's, but for rounding."""
    tested, given = "engine and trainer agree", ~d.engine.isnan()
    n, g = int(given.sum()), (d.old - d.engine).nan_to_num(0.0)
    if not n or d.bypass:
        return untested(tested, "record logp_rollout=, and a logp_old of the trainer's own")
    weight = g.clamp(-20, 20).expm1()
    distance = weight - g.clamp(-20, 20)
    kl, (surplus, z) = d.by_batch(distance, given), d.clustered(weight, given)
    seen = Finding.of(f"{tested} (KL, nats per token)", kl, n)
    slope, fit = d.temperature(d.old, d.engine, given)
    other_temperature = fit > FIT and abs(slope) > OFF  # which shows in a policy that is nearly sure too
    near = float(kl.mean()) <= FAR_APART and (abs(surplus) < OFF or abs(z) < SURE)
    if near and not other_temperature:
        return seen
    shift, left, whole = d.shifted(d.old, d.engine)
    if shift and left < AWAY * whole:
        return seen.named("shift", f"the trainer's tokens stand {-shift:+d} from the engine's")
    if where := _strange(d):
        return seen.named("mask", where)
    largest = torch.zeros(len(d.before), dtype=torch.float64).scatter_reduce(0, d.row, g.abs(), "amax")
    calm = largest[d.row] < 1
    share = float((g.abs() >= 1).double().mean())
    if share > OFF and bool(calm.any()) and float(g[calm].abs().mean()) < ROUNDING:
        return seen.named("retokenised", f"{share:.1%} of tokens are far off; sequences without them agree")
    above, below = (float((side > ROUNDING).double().mean()) for side in (g[given], -g[given]))
    if surplus < 0 and -z > SURE and above < max(OFF, AWAY * below):
        cause = f"π_old/π_rollout is {1 + surplus:.3f} on average and hardly ever above 1"
        return seen.named("top-p", f"{cause}: the engine drew from a part of the vocabulary")
    if other_temperature:
        cause = (
            f"the trainer is at {1 / (1 + slope):.2f} times the temperature of the engine's log-probabilities"
        )
        return seen.named("temperature", f"{cause} (R² {fit:.2f}, slope {slope:+.3f})")
    fresh, old = given & (d.lag == 0), given & (d.lag > 0)
    at_once, late = (float(distance[of].mean()) if of.any() else 0.0 for of in (fresh, old))
    if old.any() and at_once < AWAY * late:
        cause = f"KL {at_once:.2g} at a lag of 0, {late:.2g} at {int(d.lag[old].max())} and less"
        return seen.named("stale", cause)
    if _grows(kl) and fresh.any():
        return seen.named("weight-sync", "weights are called fresh, but the distance grows batch by batch")
    if _grows(kl):
        return seen.named("stale", "the distance begins at 0 and grows with training", "weight-sync")
    return seen.named("engine-mismatch", "they are far apart from the first batch on", "stale", *_untold(d))


def _untold(d: Looks) -> list[str]:
    """A temperature, where no entropies are known to tell it by."""
    return ["temperature"] * bool(d.entropy.isnan().all())


def surprisal(d: Looks) -> Finding:
    """Tokens were drawn from the policy: −log π is its entropy on average."""
    tested, which = "surprisal equals entropy", d.first & ~d.entropy.isnan()
    if not which.any():
        return untested(tested, "record entropy= and update=")
    seen = Finding.of(tested, d.by_batch(d.excess, which), int(which.sum()))
    mean, z = d.clustered(d.excess, which)
    if abs(z) < SURE or abs(mean) < ROUNDING:
        return seen
    if where := _strange(d):
        return seen.named("mask", where, "shift")
    if z < 0:
        cause = f"tokens are surer than the policy by {-mean:.3f} nats (z {z:.1f}): rare ones are missing"
        return seen.named("top-p", cause, "temperature")
    cause = f"tokens are rarer than the policy says by {mean:.3f} nats (z {z:.1f})"
    return seen.named("stale", cause, "weight-sync", "retokenised", "temperature")


def _strange(d: Looks) -> str:
    """Whether tokens that nobody sampled stand at one end of the sequences, and at which."""
    known = d.first & ~d.entropy.isnan()
    silent = (d.engine == 0) | (d.engine.isnan() & ~d.engine.isnan().all())
    start, end = known & (d.place < EDGE), known & (d.left < EDGE)
    for here, other, what in (start, end, "start: the prompt"), (end, start, "end: padding"):
        (mean, z), (elsewhere, _) = d.clustered(d.excess, here), d.clustered(d.excess, other)
        unsaid = float(silent[here].double().mean()) > 0.5
        if mean > (STRANGE if unsaid else IMPOSSIBLE) and z > SURE and elsewhere < AWAY * mean:
            where, _, who = what.partition(": ")
            return f"tokens at the {where} of sequences are {mean:.1f} nats rarer than they should be: {who} is counted"
    return ""


def signal(d: Looks) -> Finding:
    """Advantages tell sequences apart."""
    tested, known = "advantages carry signal (share that is 0)", ~d.advantage.isnan()
    if not known.any():
        return untested(tested)
    a, r = d.advantage[known], d.reward[~d.reward.isnan()]
    none = torch.stack([(a[d.batch[known] == b] == 0).double().mean() for b in d.batch[known].unique()])
    seen, largest = Finding.of(tested, none, len(a)), float(a.abs().max())
    if len(r) > 1 and bool((r == r[0]).all()):
        flat, cut = f"every reward is {float(r[0]):g}", float((d.truncated == 1).double().mean())
        if cut > MOST:
            return seen.named("truncated", f"{cut:.0%} of answers are cut off, and {flat}")
        return seen.named("reward-flat", f"{flat}, so nothing can be learned")
    if bool((none >= NO_SIGNAL).all()):
        cause = f"{float(none.mean()):.0%} of advantages are 0"
        return seen.named("no-signal", cause, *([] if len(r) else ["reward-flat"]))
    if largest > HUGE:
        cause = f"the largest advantage is {largest:.3g}; a normalised group gives √(its size) at most"
        return seen.named("advantage-scale", cause)
    return seen


def agreement(d: Looks) -> Finding:
    """Within a group the higher reward has the higher advantage, and equal answers have equal rewards."""
    tested, known = (
        "reward and advantage agree (rank correlation)",
        ~(d.advantage + d.reward + d.group).isnan(),
    )
    groups: defaultdict[tuple[float, float], list[int]] = defaultdict(list)
    for k in known.nonzero().flatten().tolist():
        groups[float(d.batch[k]), float(d.group[k])].append(k)
    counts, centres, orders = torch.zeros(4, 2), torch.zeros(2), []
    for rows in groups.values():
        r, a, words = d.reward[rows], d.advantage[rows], [d.words[k] for k in rows]
        i, j = torch.triu_indices(len(rows), len(rows), 1)
        tied, apart = r[i] == r[j], (a[i] - a[j]).abs() > 1e-3 * float(a.abs().max())
        alike = torch.tensor(
            [words[x] is not None and words[x] == words[y] for x, y in zip(i, j, strict=True)]
        ).bool()
        for sums, of, what in zip(counts, (tied, alike, ~alike), (apart, ~tied, ~tied), strict=False):
            sums += torch.stack([of.sum(), (of & what).sum()])
        order = ((r[i] - r[j]) * (a[i] - a[j]))[~tied & apart].sign()
        orders += [order.mean()] if len(order) else []
        centres += torch.stack([a.mean() ** 2, a.square().mean()])
    if not orders:
        return untested(tested, "record group= and reward=")
    seen = Finding.of(tested, torch.stack(orders), int(known.sum()))
    (tied, split), (alike, off), (others, differ), _ = counts.tolist()
    if float(torch.stack(orders).mean()) < 0:
        return seen.named("reward-sign", "better answers have lower advantages")
    if split > tied / 2 and centres[0] > UNCENTRED * centres[1]:
        cause = f"{split:.0f} of {tied:.0f} pairs of one prompt and reward differ in advantage"
        return seen.named("grouping", f"{cause}, and groups are not centred")
    if alike >= PAIRS and off * others > differ * alike / 2:
        cause = f"{off:.0f} of {alike:.0f} pairs of the same answer to one prompt have different rewards"
        return seen.named("reward-noise", cause)
    return seen


POLICIES = (ratio, engine, surprisal)
"""A failure of one makes the next fail too, so the first that fails is told alone."""


def tested_invariants(d: Looks) -> list[Finding]:
    """One finding for each invariant, in the order in which causes come before their effects."""
    found = [numbers(d)]
    for test in POLICIES:
        found.append(test(d))
        if found[-1].ok is False:
            break
    return [*found, signal(d), agreement(d)]
