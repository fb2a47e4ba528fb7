"""Any method as a policy loss of SkyRL, by three arguments of SkyRL's command.

    python -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=bandpo.integrations.skyrl \
        trainer.algorithm.policy_loss_type=band trainer.algorithm.method='SAPO(1.0, 1.05)' ...

The default ``method`` is ``Band(KL(), 0.05)``. SkyRL calls `main` of this module, which registers the loss and adds the
settings of `BandAlgorithmConfig` to SkyRL's. Ray distributes the registry to the workers, and bandpo must be installed
where they run.

The old log-probabilities are the trainer's own at the start of the step. SkyRL computes them for every loss with a name
that is not one of its own losses. For ``DPPO()`` and ``IcePop()`` they are the sampler's. For other methods the
sampler's are only used by ``off_policy_correction``, as for SkyRL's own losses.

With ``trainer.fully_async.enabled=true``, `main` starts SkyRL's asynchronous trainer. SkyRL keeps no policy that
sampled, so the trainer's own log-probabilities would be those of newer weights. Therefore the ratio of every method
refers to the sampler's there.

Written for and tested with SkyRL 0.3.0, which needs Python 3.12. The tests cover settings and loss, but no training
run.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import apply_off_policy_correction
from skyrl.backends.skyrl_train.utils.ppo_utils import (
    PolicyLossRegistry,
    apply_loss_reduction_to_advantages_minibatch,
)
from skyrl.train.config.config import AlgorithmConfig, make_config

from bandpo.certificate.subject import Subject
from bandpo.certificate.tokens import trainer_batch
from bandpo.core.aggregation import aggregation_weights
from bandpo.core.batch import Batch
from bandpo.core.errors import InvalidValue, RunProblem
from bandpo.core.layout import Rows
from bandpo.core.loss import policy_loss
from bandpo.core.methods import Method
from bandpo.core.text import as_text
from bandpo.integrations._adapt import (
    as_floats,
    check_ratio_moves,
    describe_anchor,
    has_bias,
    read_method,
    record,
)
from bandpo.integrations._settings import check_settings

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


REDUCTIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}
"""SkyRL's ``loss_reduction`` for the loss aggregations of methods."""
_logger = logging.getLogger("bandpo")


@dataclass
class BandAlgorithmConfig(AlgorithmConfig):
    """SkyRL's ``trainer.algorithm`` with a method in place of its ``eps_clip_*``.

    Attributes:
        method: The text of a clip rule or a method, see `bandpo.parse`; ``Band(KL(), 0.05)`` by default. As in SkyRL's
            default loss there is no dual clip. ``Method(Band(), DualClip(3))`` has one, as SkyRL's loss ``dual_clip``
            does. A whole method sets ``loss_reduction`` to its own loss aggregation; a ``loss_reduction`` other than
            SkyRL's default is kept, with a warning in the log. SkyRL passes micro-batches to its loss, and scales the
            advantages for the aggregation before. Therefore methods that need all tokens of an update are refused, and
            so are methods with a term that does not contain the advantage.
        record: Absolute path of a folder to which each worker writes the tokens of every loss, see
            `bandpo.audit.Recorder`. It has SkyRL's scaled advantages, and no version of the weights that sampled a
            token, as SkyRL does not pass it to its loss.
        accept_idle_clip: True to accept one update for each batch, with which every ratio is 1 and no clip acts, as the
            baseline of a sweep.

    Raises:
        ValueError: at construction, if ``method`` cannot be read, or if a setting beside it would have no effect or
            change the loss.
    """

    policy_loss_type: str = "band"
    method: str | None = None
    record: str | None = None
    accept_idle_clip: bool = False

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
        if method.old_policy == "rollout":
            self.refuse_corrections()
        self._set_loss_reduction(method)

    def refuse_corrections(self) -> None:
        """Refuse importance weights for the distance of sampler and trainer beside a ratio that refers to the sampler.

        Raises:
            ValueError: such a setting is set.
        """
        # SkyRL later converts the older setting use_tis to the newer one.
        corrections = {
            "use_tis": self.use_tis or None,
            "off_policy_correction.tis_ratio_type": self.off_policy_correction.tis_ratio_type,
        }
        for name, value in corrections.items():
            if value is not None:
                raise InvalidValue(
                    f"trainer.algorithm.{name}={value}: the ratio of {_method(self)!r} refers to the sampler already, "
                    "and would be corrected for it twice; leave it out"
                )

    def _refuse_unused(self) -> None:
        """Check that settings of the loss ``band`` are not set beside one of SkyRL's own losses."""
        for name in ("method", "record", "accept_idle_clip"):
            value = getattr(self, name)
            if value not in (None, False):
                raise InvalidValue(
                    f"trainer.algorithm.{name}={value}: trainer.algorithm.policy_loss_type={self.policy_loss_type} is "
                    "SkyRL's own loss, beside which it would have no effect; use "
                    "trainer.algorithm.policy_loss_type=band"
                )

    def _set_loss_reduction(self, method: Method) -> None:
        """Set ``loss_reduction`` to the loss aggregation of a whole method, unless the user has set another one."""
        reduction = REDUCTIONS.get(method.aggregation or "")
        if reduction and self.loss_reduction == AlgorithmConfig.loss_reduction:
            self.loss_reduction = reduction
        elif method.aggregation and reduction != self.loss_reduction:
            _logger.warning(
                "trainer.algorithm.loss_reduction=%s replaces the loss aggregation of %r, %s",
                self.loss_reduction,
                method,
                method.aggregation,
            )


def _method(settings: BandAlgorithmConfig) -> Method:
    """Return the method of SkyRL's settings."""
    return read_method("trainer.algorithm.", settings.method)


def band(
    log_probs: Float[Tensor, "batch time"],
    old_log_probs: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch time"],
    config: BandAlgorithmConfig,
    loss_mask: Float[Tensor, "batch time"] | None = None,
    rollout_logprobs: Float[Tensor, "batch time"] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """`bandpo.policy_loss` in the signature of SkyRL's policy losses.

    The loss is summed over tokens, since SkyRL has already scaled the advantages for its ``loss_reduction``.

    Args:
        log_probs: The current log-probabilities (nats).
        old_log_probs: The trainer's log-probabilities (nats) at the start of the step.
        advantages: SkyRL's scaled advantages.
        config: SkyRL's settings ``trainer.algorithm``.
        loss_mask: 1 for tokens that count; all of them if not given.
        rollout_logprobs: The sampler's log-probabilities (nats).

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
    old_is_rollout = method.old_policy == "rollout"
    if old_is_rollout:
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
        old_is_rollout=old_is_rollout,
        sampling={"temperature": getattr(config, "temperature", None)},
    )
    # SkyRL pads to one sequence per row. Its advantages may vary within a row, so the layout states it.
    loss, metrics = policy_loss(
        *tensors, mask, method=method, weights=weights, aggregation="sum", layout=Rows()
    )
    scalars = as_floats(metrics)
    return loss, scalars | corrections | {"clip_ratio": scalars["clip_high"] + scalars["clip_low"]}


def settings(arguments: list[str]) -> object:
    """Return SkyRL's settings from its command line, with those of `BandAlgorithmConfig`.

    Raises:
        ValueError: as for `BandAlgorithmConfig`; there is one update for each batch, so that no clip can act; or in an
            asynchronous run the sampler's log-probabilities are missing, or not those of the whole vocabulary.
    """
    overrides = [
        argument for argument in arguments if not argument.startswith("trainer.override_entrypoint=")
    ]
    config = make_config(algorithm_cls=BandAlgorithmConfig).from_cli_overrides(overrides)
    if config.trainer.fully_async.enabled and config.trainer.algorithm.policy_loss_type == "band":
        _refer_to_sampler(config)
    check_run(config)
    return config


NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
"""SkyRL's sampling settings that change the probabilities of tokens, each with its neutral value."""


def _refer_to_sampler(config: Any) -> None:
    """Let the ratio of an asynchronous run refer to the sampler's log-probabilities, which are the only old ones.

    Raises:
        ValueError: the sampler returns none, or those of a part of the vocabulary; or the run would also be corrected
            for the distance of sampler and trainer, which is in the ratio then.
    """
    algorithm = config.trainer.algorithm
    algorithm.method = as_text(replace(_method(algorithm), old_policy="rollout"))
    algorithm.refuse_corrections()
    sampling = config.generator.sampling_params
    if sampling.logprobs is None:
        raise InvalidValue(
            "generator.sampling_params.logprobs=None: the ratio of an asynchronous run refers to the sampler's "
            "log-probabilities; set it to 1"
        )
    for name, neutral in NEUTRAL.items():
        value = getattr(sampling, name)
        if value != neutral:
            raise InvalidValue(
                f"generator.sampling_params.{name}={value}: the ratio of an asynchronous run refers to the sampler's "
                f"log-probabilities, and these would be of a part of the vocabulary; leave it at {neutral}"
            )


def check_run(config: Any) -> list[str]:
    """Check the settings of a run beside its method, and return lines about its ratio.

    Args:
        config: SkyRL's settings.

    Raises:
        ValueError: see `settings`.
    """
    trainer = config.trainer
    algorithm = trainer.algorithm
    if algorithm.policy_loss_type != "band":
        return []
    method = _method(algorithm)
    mini_batches = math.ceil(trainer.train_batch_size / trainer.policy_mini_batch_size)
    line = check_ratio_moves(
        method,
        mini_batches * trainer.update_epochs_per_batch,
        "trainer.policy_mini_batch_size",
        "make it smaller than trainer.train_batch_size, or set trainer.update_epochs_per_batch=2",
        accepted=algorithm.accept_idle_clip,
        accept="trainer.algorithm.accept_idle_clip=true",
    )
    is_asynchronous = trainer.fully_async.enabled
    anchor = describe_anchor(
        method.old_policy == "rollout",
        "trainer.fully_async.enabled=true" if is_asynchronous else f"trainer.algorithm.method={method!r}",
        asynchronous=is_asynchronous,
    )
    return [f"anchor      {anchor}", *([f"clip        {line}"] if line else [])]


def probe_loss(algorithm: BandAlgorithmConfig) -> str:
    """Check that the loss has the gradient of its method on advantages that SkyRL scales; return a line about it.

    SkyRL makes the average by scaling the advantages, before it calls the loss for each micro-batch.

    Args:
        algorithm: SkyRL's settings ``trainer.algorithm``.

    Raises:
        RuntimeError: it has another gradient. The message names what is different.
    """
    aggregations = {reduction: name for name, reduction in REDUCTIONS.items()}
    average = aggregations.get(algorithm.loss_reduction)
    if average is None:
        return f"the loss was not compared, as bandpo has no average {algorithm.loss_reduction}"
    return SkyRLSubject(algorithm, average).certify()


class SkyRLSubject(Subject):
    """The loss of a run of SkyRL, on advantages that SkyRL scales.

    Args:
        algorithm: SkyRL's settings ``trainer.algorithm``.
        average: The loss aggregation for its ``loss_reduction``.
    """

    loss = "the loss"
    measure = "a loss of the policy alone"
    unseen = (
        "the KL term, the entropy bonus, advantages and old log-probabilities before the loss, the forward pass, the "
        "backward pass"
    )

    def __init__(self, algorithm: BandAlgorithmConfig, average: str) -> None:
        self.algorithm = copy.copy(algorithm)
        self.algorithm.record = None
        self.average = average
        self.method = _method(algorithm)
        self.tokens = trainer_batch(torch.device("cpu"))

    def batch(self) -> Batch:
        tokens = self.tokens
        return Batch.read(tokens.logp, tokens.logp_old, tokens.advantages, tokens.used, layout=Rows())

    def gradient(self, advantages: float | None = None) -> Tensor:
        tokens = self.tokens
        rows, columns = tokens.logp.shape
        scaled = apply_loss_reduction_to_advantages_minibatch(
            tokens.advantages if advantages is None else torch.full_like(tokens.advantages, advantages),
            tokens.used,
            self.algorithm.loss_reduction,
            micro_batch_size=rows,
            max_seq_len=columns,
        )
        logp = tokens.logp.clone().requires_grad_()
        # With equal log-probabilities of trainer and sampler all weights of off_policy_correction are 1.
        old = tokens.logp_old
        loss, _ = band(logp, old, scaled, self.algorithm, tokens.used, rollout_logprobs=old)
        (gradient,) = torch.autograd.grad(loss, logp)
        return torch.stack([gradient, torch.zeros_like(gradient)])

    def share(self) -> Tensor:
        used = self.tokens.used
        rows, columns = used.shape
        if self.average == "seq-mean-token-sum-norm":
            return used / (rows * columns)
        # SkyRL counts all sequences, also those without a token.
        normalizer = rows if self.average == "seq-mean-token-mean" else None
        return aggregation_weights(self.batch().sequences, self.average, normalizer, dtype=used.dtype)

    def parts(self) -> list[str]:
        return [f"the average {self.algorithm.loss_reduction}"]

    def problem(self, text: str) -> RunProblem:
        reduction = self.algorithm.loss_reduction
        return RunProblem(
            f"the loss is not that of {self.method!r} with trainer.algorithm.loss_reduction={reduction}: {text}"
        )


def main() -> None:
    """Run SkyRL's training entry point with the loss ``band``; see the module's docstring."""
    import ray
    from skyrl.train.entrypoints.main_base import skyrl_entrypoint
    from skyrl.train.utils import validate_cfg
    from skyrl.train.utils.utils import initialize_ray

    PolicyLossRegistry.register("band", band)
    config = settings(sys.argv[1:])
    if config.trainer.algorithm.policy_loss_type == "band":
        lines = [*check_run(config), probe_loss(config.trainer.algorithm)]
        print(*[f"bandpo: {line}" for line in lines], sep="\n", flush=True)
    validate_cfg(config)
    initialize_ray(config)
    if config.trainer.fully_async.enabled:
        ray.get(ray.remote(num_cpus=1)(train_fully_async).remote(config))
    else:
        ray.get(skyrl_entrypoint.remote(config))


def train_fully_async(config: Any) -> None:
    """Run SkyRL's asynchronous trainer, as its example ``main_fully_async`` does.

    Args:
        config: SkyRL's settings, from `settings`.
    """
    from skyrl.train.entrypoints.main_base import BasePPOExp
    from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer

    class Experiment(BasePPOExp):
        """SkyRL's experiment with the asynchronous trainer."""

        def get_trainer(self, *arguments: Any, **kwargs: Any) -> Any:
            return FullyAsyncRayPPOTrainer(*arguments, **kwargs)

    Experiment(config).run()
