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
from bandpo.integrations._adapt import as_floats, has_bias, read_method, record
from bandpo.integrations._settings import check_settings
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
            advantages there are SkyRL's scaled ones, and SkyRL does not tell its loss with which weights a token was
            sampled.

    Raises:
        ValueError: when the settings are built, if ``method`` cannot be read, or a setting beside it would have no
            effect or make the loss another one.
    """

    policy_loss_type: str = "band"
    method: str | None = None
    record: str | None = None

    def __post_init__(self) -> None:
        parent = getattr(super(), "__post_init__", None)
        if parent is not None:
            parent()
        if self.policy_loss_type != "band":
            self._refuse_unused()
            return
        method = _method(self)
        check_settings("SkyRL", self, method)
        if has_bias(method):
            raise InvalidValue(
                f"trainer.algorithm.method: {method!r} has a term free of the advantage, and SkyRL averages by scaling "
                "advantages; train with verl or TRL"
            )
        # SkyRL turns the older use_tis into the newer setting later.
        corrections = {
            "use_tis": self.use_tis or None,
            "off_policy_correction.tis_ratio_type": self.off_policy_correction.tis_ratio_type,
        }
        for name, value in corrections.items():
            if method.old_policy == "rollout" and value is not None:
                raise InvalidValue(
                    f"trainer.algorithm.{name}={value}: the ratio of {method!r} refers to the sampler already, and "
                    "would be corrected for it twice; leave it out"
                )
        self._settle_average(method)

    def _refuse_unused(self) -> None:
        """Refuse the settings that only the loss ``band`` reads, beside one of SkyRL's own losses."""
        for name in ("method", "record"):
            value = getattr(self, name)
            if value is not None:
                raise InvalidValue(
                    f"trainer.algorithm.{name}={value}: trainer.algorithm.policy_loss_type={self.policy_loss_type} is "
                    "SkyRL's own loss, beside which it would have no effect; use "
                    "trainer.algorithm.policy_loss_type=band"
                )

    def _settle_average(self, method: Method) -> None:
        """Set ``loss_reduction`` to the average of a whole method, unless the user has set another one."""
        reduction = REDUCTIONS.get(method.aggregation or "")
        if reduction and self.loss_reduction == AlgorithmConfig.loss_reduction:
            self.loss_reduction = reduction
        elif method.aggregation and reduction != self.loss_reduction:
            _logger.warning(
                "trainer.algorithm.loss_reduction=%s averages in place of %r's own %s",
                self.loss_reduction,
                method,
                method.aggregation,
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
    record(
        config.record,
        "skyrl",
        method,
        *tensors,
        counted,
        logp_rollout=rollout_logprobs,
        old_is_rollout=sampler,
        sampling={"temperature": getattr(config, "temperature", None)},
    )
    # SkyRL pads to one sequence a row; its advantages may change from token to token.
    loss, metrics = policy_loss(
        *tensors, mask, method=method, weights=weights, aggregation="sum", packed=False
    )
    scalars = as_floats(metrics)
    return loss, scalars | corrections | {"clip_ratio": scalars["clip_high"] + scalars["clip_low"]}


def settings(arguments: list[str]) -> object:
    """Return SkyRL's settings from its command line, with those of `BandAlgorithmConfig`.

    Raises:
        ValueError: as for `BandAlgorithmConfig`; or SkyRL's asynchronous trainer would train with a method that refers
            to the trainer's log-probabilities.
    """
    rest = [argument for argument in arguments if not argument.startswith("trainer.override_entrypoint=")]
    config = make_config(algorithm_cls=BandAlgorithmConfig).from_cli_overrides(rest)
    algorithm = config.trainer.algorithm
    if config.trainer.fully_async.enabled and algorithm.policy_loss_type == "band":
        method = _method(algorithm)
        if method.old_policy != "rollout":
            raise InvalidValue(
                f"trainer.fully_async.enabled=True: {method!r} refers to the trainer's log-probabilities, and SkyRL "
                "keeps none of the policies that sampled; use DPPO() or IcePop(), which refer to the sampler's"
            )
    return config


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
