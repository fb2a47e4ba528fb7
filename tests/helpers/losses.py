"""A loss of tensors and settings as tests name them: those of a batch and those of the loss together."""

from bandpo import Batch
from bandpo.core.text import as_method


def batch_loss(*tensors, method=None, aggregation=None, normalizer=None, metrics=True, **settings):
    """Return the loss of ``Batch.read(*tensors, **settings)``."""
    batch = Batch.read(*tensors, **settings)
    return as_method(method).loss(batch, aggregation=aggregation, normalizer=normalizer, metrics=metrics)
