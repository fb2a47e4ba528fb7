"""The tests that every adapter must pass: subclass `Contract` and implement the calls of the loss."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from bandpo import ClipRule, parse, policy_loss
from bandpo.core.methods import METHODS
from bandpo.core.objectives import Surrogate
from bandpo.integrations._adapt import dual_clip_of, has_bias
from rlvet import diagnose
from rlvet.records.record import read_record


@dataclass
class Batch:
    """Ragged sequences in padded form, (batch, time); advantages are one per sequence."""

    logp: torch.Tensor
    logp_old: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor

    @property
    def lengths(self):
        return self.mask.sum(1).long().tolist()

    def rows(self, name):
        """Return the counted tokens of each sequence, for frameworks that pack instead of padding."""
        tensor = getattr(self, name)
        return [row[:n] for row, n in zip(tensor, self.lengths, strict=True)]


def make_batch(seed=0, shape=(6, 9), spread=0.6, dtype=torch.float32):
    """Tokens common and rare, ratios near and far, both signs of advantage, ragged lengths."""
    generator = torch.Generator().manual_seed(seed)
    old = -6 * torch.rand(shape, generator=generator) ** 2 - 1e-2
    new = (old + spread * torch.randn(shape, generator=generator)).clamp(max=-1e-3)
    lengths = torch.randint(2, shape[1], (shape[0], 1), generator=generator)
    lengths[0] = shape[1]
    advantages = torch.randn(shape[0], generator=generator)
    mask = (torch.arange(shape[1]) < lengths).float()
    return Batch(new.to(dtype).requires_grad_(), old.to(dtype), advantages.to(dtype), mask)


def written(batch, **more):
    """Return the expected record of a batch, for `bandpo.testing.check_record`.

    Args:
        batch: What `make_batch` gives.
        **more: What the framework's recorder writes besides.
    """
    return {
        "logp": batch.logp,
        "logp_old": batch.logp_old,
        "advantages": batch.advantages,
        "mask": batch.mask,
        **more,
    }


def dense_loss(batch, lower, upper, aggregation):
    """Compute PPO's loss by its definition: clamp, min, masked mean."""
    ratio, advantages = (batch.logp - batch.logp_old).exp(), batch.advantages[:, None]
    loss = -torch.minimum(ratio * advantages, ratio.clamp(lower, upper) * advantages).where(
        batch.mask > 0, 0.0
    )
    return {
        "sum": loss.sum(),
        "token-mean": loss.sum() / batch.mask.sum(),
        "seq-mean-token-mean": (loss.sum(1) / batch.mask.sum(1)).mean(),
    }[aggregation]


class Contract:
    """Override `ours`, `stock` and `sequence_level`; pytest collects the subclass.

    Attributes:
        aggregation: How the framework reduces.
        any_method: Whether the framework takes a loss of ours, or bounds alone.
        own_average: Whether a method then brings its own average.
        whole_batch: Whether the loss is given all of an update.
        takes_bias: Whether a part of the gradient may be free of the advantage.
        takes_dual_clip: Whether a framework that takes bounds alone has a dual clip, too.
    """

    aggregation = "token-mean"
    any_method = False
    own_average = False
    whole_batch = False
    takes_bias = True
    takes_dual_clip = False
    tolerance = {"rtol": 1e-5, "atol": 1e-6}  # noqa: RUF012

    def ours(self, batch, clip):
        """Compute the adapter's loss with the rule or method whose text is ``clip``."""
        raise NotImplementedError

    def stock(self, batch, low, high):
        """Compute the framework's own loss, clipped at ``1 − low`` and ``1 + high``."""
        raise NotImplementedError

    def sequence_level(self, batch):
        """Ask the adapter for sequence-level ratios; must raise ``ValueError``."""
        raise NotImplementedError

    def recorded(self, batch, folder):
        """Compute the loss with ``record`` set to the folder, if the adapter supports it."""
        return NotImplemented

    def compare(self, batch, actual, expected, value=True):
        if value:
            torch.testing.assert_close(actual, expected, check_dtype=False, **self.tolerance)
        gradients = [
            torch.autograd.grad(loss, batch.logp, retain_graph=True)[0] for loss in (actual, expected)
        ]
        torch.testing.assert_close(*gradients, **self.tolerance)
        return gradients[0]

    @pytest.mark.parametrize("clip", ["Band(KL(), 0.05)", "Band(TotalVariation(), 0.1, inf)"])
    def test_equals_a_dense_reference(self, clip):
        batch = make_batch()
        bounds = parse(clip, ClipRule).bounds(batch.logp_old)
        expected = dense_loss(batch, bounds.lower, bounds.upper, self.aggregation)
        gradient = self.compare(batch, self.ours(batch, clip), expected)
        assert 0.1 < (gradient == 0)[batch.mask > 0].float().mean() < 0.9

    @pytest.mark.parametrize("clip", ["Unclipped()", "FixedClip(1, inf)"])
    def test_wide_bounds_are_no_clip(self, clip):
        batch = make_batch(1)
        zero, inf = torch.zeros_like(batch.logp), torch.full_like(batch.logp, math.inf)
        gradient = self.compare(batch, self.ours(batch, clip), dense_loss(batch, zero, inf, self.aggregation))
        assert (gradient != 0)[batch.mask > 0].all()

    def test_constant_bounds_are_the_stock_clip(self):
        batch = make_batch(2)
        self.compare(batch, self.ours(batch, "FixedClip(0.2, 0.28)"), self.stock(batch, 0.2, 0.28))

    @pytest.mark.parametrize("junk", [math.nan, -math.inf, 3.0])
    def test_padding_may_hold_anything(self, junk):
        batch = make_batch(3)
        dirty = replace(batch, logp_old=batch.logp_old.masked_fill(batch.mask == 0, junk))
        expected = self.ours(batch, "Band(KL(), 0.05)")
        self.compare(batch, self.ours(dirty, "Band(KL(), 0.05)"), expected)

    def test_sequence_level_ratios_are_refused(self):
        with pytest.raises(ValueError, match=r"per token|per action|sequence|shape|rank"):
            self.sequence_level(make_batch(4))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    @pytest.mark.parametrize("name", METHODS)
    def test_a_method_is_the_cores_or_more_than_bounds(self, name, dtype):
        method = METHODS[name].method()
        batch = make_batch(18, spread=1.5, dtype=dtype)
        bounds_and_dual_clip = dual_clip_of(method) and method.objective.objective == Surrogate()
        if self.takes_dual_clip and bounds_and_dual_clip and not method.clip.depends_on_tokens:
            tensors = (batch.logp, batch.logp_old, batch.advantages, batch.mask)
            expected = policy_loss(*tensors, method=method, aggregation=self.aggregation).loss
            # Where a bound has to be solved for, the core reports the value of a clipped token without it.
            self.compare(batch, self.ours(batch, f"{name}()"), expected, value=False)
        elif not self.any_method:
            if (method.objective, method.level) != (Surrogate(), "token") or method.clip.depends_on_tokens:
                with pytest.raises(ValueError, match=r"but this framework's loss can only be given bounds"):
                    self.ours(batch, f"{name}()")
        elif (method.whole_batch and not self.whole_batch) or (has_bias(method) and not self.takes_bias):
            with pytest.raises(
                ValueError, match=r"needs all tokens of an update at once|has a term free of the advantage"
            ):
                self.ours(batch, f"{name}()")
        else:
            tensors = (x.double() for x in (batch.logp, batch.logp_old, batch.advantages, batch.mask))
            average = None if self.own_average else self.aggregation
            expected = policy_loss(*tensors, method=method, aggregation=average).loss
            self.compare(batch, self.ours(batch, f"{name}()"), expected)

    def test_a_method_that_is_bounds_is_its_bounds(self):
        if not self.any_method:
            named, rule = (self.ours(make_batch(18), text) for text in ("DAPO()", "FixedClip(0.2, 0.28)"))
            assert named == rule

    def test_a_record_by_one_setting_is_diagnosed(self, tmp_path):
        """Here of old log-probabilities that are shifted by a token."""
        pytest.importorskip("pyarrow")
        batch = make_batch(20, (24, 9))
        batch = replace(batch, logp_old=batch.logp.detach().roll(1, 1))
        if self.recorded(batch, str(tmp_path)) is NotImplemented:
            return
        losses = list(read_record(tmp_path))
        given = {"logp": batch.logp, "logp_old": batch.logp_old}
        given |= {"advantages": batch.advantages[:, None].expand_as(batch.mask)}
        for name, x in given.items():
            counted = np.concatenate([getattr(loss, name)[loss.mask] for loss in losses])
            torch.testing.assert_close(torch.from_numpy(counted), x[batch.mask > 0].detach())
        assert diagnose(tmp_path).findings[0].code == "shift"
