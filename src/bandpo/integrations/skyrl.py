"""Band, and every other method, as a policy loss of SkyRL: three arguments of its own command.

    python -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=bandpo.integrations.skyrl \
        trainer.algorithm.policy_loss_type=band trainer.algorithm.method='SAPO(1.0, 1.05)' ...

Without ``method`` it is ``Band(KL(), 0.05)``. SkyRL hands over to `main` here, which registers the loss and adds the
settings of `BandAlgorithmConfig` to SkyRL's. The registry reaches the workers through Ray; bandpo must be installed
where they run.

Anchor: the trainer's own log-probabilities at the start of the step; SkyRL makes that forward pass for any loss whose
name it does not know. The sampler's are the anchor of ``DPPO()`` and ``IcePop()``; for others they enter through
``off_policy_correction`` alone, as for SkyRL's own losses.

SkyRL 0.3.0 declares Python 3.12. Written for and tested with it up to the settings and the loss, not a training run.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import apply_off_policy_correction
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl.train.config.config import AlgorithmConfig, make_config

from bandpo.errors import InvalidValue
from bandpo.integrations._adapt import has_bias, numbers, read_method, record
from bandpo.loss import policy_loss
from bandpo.methods import Method

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


REDUCTIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}
"""SkyRL's names for the averages of methods."""
_logger = logging.getLogger("bandpo")


@dataclass
class BandAlgorithmConfig(AlgorithmConfig):
    """SkyRL's ``trainer.algorithm`` with a method in place of its ``eps_clip_*``.

    Attributes:
        method: A clip rule or a method in its text form, see `bandpo.parse`; ``Band(KL(), 0.05)`` by default. As in
            SkyRL's default loss there is no dual clip: write ``Method(Band(), DualClip(3))`` for one, which is SkyRL's
            ``dual_clip`` loss. A whole method brings its own average: it sets ``loss_reduction``, unless that is
            another than SkyRL's default, which then wins, as one line says. SkyRL gives a loss micro-batches and
            advantages that it has scaled for the average. So methods that need a whole update are refused, and those
            with a term free of the advantage.
        record: Folder, absolute, to which each worker writes the tokens of every loss, see `bandpo.Recorder`. The
            advantages there are SkyRL's scaled ones.

    Raises:
        ValueError: ``method`` cannot be read, when the settings are built.
    """

    policy_loss_type: str = "band"
    method: str | None = None
    record: str | None = None

    def __post_init__(self) -> None:
        parent = getattr(super(), "__post_init__", None)
        if parent is not None:
            parent()
        method = _method(self)
        if has_bias(method):
            raise InvalidValue(
                f"trainer.algorithm.method: {method!r} has a term free of the advantage, and SkyRL averages by scaling "
                "advantages; train with verl or TRL"
            )
        own = REDUCTIONS.get(method.aggregation or "")
        if own and self.loss_reduction == AlgorithmConfig.loss_reduction:
            self.loss_reduction = own
        elif method.aggregation and own != self.loss_reduction:
            _logger.warning(
                "trainer.algorithm.loss_reduction=%s averages in place of %r's own %s",
                *(self.loss_reduction, method, method.aggregation),
            )


def _method(settings: BandAlgorithmConfig) -> Method:
    return read_method("trainer.algorithm.", settings.method)


def band(
    log_probs: Float[Tensor, "batch time"],
    old_log_probs: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch time"],
    config: BandAlgorithmConfig,
    loss_mask: Float[Tensor, "batch time"] | None = None,
    rollout_logprobs: Float[Tensor, "batch time"] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """`bandpo.policy_loss` in the signature of SkyRL's policy losses, summed: SkyRL scales the advantages before.

    Returns:
        The loss, and metrics: SkyRL's ``clip_ratio``, those of ``off_policy_correction`` and of `bandpo.policy_loss`.

    Raises:
        ValueError: see `bandpo.policy_loss`; or the method refers to the sampler's log-probabilities, and
            there are none.
    """
    method = _method(config)
    counted = torch.ones_like(old_log_probs) if loss_mask is None else loss_mask
    weights, mask, corrections = apply_off_policy_correction(
        torch.ones_like(old_log_probs), old_log_probs, rollout_logprobs, counted, config.off_policy_correction
    )
    sampler = method.old_policy == "rollout"
    if sampler:
        if rollout_logprobs is None:
            raise InvalidValue(
                f"{method!r} refers to the sampler's log-probabilities: set generator.sampling_params.logprobs=1"
            )
        old_log_probs = rollout_logprobs
    tensors = (log_probs, old_log_probs, advantages)
    record(config.record, "skyrl", method, *tensors, counted, logp_rollout=rollout_logprobs, sampler=sampler)
    # SkyRL pads to one sequence a row; its advantages may change from token to token.
    loss, metrics = policy_loss(
        *tensors, mask, method=method, weights=weights, aggregation="sum", packed=False
    )
    scalars = numbers(metrics)
    return loss, scalars | corrections | {"clip_ratio": scalars["clip_high"] + scalars["clip_low"]}


def settings(arguments: list[str]) -> object:
    """SkyRL's settings from its command line, with those of `BandAlgorithmConfig`."""
    rest = [argument for argument in arguments if not argument.startswith("trainer.override_entrypoint=")]
    return make_config(algorithm_cls=BandAlgorithmConfig).from_cli_overrides(rest)


def main() -> None:
    """SkyRL's training entry point with the loss ``band``; see the module's docstring."""
    import ray
    from skyrl.train.entrypoints.main_base import skyrl_entrypoint
    from skyrl.train.utils import validate_cfg
    from skyrl.train.utils.utils import initialize_ray

    PolicyLossRegistry.register("band", band)
    config = settings(sys.argv[1:])
    validate_cfg(config)
    initialize_ray(config)
    ray.get(skyrl_entrypoint.remote(config))
