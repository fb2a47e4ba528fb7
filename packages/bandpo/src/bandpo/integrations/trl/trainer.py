"""Train any method with TRL's GRPOTrainer, and audit any GRPOTrainer.

A method that TRL implements itself (a fixed clip, GSPO, CISPO, SAPO, VESPO) becomes TRL's own settings, see
`BandGRPOConfig`, and trains bit for bit as the stock trainer does. Every other method becomes the advantages of TRL's
loss:

- **What TRL computes.** The loss of a token is ``-min(r·A, clip(r)·A)`` with the ratio ``r = π/π_old``, and for
  ``loss_type="cispo"`` it is ``-min(r, bound)·A·logp``, in which the minimum has no gradient. Within the bounds the
  gradient of both is ``-r·A·∇logp``. A comment in TRL allows subclasses one advantage per token.
- **What bandpo changes.** The gradient of a method is ``-(w·A + b)·∇logp``, with a weight ``w`` and a bias ``b`` per
  token. So TRL gets the advantages ``(w·A + b)/r``, and bounds that no ratio reaches. For a clip rule this is ``A``,
  and 0 for a blocked token.
- **The level** ``sequence``. All tokens of a sequence have one ratio, the exponential of the mean of their log-ratios.
  With ``cispo`` the gradient above still holds for each token. With every other ``loss_type`` it does not: TRL sums
  ``-(w·A + b)`` over the sequence, and the gradient of each of its tokens is an equal part of this sum.
- **What else TRL's loss reads from bandpo.** ``old_per_token_logps`` are the rollout's, if the method's ratio refers to
  these, and the current ones in the padding and where a log-ratio is beyond ±60, so that TRL's ratio there is 1. With
  ``off_policy_mask_threshold``, the mask is computed from the true advantages by TRL's function and multiplied to the
  new ones, and ``sampling_per_token_logps`` are set so that the mask in TRL's loss keeps every token. If the objective
  contains the importance weights, ``importance_sampling_ratio`` is 1. All else is TRL's: the mask of high entropies,
  other importance weights, the KL term, the entropy bonus, the auxiliary loss and the loss aggregation.
- **Where.** TRL's ``_compute_loss`` asks ``_get_per_token_logps_and_entropies`` for the log-probabilities, and reads
  the advantages after this has returned. `AuditMixin` overrides both, and the second calls
  `BandGRPOTrainer._prepare_loss`, which changes the loss's copy of the batch. The copy has no advantages until then. So
  a TRL that reads them earlier, or reads another copy, cannot train without the method: its loss ends with an error.
- **What else is overridden.** ``train`` starts the probe. ``_generate_and_score_completions`` updates schedules, and
  adds groups, rewards and truncation to the batch; ``_calculate_rewards`` keeps the rewards for it.
  ``training_step`` checks that no callback changed the clip, and updates controllers. ``log`` adds metrics,
  ``_save_checkpoint`` first writes the record, and ``create_model_card`` names the method.
- **What is restored.** After the loss, ``epsilon_low``, ``epsilon_high`` and ``args.delta`` are restored, also after an
  exception. TRL's batch is never changed. Beside a method whose ratio refers to the rollout,
  ``vllm_importance_sampling_correction`` is off from construction on, which a line says. TRL's clip metrics, which
  count nothing without bounds, get the values of the method: a token with a weight of 0 counts as clipped. What a loss
  that ends with an exception leaves behind is in the docstring of `AuditMixin`.
- **If TRL changes.** At construction, `bandpo.integrations.trl.trl_names` checks that all names of TRL that bandpo
  overrides or reads exist. Before training, `bandpo.integrations.trl.probe` compares the gradient of the loss with the
  method's on a small synthetic batch. Either stops the run with one sentence that names TRL's version and what is
  missing or different. What TRL does outside of the loss with names that still exist is not tested.

The reported loss is TRL's: its KL term, entropy bonus and auxiliary loss, and the aggregated ``-(w·A + b)``, or
``-(w·A + b)·logp`` with ``cispo``. Blocked tokens are missing from it. The metric ``objective`` is the mean of the
method's objective over the counted tokens, blocked ones included.

TRL's log-probabilities are at sampling temperature and over the full vocabulary, as bounds need them.

Schedules and controllers of `bandpo.core.schedules` are updated whenever a batch is generated. Their values are
constant for all updates on that batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import trl

from bandpo.core.batch import Batch, Tokens
from bandpo.core.errors import InvalidType, InvalidValue, RunProblem
from bandpo.core.schedules import TrainingState
from bandpo.core.sequences import Sequences
from bandpo.integrations.trl.announcements import sampling_lines
from bandpo.integrations.trl.audit import GROUP, AuditedGRPOTrainer, AuditMixin
from bandpo.integrations.trl.config import BandGRPOConfig
from bandpo.integrations.trl.method_trainer import ClippedTokens, MethodTrainer
from bandpo.integrations.trl.probe import high_entropy_mask, without_clip
from bandpo.integrations.trl.trl_names import FORWARD, GRPO

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AuditMixin", "AuditedGRPOTrainer", "BandGRPOConfig", "BandGRPOTrainer"]

FAR = 60.0
"""Log-ratio (nats) beyond which TRL's loss is given the ratio 1.

In float32 a ratio overflows beyond a log-ratio of 88, and a division by a ratio may overflow below one of -88. The
gradient of such a token is still the method's, as ``(w·A + b)/1`` is multiplied by a ratio of 1.
"""


class BandGRPOTrainer(MethodTrainer, AuditMixin):
    """A `GRPOTrainer` with the method of ``args`` and the audit of `AuditMixin`.

    It logs the mean radius of the tokens since the last log as ``radius``, and ``radius_min`` and ``radius_max`` if it
    differs among tokens. A band within another rule is logged as ``radius/PATH``, such as ``radius/upper``. On CUDA it
    logs the peak memory since the last log in GiB as ``peak_memory``.

    Before training it compares the gradient of its loss with the method's, see `bandpo.integrations.trl.probe` and
    ``certify`` of `BandGRPOConfig`. The loss of a subclass that ends with an error on the probe's batch is not
    compared, whatever ``certify`` is, and a line on stderr says so.

    Raises:
        TypeError: ``args`` is no `BandGRPOConfig`.
        RuntimeError: at construction: the installed TRL lacks a name of `bandpo.integrations.trl.trl_names`. Before
            training: the gradient of the loss is not the method's. In the loss: TRL reads the advantages too early, has
            other names for its clip metrics or the old log-probabilities, or a ratio is too far from 1 for its KL term.
        ValueError: the bounds or the method's ratio (DPPO, IcePop) need the rollout's log-probabilities, and there are
            none.
    """

    args: BandGRPOConfig
    _trl_names = GRPO

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: BandGRPOConfig | None = None,
        *arguments: Any,
        **kwargs: Any,
    ):
        args = BandGRPOConfig() if args is None else args
        if not isinstance(args, BandGRPOConfig):
            raise InvalidType(f"args must be a BandGRPOConfig, got {type(args).__name__}")
        self._read_settings(args)
        self.is_native = args.native_settings is not None
        needs_rollout_logps = "rollout" in (args.anchor, self.method.old_policy)
        # Again, since settings may have changed after the config was made.
        idle_clip = args.check_ratio_moves()
        super().__init__(model, reward_funcs, args, *arguments, **kwargs)

        if idle_clip:
            self._announce(idle_clip)
        if needs_rollout_logps and not self.use_vllm and self.rollout_func is None:
            trainer_method = replace(self.method, old_policy="trainer")
            if trainer_method == self.method:
                remedy = "leave anchor out"
            else:
                remedy = f"write method={str(trainer_method)!r}"
            raise InvalidValue(
                f"{self._rollout_setting} needs use_vllm, or a rollout_func that returns log-probabilities: else the "
                f"trainer's are the only ones, and to use these {remedy}"
            )
        if self.method.old_policy == "rollout" and self.use_vllm and self.vllm_importance_sampling_correction:
            self.vllm_importance_sampling_correction = False
            self._announce(
                f"vllm_importance_sampling_correction is off: {self._rollout_setting} has vLLM's log-probabilities in "
                "its ratio already"
            )
        if args.overrides_aggregation:
            self._announce(
                f"loss_type={args.loss_type!r} replaces the loss aggregation of {args.method} by another one"
            )
        rollout_setting = self._rollout_setting if needs_rollout_logps else ""
        for line in sampling_lines(args, rollout_setting, self.use_vllm):
            self._announce(line)
        self._settings_at_start = self._clip_settings()

    # The loss: TRL's, of the method's advantages.

    @property
    def _withholds_advantages(self) -> bool:
        # Without the method's advantages, TRL's loss would train without any clip.
        return not self.is_native

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if self.is_native:
            return super()._compute_loss(model, inputs)
        try:
            with self._own_clip_metrics(), without_clip(self):
                return super()._compute_loss(model, inputs)
        except KeyError as error:
            if error.args != ("advantages",):
                raise
            raise RunProblem(
                f"the loss of trl {trl.__version__}, or of a class between BandGRPOTrainer and GRPOTrainer, reads the "
                f"advantages before {FORWARD} returns, or from a copy of its inputs, so {self.args.method} would have "
                "no effect; let it read the advantages of its inputs after that"
            ) from error

    def _prepare_loss(
        self, batch: dict[str, Any], inputs: dict[str, Any], logp: Tensor, entropy: Tensor | None
    ) -> None:
        """Audit a loss, and give it the advantages of the method, see the module docstring.

        The arguments are those of `AuditMixin._prepare_loss`. If the method is not TRL's own, ``inputs`` has no
        advantages before this call.
        """
        read = self._batch_of(batch, logp, entropy)
        tokens = self.method.tokens(read)
        if self.training and not self._probing:
            self._measure(read, tokens, entropy)
        if self.is_native:
            return
        # TRL leaves them out where the ratio cannot move. Without them every ratio is 1, and no clip acts.
        needs_old = self.training and not self._probing and self.args.ratio_moves
        if needs_old and batch.get("old_per_token_logps") is None:
            raise GRPO.missing("entry 'old_per_token_logps' in its batches", "has the old log-probabilities")
        if self.method.old_policy == "rollout":
            inputs["old_per_token_logps"] = read.logp_old
        # TRL's loss is per sequence, (sequences, 1), if both the ratios and the given advantages are.
        of_sequences = self.method.level == "sequence" and batch["advantages"].dim() == 1
        self._replace_advantages(inputs, read, tokens, logp.detach(), of_sequences)

    def _replace_advantages(
        self, inputs: dict[str, Any], batch: Batch, tokens: Tokens, logp: Tensor, of_sequences: bool
    ) -> None:
        """Set the advantages in ``inputs`` to ``(w·A + b)/r``, see the module docstring.

        Args:
            inputs: The copy of the batch that TRL's loss reads.
            batch: The tokens of the loss.
            tokens: The same, as the method sees them.
            logp: The log-probabilities of the loss, (sequences, tokens), detached.
            of_sequences: True if ratios and given advantages are per sequence.

        Raises:
            RuntimeError: a ratio is so far from 1 that TRL's KL term cannot be multiplied by it.
        """
        objective = self.method.objective.resolve(batch.state)
        weight = objective.weight(tokens)
        bias = objective.bias(tokens)

        # Where a ratio would overflow, and in the padding, the ratio in TRL's loss is 1.
        ratio = tokens.ratio
        if inputs.get("old_per_token_logps") is not None:
            is_far = (tokens.log_ratio.abs() > FAR) & (batch.mask > 0)
            if self.beta and self.args.use_bias_correction_kl and is_far.any():
                raise RunProblem(
                    f"{int(is_far.sum())} tokens have a log-ratio beyond ±{FAR:g}, up to "
                    f"{tokens.log_ratio.abs().masked_fill(~is_far, 0.0).max():.4g}, and use_bias_correction_kl=True "
                    "multiplies TRL's KL term by the ratio, which overflows; set use_bias_correction_kl=False, or a "
                    "smaller learning_rate"
                )
            has_ratio_one = is_far | (batch.mask == 0)
            inputs["old_per_token_logps"] = torch.where(has_ratio_one, logp, inputs["old_per_token_logps"])
            ratio = ratio.masked_fill(has_ratio_one, 1.0)
        advantages = weight / ratio * batch.advantages  # exactly A if w = r
        if bias is not None:
            advantages = advantages + bias * batch.mask / ratio

        if self.off_policy_mask_threshold is not None:
            # TRL's mask depends on the sign of the advantages, so it is computed from the true ones.
            advantages = advantages * self.get_off_policy_mask(
                advantages=batch.advantages,
                per_token_logps=logp,
                sampling_per_token_logps=inputs.get("sampling_per_token_logps", batch.logp_old),
                mask=batch.mask,
                off_policy_threshold=self.off_policy_mask_threshold,
            )
            # TRL's loss masks by the new advantages again. It keeps a sequence if the mean of sampler minus logp is not
            # above the threshold: here it is 0, and twice the threshold if that is negative.
            inputs["sampling_per_token_logps"] = logp + min(0.0, 2 * self.off_policy_mask_threshold)
        if objective.weights_inside and batch.weights is not None:
            # The objective contains the importance weights, so TRL must not multiply by them again.
            inputs["importance_sampling_ratio"] = torch.ones_like(inputs["importance_sampling_ratio"])

        self._clips = self._clipped_tokens(tokens, weight, of_sequences)
        if of_sequences:
            # A loss per token has the same gradient, but sums it over tokens in another order, which rounds differently
            # than stock TRL. So TRL gets one advantage per sequence where its tokens' are equal. Whether they are
            # depends on the rule and on the tokens, so this waits for the device, as the metrics of each loss do.
            per_sequence = _of_first_token(advantages, batch.mask)
            if torch.equal(advantages * batch.mask, per_sequence * batch.mask):
                advantages = per_sequence
        inputs["advantages"] = advantages
        self._log_objective(batch, tokens, objective)

    # The log-probabilities of the ratio and of the bounds.

    @property
    def _rollout_setting(self) -> str:
        """The setting that requires the rollout's log-probabilities."""
        if self.method.old_policy == "rollout":
            return f"method={self.args.method!r}"
        return "anchor='rollout'"

    def _logp_old(self, inputs: dict[str, Any], logp: Tensor) -> Tensor:
        if self.method.old_policy == "rollout":
            return self._logp_rollout(inputs, logp)
        return super()._logp_old(inputs, logp)

    def _logp_anchor(self, inputs: dict[str, Any], logp: Tensor) -> Tensor | None:
        return self._logp_rollout(inputs, logp) if self.args.anchor == "rollout" else None

    def _logp_rollout(self, inputs: dict[str, Any], logp: Tensor) -> Tensor:
        """Return the sampler's log-probabilities, and the trainer's where vLLM has none for a token."""
        if "sampling_per_token_logps" not in inputs:
            raise InvalidValue(
                f"{self._rollout_setting}, but the rollout gave no log-probabilities; return them from rollout_func"
            )
        sampled = inputs["sampling_per_token_logps"]
        return torch.where(sampled.isnan(), super()._logp_old(inputs, logp), sampled)

    # Schedules and controllers.

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if self.training:
            self._begin_batch()
        return super()._generate_and_score_completions(inputs)

    def _training_state(self, inputs: dict[str, Any]) -> TrainingState:
        age = None if "version" not in inputs else self.state.global_step - inputs["version"]
        return self._state_of_loss(age, inputs.get(GROUP))

    def training_step(self, *arguments: Any, **kwargs: Any) -> Tensor:
        self._check_unchanged_settings()
        loss = super().training_step(*arguments, **kwargs)
        if self._step % self.losses_per_batch == 0:
            self._end_batch()
        return loss

    def _clip_settings(self) -> dict[str, Any]:
        names = ("loss_type", "importance_sampling_level")
        others = {name: getattr(self, name) for name in names} | {"args.delta": self.args.delta}
        return super()._clip_settings() | others

    # Logging.

    def _clipped_tokens(self, tokens: Tokens, weight: Tensor, of_sequences: bool) -> ClippedTokens:
        """Return the tokens that the method clips, in the form of TRL's clip metrics: those with a weight of 0.

        Args:
            tokens: The tokens of the loss.
            weight: The weight of each token, (sequences, tokens).
            of_sequences: True if ratios and advantages are per sequence. TRL then counts sequences.
        """
        if self.loss_type == "cispo":
            is_clipped = tokens.clip_mask.clipped_high
        else:
            is_clipped = weight == 0
        clips = ClippedTokens.of(is_clipped, tokens)
        if not of_sequences:
            return clips
        low = _of_first_token(clips.low, tokens.mask)
        high = _of_first_token(clips.high, tokens.mask)
        return ClippedTokens(low, high, Sequences(torch.ones_like(low)))

    @property
    def _clip_metric_names(self) -> tuple[str, ...]:
        return ("cispo_clip_ratio",) if self.loss_type == "cispo" else super()._clip_metric_names

    def _clip_metrics(self) -> list[float]:
        values = super()._clip_metrics()
        # TRL's CISPO has a single one, the share that is clipped with a positive advantage.
        return values[1:2] if self.loss_type == "cispo" else values

    def _counted_by_audit(self, batch: Batch, entropy: Tensor | None) -> Tensor:
        return high_entropy_mask(self, batch, entropy)


def _of_first_token(x: Tensor, mask: Tensor) -> Tensor:
    """Return the value of each sequence's first counted token, (sequences, 1)."""
    return x.gather(1, mask.argmax(1, keepdim=True))
