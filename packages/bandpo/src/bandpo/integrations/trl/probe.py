"""A test of a trainer's loss before training: its gradient on synthetic tokens, without a forward pass.

The measure is TRL's own loss, ``GRPOTrainer._compute_loss`` of the installed version, so no formula of TRL is copied:

1. With advantages of 0 its gradient is that of everything but the policy term: KL term, entropy bonus.
2. With ratios of 1, advantages of 1 and no clip or mask, its gradient is minus the share of each token in the loss. The
   shares must be those of the loss aggregation that ``loss_type`` names.
3. The gradient of the trainer's loss, of the class at hand, must be that of 1 plus the shares times ``-(w·A + b)`` of
   the method, with TRL's two masks.

The tokens are those of `bandpo.certificate.tokens`. What happens outside of the loss is not tested, see `UNSEEN`. The
loss of a subclass that ends with an error on the tokens is not compared, and only a line says so.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import trl
from transformers import Trainer
from trl import GRPOTrainer

from bandpo.certificate.gradient import slope
from bandpo.certificate.subject import Subject, shares_difference
from bandpo.certificate.tokens import trainer_batch
from bandpo.core.aggregation import TRL_LOSS_TYPES, aggregation_weights
from bandpo.core.batch import Batch
from bandpo.core.errors import BandpoError, RunProblem
from bandpo.core.methods import Method
from bandpo.integrations.trl.config import AGGREGATIONS
from bandpo.integrations.trl.trl_names import FORWARD, GRPO, TrainerNames

if TYPE_CHECKING:
    from torch import Tensor

HINT = "; if the loss was changed on purpose, set certify='warn' to train on"
UNSEEN = "advantages and old log-probabilities from generation, the forward pass, the backward pass"
"""What can change the training of a trainer, and is not part of its loss."""


def probe_loss(trainer: Any) -> str:
    """Check that a trainer's loss has the gradient of its method, and return a line about it.

    Args:
        trainer: A trainer of a class with `bandpo.integrations.trl.AuditMixin`.

    Raises:
        RuntimeError: it has another gradient, or TRL's loss cannot be computed. The message names TRL's version and
            what is different.
    """
    return GRPOSubject(trainer).certify()


class _EndedError(Exception):
    """The loss of a subclass ended with an exception, its cause."""


class TRLSubject(Subject):
    """The loss of a trainer of TRL, and TRL's own loss.

    Args:
        trainer: The trainer.
    """

    names: TrainerNames
    """The names of TRL on which the trainer depends."""
    source: str
    """The function that TRL's loss asks for log-probabilities."""
    loss = f"the loss with trl {trl.__version__}"
    measure = "TRL's loss"
    unseen = UNSEEN
    hint = HINT

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.method: Method = trainer.loss_method()
        self.tokens = trainer_batch(trainer.accelerator.device)
        self.inputs = self.make_inputs()
        self.is_read = False
        """True once a loss has asked for the log-probabilities."""

    @abstractmethod
    def make_inputs(self) -> dict[str, Any]:
        """Return the tokens as the inputs of TRL's loss that the trainer's settings need."""

    @abstractmethod
    def read(self) -> Batch:
        """Return the tokens as the method sees them, with one sequence in each row."""

    @abstractmethod
    def trl_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Compute TRL's own loss, without its clip."""

    @abstractmethod
    def measure_share(self) -> Tensor:
        """Return the derivative of TRL's loss by each token's term, without clip and masks; (rows, columns)."""

    @abstractmethod
    def check_loss(self, share: Tensor) -> None:
        """Check that TRL's own loss is the known one.

        Raises:
            RuntimeError: it is another one.
        """

    @abstractmethod
    def forward(self, logp: Tensor, entropy: Tensor) -> AbstractContextManager[Any]:
        """Let the forward pass return these log-probabilities and entropies in the block, whose value is the model."""

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that the trainer has during a loss of the synthetic tokens."""
        return {}

    def batch(self) -> Batch:
        with self.unchanged():
            return self.read()

    def certify(self) -> str:
        was_training = self.trainer.model.training
        self.trainer.model.train()
        try:
            return super().certify()
        except _EndedError as end:
            # The loss of a subclass may need inputs of its own.
            error = end.__cause__
            return (
                f"the loss of {type(self.trainer).__name__} was not compared with {self.method!r}: on bandpo's "
                f"synthetic batch it ends with {type(error).__name__}: {error}"
            )
        finally:
            self.trainer.model.train(was_training)

    def share(self) -> Tensor:
        with self.naming_errors():
            share = self.measure_share()
        if not self.is_read:
            raise self.problem(
                f"TRL's loss does not ask {self.source} for the log-probabilities of its batch"
            )
        if not share.any():
            raise self.problem(
                "it does not use the advantages in its inputs, or the log-probabilities that it asks for"
            )
        self.check_loss(share)
        return share

    def gradient(self, advantages: float | None = None) -> Tensor:
        changes = {} if advantages is None else {"advantages": self.filled(advantages)}
        try:
            return self.gradient_of(self.trainer.compute_loss, **changes)
        except BandpoError:
            raise
        except Exception as error:
            if not _is_subclassed(self.trainer):
                raise self.ended(error) from error
            raise _EndedError from error

    def filled(self, advantage: float) -> Tensor:
        """Return the advantages of TRL's inputs, all with one value."""
        return torch.full_like(self.inputs["advantages"], advantage)

    def gradient_of(self, loss: Callable[..., Tensor], **inputs: Tensor) -> Tensor:
        """Return the gradient of a loss by log-probabilities and entropies, of shape (2, rows, columns).

        Args:
            loss: The trainer's loss, or TRL's.
            inputs: Inputs of TRL's loss that replace those of the synthetic tokens.
        """
        trainer = self.trainer
        logp = self.tokens.logp.clone().requires_grad_()
        entropy = self.tokens.entropy.clone().requires_grad_()
        with self.unchanged(), torch.enable_grad():
            with self.forward(logp, entropy) as model:
                value = loss(model, self.inputs | inputs)
            if loss == trainer.compute_loss:
                self.check_leaves(value, (logp, entropy))
            # A gradient of 0 if the loss does not depend on one of them.
            value = value + 0 * (logp.sum() + entropy.sum())
            return torch.stack(torch.autograd.grad(value, (logp, entropy)))

    @contextmanager
    def unchanged(self) -> Generator[None, None, None]:
        """Prepare the trainer's attributes for a loss of the tokens, and afterwards set back those that changed.

        Attributes of other objects, such as ``args`` and ``state``, are not set back: TRL's loss changes none.
        """
        trainer = self.trainer
        before = dict(vars(trainer))
        trainer._probing = True
        trainer._metrics = {mode: defaultdict(list) for mode in ("train", "eval")}
        trainer.aux_loss_enabled = False
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        for name, value in self.attributes().items():
            setattr(trainer, name, value)
        try:
            yield
        finally:
            for name in vars(trainer).keys() - before.keys():
                delattr(trainer, name)
            for name, value in before.items():
                if name not in vars(trainer) or vars(trainer)[name] is not value:
                    setattr(trainer, name, value)

    def check_leaves(self, loss: Tensor, leaves: tuple[Tensor, Tensor]) -> None:
        """Check that a loss depends on no parameter other than through its log-probabilities and entropies."""
        nodes = [] if loss.grad_fn is None else [loss.grad_fn]
        visited = set(nodes)
        while nodes:
            node = nodes.pop()
            variable = getattr(node, "variable", None)
            if variable is not None and not any(variable is leaf for leaf in leaves):
                names = [name for name, p in self.trainer.model.named_parameters() if p is variable]
                raise self.problem(
                    f"its gradient reaches {names[0] if names else 'a tensor'} on another path than the "
                    "log-probabilities, such as a second forward pass or a penalty on the parameters"
                )
            for parent, _ in node.next_functions:
                if parent is not None and parent not in visited:
                    visited.add(parent)
                    nodes.append(parent)

    def ended(self, error: Exception) -> RunProblem:
        """Return the error about a loss that ends with an exception."""
        return RunProblem(
            f"the loss of trl {trl.__version__} ends with {type(error).__name__} on bandpo's synthetic batch: {error}; "
            f"bandpo was tested with the inputs and attributes of trl {self.names.tested}{HINT}"
        )

    @contextmanager
    def naming_errors(self) -> Generator[None, None, None]:
        """Raise the errors of TRL's own loss in the block as one that names TRL's version."""
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise self.ended(error) from error

    def problem(self, text: str) -> RunProblem:
        return RunProblem(
            f"the loss of {type(self.trainer).__name__} with trl {trl.__version__} is not that of {self.method!r}: "
            f"{text}{HINT}"
        )


class GRPOSubject(TRLSubject):
    """The loss of TRL's GRPOTrainer."""

    names = GRPO
    source = FORWARD

    def make_inputs(self) -> dict[str, Any]:
        trainer = self.trainer
        tokens = self.tokens
        rows, columns = tokens.logp.shape
        # The ids are the number of the sequence, by which a part of the batch gets its log-probabilities.
        number = torch.arange(rows, device=tokens.logp.device)[:, None]
        prompt = number.expand(rows, 2).contiguous()
        inputs: dict[str, Any] = {
            "prompt_ids": prompt,
            "prompt_mask": torch.ones_like(prompt),
            "completion_ids": number.expand(rows, columns).contiguous(),
            "completion_mask": tokens.mask,
            "tool_mask": tokens.used,
            "advantages": tokens.sequence_advantages,
            "old_per_token_logps": tokens.logp_old,
            "sampling_per_token_logps": tokens.logp_rollout,
            "ref_per_token_logps": tokens.logp_reference,
            "num_items_in_batch": 2 * tokens.used.sum(),
            # For rules that depend on the age of the weights that sampled: 0, 1 or 2 updates.
            "version": trainer.state.global_step - number.flatten() % 3,
        }
        if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
            assert tokens.weights is not None
            inputs["importance_sampling_ratio"] = torch.where(tokens.used > 0, tokens.weights, 1.0)
        return inputs

    def read(self) -> Batch:
        return self.trainer._batch_of(self.inputs, self.tokens.logp, self.tokens.entropy)

    def trl_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        with without_clip(self.trainer):
            return GRPOTrainer._compute_loss(self.trainer, model, inputs)

    def other_terms(self) -> Tensor:
        old = self.batch().logp_old
        with self.naming_errors():
            return self.gradient_of(self.trl_loss, advantages=self.filled(0.0), old_per_token_logps=old)

    @contextmanager
    def forward(self, logp: Tensor, entropy: Tensor) -> Generator[Any, None, None]:
        # The function is replaced in TRL's class: on the instance it would hide the overrides of subclasses and of
        # AuditMixin, which belong to the loss. Other trainers of the process still get TRL's function.
        original = getattr(GRPOTrainer, FORWARD)

        def synthetic(trainer: Any, model: Any, input_ids: Tensor, *arguments: Any, **kwargs: Any) -> Any:
            if trainer is not self.trainer:
                return original(trainer, model, input_ids, *arguments, **kwargs)
            self.is_read = True
            rows = input_ids[:, 0]
            return logp[rows], entropy[rows], None

        setattr(GRPOTrainer, FORWARD, synthetic)
        try:
            yield self.trainer.model
        finally:
            setattr(GRPOTrainer, FORWARD, original)

    def attributes(self) -> dict[str, Any]:
        # With this entropy an adaptive entropy bonus acts.
        return {"_entropy_window_stats": None, "_last_world_entropy": -torch.inf}

    def measure_share(self) -> Tensor:
        trainer = self.trainer
        logp = self.tokens.logp
        ratio_one = {"old_per_token_logps": logp.clone(), "sampling_per_token_logps": logp.clone()}
        if "importance_sampling_ratio" in self.inputs:
            ratio_one["importance_sampling_ratio"] = torch.ones_like(logp)
        with self.unchanged():
            trainer.importance_sampling_level = "token"
            trainer.top_entropy_quantile = 1.0
            trainer.off_policy_mask_threshold = None
            at_zero = self.gradient_of(self.trl_loss, advantages=self.filled(0.0), **ratio_one)
            at_one = self.gradient_of(self.trl_loss, advantages=self.filled(1.0), **ratio_one)
        return (at_zero - at_one)[0]

    def check_loss(self, share: Tensor) -> None:
        """Check that the shares are those of the loss aggregation that ``loss_type`` names."""
        trainer = self.trainer
        loss_type = str(AGGREGATIONS.get(trainer.loss_type, trainer.loss_type))
        accumulated = trainer.args.gradient_accumulation_steps
        normalizer: Any = None
        factor = 1 / accumulated
        if loss_type == "dapo":
            # The tokens of the generated batch, of which an update has a part.
            part = accumulated / trainer.args.steps_per_generation
            normalizer = self.inputs["num_items_in_batch"] * part / trainer.accelerator.num_processes
            factor = 1.0
        elif loss_type == "dr_grpo":
            normalizer = float(trainer.max_completion_length)
        sequences = self.batch().sequences
        expected = factor * aggregation_weights(sequences, loss_type, normalizer, dtype=share.dtype)
        difference = shares_difference(share, expected)
        if difference:
            raise self.problem(
                f"{difference} {TRL_LOSS_TYPES[loss_type]!r}, which loss_type={trainer.loss_type!r} stands for"
            )

    def expected(self, method: Method, batch: Batch, share: Tensor) -> Tensor:
        """Return a method's gradient by the log-probabilities, with TRL's shares and masks; (rows, columns)."""
        trainer = self.trainer
        gradient = share * slope(method, batch) * self.loss_mask(batch)
        if trainer.importance_sampling_level == "sequence" and trainer.loss_type not in ("cispo", "vespo"):
            # The mean of log-ratios distributes the gradient of a sequence's ratio over its tokens.
            length = batch.mask.sum(-1, keepdim=True).clamp(min=1.0)
            gradient = gradient.sum(-1, keepdim=True) * batch.mask / length
        return gradient

    def parts(self) -> Sequence[str]:
        trainer = self.trainer
        settings = {
            "the KL term": trainer.beta,
            "the entropy bonus": trainer._entropy_bonus_enabled,
            "high-entropy tokens": trainer.top_entropy_quantile < 1,
            "the off-policy mask": trainer.off_policy_mask_threshold is not None,
            "importance weights": "importance_sampling_ratio" in self.inputs,
        }
        return [name for name, is_set in settings.items() if is_set]

    def loss_mask(self, batch: Batch) -> Tensor:
        """Return 1 for the tokens that TRL's masks leave in the loss.

        The masks are computed here and not by TRL's functions, which a subclass may have replaced.
        """
        mask = high_entropy_mask(self.trainer, batch, self.tokens.entropy)
        threshold = self.trainer.off_policy_mask_threshold
        if threshold is None:
            return mask
        # Drift is measured from the sampler. Where the sampler has no log-probability (NaN), the drift counts as 0.
        drift = (self.tokens.logp_rollout - self.tokens.logp).nan_to_num(nan=0.0) * batch.mask
        mean_drift = drift.sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True).clamp(min=1.0)
        return mask * ((batch.advantages >= 0) | (mean_drift <= threshold))


def high_entropy_mask(trainer: Any, batch: Batch, entropy: Tensor | None) -> Tensor:
    """Return 1 for the tokens of the highest entropies, which TRL's ``top_entropy_quantile`` leaves in the loss.

    The quantile is over the tokens of all processes.
    """
    if trainer.top_entropy_quantile == 1 or entropy is None:
        return batch.mask
    counted = batch.mask > 0

    # Processes have different numbers of tokens. The padding is below every entropy, and removed after the gather.
    accelerator = trainer.accelerator
    padded = accelerator.pad_across_processes(entropy[counted].float(), dim=0, pad_index=-1e9)
    entropies = accelerator.gather(padded)
    entropies = entropies[entropies > -1e8]
    if not entropies.numel():
        return torch.zeros_like(batch.mask)

    lowest = torch.quantile(entropies, 1 - trainer.top_entropy_quantile)
    return batch.mask * (entropy.masked_fill(~counted, 0.0) >= lowest)


@contextmanager
def with_bounds(trainer: Any, low: float, high: float) -> Generator[None, None, None]:
    """Give TRL's loss the bounds 1 − low and 1 + high in the block."""
    configured = trainer.epsilon_low, trainer.epsilon_high
    trainer.epsilon_low, trainer.epsilon_high = low, high
    try:
        yield
    finally:
        trainer.epsilon_low, trainer.epsilon_high = configured


@contextmanager
def without_clip(trainer: Any) -> Generator[None, None, None]:
    """Give the loss of a GRPOTrainer bounds that no ratio reaches, in the block."""
    delta = trainer.args.delta
    trainer.args.delta = None
    try:
        with with_bounds(trainer, torch.inf, torch.inf):
            yield
    finally:
        trainer.args.delta = delta


def _is_subclassed(trainer: Any) -> bool:
    """Return True if a trainer's class derives from bandpo's, or has bases of others besides TRL's and bandpo's."""
    for cls in type(trainer).__mro__:
        is_known = cls.__module__.startswith(("trl.", "transformers.", "bandpo."))
        if issubclass(cls, Trainer) and not is_known:
            return True
    return False
