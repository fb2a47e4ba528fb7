"""Sabotages of TRL's asynchronous trainer: other versions of its loss, and a subclass."""

from functools import partial

import torch
from integrations.sabotages.table import Row

from helpers.frameworks import needs

needs("trl", oldest="1.16.0")

from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl_async import make_async

from bandpo.integrations.trl import BandAsyncGRPOTrainer
from bandpo_lab.training.async_on_cpu import trl_on_a_cpu


def doubled(original):
    def compute_loss(self, *arguments, **named):
        return 2 * original(self, *arguments, **named)

    return compute_loss


def with_penalty(original):
    def compute_loss(self, model, inputs, *arguments, **named):
        kept = {}

        def called(**values):
            kept["outputs"] = model(**values)
            return kept["outputs"]

        loss = original(self, called, inputs, *arguments, **named)
        return loss + 0.1 * kept["outputs"].log_probs.mean()

    return compute_loss


def with_dual_clip(original):
    def compute_loss(self, model, inputs, *arguments, **named):
        loss = original(self, model, inputs, *arguments, **named)
        if self.epsilon_high == torch.inf:
            return loss
        return loss * 0.9

    return compute_loss


class Halved(BandAsyncGRPOTrainer):
    def compute_loss(self, *arguments, **named):
        return 0.5 * super().compute_loss(*arguments, **named)


def train(change, cls, folder, monkeypatch):
    """Train with a changed loss of TRL, which the first step does not reach."""
    with trl_on_a_cpu():
        trainer = make_async(folder, cls)
        if change is not None:
            monkeypatch.setattr(AsyncGRPOTrainer, "compute_loss", change(AsyncGRPOTrainer.compute_loss))
        trainer.train()


OF_TRL = [
    (doubled, r"the share of a token in the loss is 2 to 2 times that of the average"),
    (with_penalty, r"its gradient differs by"),
    (with_dual_clip, r"at epsilon=0.2 and epsilon_high=0.28 TRL's own loss is not that of FixedClip"),
]
ROWS = {change.__name__: Row(partial(train, change, BandAsyncGRPOTrainer), text) for change, text in OF_TRL}
ROWS["halved"] = Row(partial(train, None, Halved), r"the loss of Halved .* differs by 0.5")
