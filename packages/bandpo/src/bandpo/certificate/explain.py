"""The likely cause of a difference between the gradient of a loss and that of a method."""

from __future__ import annotations

from dataclasses import replace

import torch

from bandpo.certificate.gradient import TOLERANCE, PolicyTerm
from bandpo.core.methods import Method
from bandpo.core.objectives import DualClip
from bandpo.core.rules import FixedClip, Unclipped

NOT_FINITE = "it is not finite"
NOT_REACHED = "no gradient reached the log-probabilities"


def likely_cause(term: PolicyTerm) -> str:
    """Return the likely cause of a difference: what the gradient is instead, or which part of it differs."""
    gradient = term.gradient.double()
    expected = term.expected
    nonzero = term.counted & (expected != 0)
    if not gradient.isfinite().all():
        return NOT_FINITE
    if not (gradient[nonzero] != 0).any():
        return NOT_REACHED
    if (gradient[term.batch.mask == 0] != 0).any():
        return "tokens that do not count have a gradient: another mask"

    # A constant factor, another method, or a factor for each sequence.
    quotient = torch.where(nonzero, gradient / expected, torch.nan)
    factor = quotient.nanmedian()
    if term.is_equal_to(factor * expected):
        return f"every token is {factor:.4g} times as expected: another average, or a factor on the loss"
    for suspect in _suspects(term):
        if term.is_equal_to(term.of(suspect)):
            return f"it is that of {suspect!r}: another plug-in, or a setting of the trainer's own"
    sequences = term.batch.sequences
    rows = sequences.to_rows(quotient, fill=torch.nan)
    medians = rows.nanmedian(-1, keepdim=True).values.nan_to_num(nan=1.0)
    if term.is_equal_to(sequences.from_rows(medians) * expected):
        return "each sequence has a factor of its own: another average, or other advantages"

    # A constant term, or tokens that are blocked in one of the two only.
    offset = (gradient - expected)[term.counted]
    if (offset - offset.median()).abs().max() <= TOLERANCE * offset.abs().max():
        return f"{offset.median():.3g} is added to every token: a term that does not depend on the advantage"
    extra = term.counted & (expected == 0) & (gradient != 0)
    missing = nonzero & (gradient == 0)
    if extra.any() or missing.any():
        return (
            f"{int(extra.sum())} tokens that the method blocks have a gradient, {int(missing.sum())} that it keeps "
            "have none: another clip or mask, or a clamp of the ratio"
        )
    return "another loss, or another term in it"


def _suspects(term: PolicyTerm) -> list[Method]:
    """Return the methods that most often replace the expected one: a fixed clip, no clip, an additional dual clip."""
    method = term.method
    clips = (FixedClip(0.2), FixedClip(0.2, 0.28), Unclipped())
    suspects = [Method(clip, level=method.level) for clip in clips]
    # A method of a whole update would wait for other processes, whose gradients may be equal to the expected ones.
    if term.batch.state.processes is None or not method.whole_batch:
        suspects.append(replace(method, objective=DualClip(3.0, method.objective)))
    return suspects
