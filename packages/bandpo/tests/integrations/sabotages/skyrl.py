"""Sabotages of the way in which SkyRL scales the advantages for its average."""

from functools import partial

from integrations.sabotages.table import Row

from helpers.frameworks import needs

needs("skyrl")

# Imported first for Python below 3.12, which SkyRL needs a change for.
import integrations.test_skyrl  # noqa: F401

from bandpo.integrations import skyrl
from bandpo.integrations.skyrl import (
    BandAlgorithmConfig,
    apply_loss_reduction_to_advantages_minibatch,
    probe_loss,
)


def halved(*arguments, **named):
    return apply_loss_reduction_to_advantages_minibatch(*arguments, **named) / 2


def of_all_columns(advantages, loss_mask, *arguments, **named):
    return apply_loss_reduction_to_advantages_minibatch(advantages, loss_mask * 0 + 1, *arguments, **named)


def clamped(advantages, *arguments, **named):
    return apply_loss_reduction_to_advantages_minibatch(advantages.clamp(-1, 1), *arguments, **named)


def certify(scale, reduction, folder, monkeypatch):
    """Certify the loss with another scale of the advantages."""
    monkeypatch.setattr(skyrl, "apply_loss_reduction_to_advantages_minibatch", scale)
    config = BandAlgorithmConfig(method="BandPO()")
    config.loss_reduction = reduction
    probe_loss(config)


ROWS = {}
for reduction in ("token_mean", "sequence_mean"):
    for scale, message in (
        (halved, "0.5 times as expected"),
        (of_all_columns, "times as expected|a factor of its own"),
        (clamped, "factor of its own|another loss"),
    ):
        sentence = f"loss_reduction={reduction}: its gradient differs.*({message})"
        ROWS[f"{scale.__name__}, {reduction}"] = Row(partial(certify, scale, reduction), sentence)
