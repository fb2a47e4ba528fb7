"""A test of a run's loss before training: verl's ``ppo_loss`` on synthetic tokens, without a model.

``ppo_loss`` is the function that verl's workers call with the output of the model. It calls the policy loss that
``loss_mode`` names, and adds KL term and entropy bonus. Its gradient by log-probabilities and entropies must be:

1. For the KL term and the entropy bonus, that of their definitions, with the average that ``loss_agg_mode`` names. They
   are measured with verl's loss ``vanilla`` at advantages of 0, where it has no gradient.
2. For the policy term, the share of each token in the loss times ``-(w·A + b)`` of the method. The shares are those of
   the configured average. Some of verl's own losses have another average. For these the shares are measured, at ratios
   of 1 and advantages of 1, and only announced.

The tokens are those of `bandpo.certificate.tokens`, with importance weights, a mask with gaps, and sizes of the global
batch that are none of its own. What happens outside of ``ppo_loss`` is not tested, see `UNSEEN`. For verl's own losses
that are no method of bandpo, only KL term, entropy bonus and average are compared.
"""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import verl
from tensordict import TensorDict
from verl.workers.config import PolicyLossConfig

from bandpo.certificate.gradient import TOLERANCE, relative_differences
from bandpo.certificate.subject import Subject
from bandpo.certificate.tokens import trainer_batch
from bandpo.core.batch import Batch
from bandpo.core.errors import BandWarning, RunProblem
from bandpo.core.layout import Rows
from bandpo.core.methods import Method
from bandpo.integrations.verl.average import NO_MODE, average_of, name_average, token_shares
from bandpo.integrations.verl.settings import POLICY_LOSS, loss_of
from bandpo.integrations.verl.verl_names import TESTED

if TYPE_CHECKING:
    from types import FrameType

    from jaxtyping import Float
    from torch import Tensor
    from verl.workers.config import ActorConfig

SIZES = {"dp_size": 2, "batch_num_tokens": 71, "global_batch_size": 13}
"""The sizes of the global batch, of which none is that of the synthetic one, so that averages differ."""
HINT = f"; if the loss was changed on purpose, set {POLICY_LOSS}certify=warn to train on"
"""The end of an error. A loss of verl's own has no such setting, and a difference from it is only a warning."""
UNSEEN = (
    "advantages and old log-probabilities before the loss, the forward pass, the engine's factor on the loss, the "
    "backward pass"
)
"""What can change the training of a run, and is not part of its loss."""
_is_probing: ContextVar[bool] = ContextVar("is_probing", default=False)


def is_probing() -> bool:
    """Return True while a loss is computed on the synthetic batch, which is not audited and on one process."""
    return _is_probing.get()


@dataclass(frozen=True)
class Probed:
    """The result of a probe without a difference."""

    line: str
    """A line about the parts that were compared."""
    average: str
    """The average that the loss really applies."""


def probe_loss(actor: ActorConfig, method: Method | None, device: torch.device | None = None) -> Probed:
    """Check that verl's loss has the gradient of a run's settings.

    Args:
        actor: The actor's settings. They are not changed.
        method: The method of the loss; None if it is not one of bandpo's.
        device: The device of the batch; the CPU by default.

    Raises:
        RuntimeError: it has another gradient, or it cannot be computed. The message names verl's version and what is
            different.
    """
    subject = VerlSubject(actor, method, device or torch.device("cpu"))
    return Probed(subject.certify(), subject.average)


def workers_loss() -> Any:
    """Return the function that verl's workers call with the output of a model: ``ppo_loss``; None if it is not loaded.

    Another plug-in may have replaced it in the module of the workers.
    """
    for module in ("verl.workers.engine_workers", "verl.workers.utils.losses"):
        function = getattr(sys.modules.get(module), "ppo_loss", None)
        if function is not None:
            return function
    return None


def caller_of_loss() -> str:
    """Return the name of the function that called the current policy loss; empty if verl's ``ppo_loss`` did."""
    ppo_loss = workers_loss()
    code = getattr(inspect.unwrap(ppo_loss), "__code__", None) if ppo_loss else None
    first_caller = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return ""
        module = str(frame.f_globals.get("__name__"))
        if not first_caller and not module.startswith("bandpo."):
            first_caller = f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    return first_caller


_compared: list[ActorConfig] = []
"""The settings, of this process, whose loss was compared with them."""


def probe_once(config: ActorConfig, method: Method | None, device: torch.device) -> None:
    """Compare the gradient of verl's loss with a run's settings at the first loss of a process, and print a line.

    Args:
        config: The actor's settings.
        method: The method of the loss; None if it is not one of bandpo's.
        device: The device of the loss.

    Raises:
        RuntimeError: it is another one, and ``certify`` is ``stop``.
    """
    if is_probing() or any(compared is config for compared in _compared):
        return
    caller = caller_of_loss()
    if caller:
        # A worker of another project, with a loss of its own around the policy loss.
        line = f"the gradient of the loss was not compared: {caller} called the policy loss, and not verl's ppo_loss"
    else:
        probed = probe_by_setting(config, method, device)
        line = "" if probed is None else probed.line
    if line and config.policy_loss.get("certify") != "off":
        print(f"bandpo: {line}", flush=True)  # Ray forwards the workers' stdout, as for verl's own messages
    _compared.append(config)


def probe_by_setting(
    config: ActorConfig, method: Method | None, device: torch.device | None = None
) -> Probed | None:
    """Compare the gradient of verl's loss with a run's settings, and react to a difference as ``certify`` says.

    A loss of verl's own has no such setting, and a difference is a warning.

    Args:
        config: As for `probe_once`.
        method: As for `probe_once`.
        device: As for `probe_once`; the CPU by default.

    Returns:
        What was compared; None if nothing was, or if it differs.

    Raises:
        RuntimeError: it is another one, and ``certify`` is ``stop``.
    """
    certify = config.policy_loss.get("certify", "stop" if loss_of(config) == "band" else "warn")
    if certify == "off":
        return None
    try:
        return probe_loss(config, method, device)
    except RunProblem as problem:
        if certify == "stop":
            raise
        warnings.warn(str(problem), BandWarning, stacklevel=2)
        return None


class VerlSubject(Subject):
    """The loss of a run of verl.

    Args:
        actor: The actor's settings.
        method: The method of the loss; None if it is not one of bandpo's.
        device: The device of the tokens.
    """

    loss = f"the loss of verl {verl.__version__}"
    measure = "its KL term and entropy bonus by their definitions"
    unseen = UNSEEN

    def __init__(self, actor: ActorConfig, method: Method | None, device: torch.device) -> None:
        self.actor = actor
        self.has_method = method is not None
        if method is not None:
            self.method = method
        self.loss_mode = loss_of(actor)
        self.hint = HINT if self.loss_mode == "band" else ""
        self.tokens = trainer_batch(device)
        # verl's geo_mean takes the geometric mean of weights.
        self.weights = None if self.loss_mode == "geo_mean" else self.tokens.weights
        self.sizes = SIZES | {"loss_scale_factor": actor.loss_scale_factor or 7}
        self.average = ""
        """The average that the loss really applies, once it is known."""

    def certify(self) -> str:
        if self.has_method:
            return super().certify()
        self.other_terms()
        self.share()
        compared = ", ".join((f"the average of verl's {self.loss_mode}", *self.names_of_other_terms))
        return f"{self.loss} was compared in part, as {self.loss_mode} is no method: {compared}"

    def share(self) -> Tensor:
        if self.loss_mode == "band":
            average = self.actor.policy_loss.get("average")
            self.average = average_of(self.method, average, self.actor.loss_agg_mode)
            return token_shares(self.tokens.used, self.average, self.sizes)
        at_zero = self.gradient(advantages=0.0, ratio_one=True)
        at_one = self.gradient(advantages=1.0, ratio_one=True)
        share = (at_zero - at_one)[0]
        self.average = name_average(share, self.tokens.used, self.actor.loss_agg_mode, self.sizes)
        if self.has_method and self.average.startswith(NO_MODE):
            raise self.problem(f"its average is {self.average}")
        return share

    def parts(self) -> list[str]:
        weights = [] if self.weights is None else ["importance weights"]
        return [f"the average {self.average}", *weights, *self.names_of_other_terms]

    def gradient(
        self, advantages: float | None = None, *, ratio_one: bool = False, loss_mode: str | None = None
    ) -> Tensor:
        """Return the gradient of verl's loss by log-probabilities and entropies.

        Args:
            advantages: The advantage of all tokens; by default those of the batch.
            ratio_one: True for old log-probabilities that are the current ones, and no importance weights.
            loss_mode: The name of a loss of verl's own in place of the configured one.
        """
        logp = self.tokens.logp.clone().requires_grad_()
        entropy = self.tokens.entropy.clone().requires_grad_()
        config = copy.copy(self.actor)
        object.__setattr__(config, "global_batch_info", {})
        if loss_mode is not None:
            object.__setattr__(config, "policy_loss", PolicyLossConfig(loss_mode=loss_mode))
        try:
            ppo_loss = workers_loss()
            if ppo_loss is None:
                # Here, as `import verl` need not import it, and a version of verl may not have it.
                from verl.workers.utils.losses import ppo_loss

            data = self.data(advantages, ratio_one)
            with _probing(logp.device), torch.enable_grad():
                output = {"log_probs": self.flat(logp), "entropy": self.flat(entropy)}
                value, _ = ppo_loss(config, output, data)
            # A gradient of 0 if the loss does not depend on one of them.
            value = value + 0 * (logp.sum() + entropy.sum())
            return torch.stack(torch.autograd.grad(value, (logp, entropy)))
        except Exception as error:  # a new version of verl may raise errors of any type
            raise RunProblem(
                f"{self.loss} ends with {type(error).__name__} on bandpo's synthetic batch: "
                f"{error}; bandpo was tested with the arguments and data of verl {TESTED}{self.hint}"
            ) from error

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each response, counted ones and others. A response has at least one token."""
        return [max(int(n), 1) for n in self.tokens.mask.sum(-1)]

    def nested(self, x: Tensor) -> Tensor:
        """Return the responses' part of a tensor (rows, columns) as verl's workers get it."""
        return torch.nested.as_nested_tensor(
            [row[:n] for row, n in zip(x, self.lengths, strict=True)], layout=torch.jagged
        )

    def flat(self, x: Tensor) -> Tensor:
        """Return a tensor (rows, columns) in the form of a model's output: each value before its token."""
        zero = x.new_zeros(1)
        rows = zip(x, self.lengths, strict=True)
        # A prompt has two tokens. The value of its first and that of the response's last position are not used.
        return torch.cat([torch.cat([zero, row[:n], zero]) for row, n in rows])

    def data(self, advantages: float | None, ratio_one: bool) -> TensorDict:
        """Return the batch with the names that verl's workers use."""
        tokens = self.tokens
        ones = torch.ones_like(tokens.logp)
        columns = {
            "responses": ones.long(),
            "response_mask": tokens.used.long(),
            "old_log_probs": tokens.logp if ratio_one else tokens.logp_old,
            "advantages": tokens.advantages if advantages is None else advantages * ones,
        }
        if self.weights is not None and not ratio_one:
            columns["rollout_is_weights"] = self.weights
        if self.actor.use_kl_loss:
            columns["ref_log_prob"] = tokens.logp_reference
        from verl.utils.tensordict_utils import assign_non_tensor

        rows = len(ones)
        data = TensorDict({name: self.nested(x) for name, x in columns.items()}, batch_size=[rows])
        prompts = torch.ones(rows, 2, dtype=torch.long, device=ones.device)
        data["prompts"] = torch.nested.as_nested_tensor([*prompts], layout=torch.jagged)
        assign_non_tensor(data, **SIZES)
        return data

    def batch(self) -> Batch:
        """Return the batch as the method sees it."""
        tokens = self.tokens
        return Batch.read(
            tokens.logp, tokens.logp_old, tokens.advantages, tokens.used, layout=Rows(), weights=self.weights
        )

    # The KL term and the entropy bonus.

    @property
    def names_of_other_terms(self) -> list[str]:
        """The names of the terms beside the policy's that the settings ask for."""
        names = []
        if self.actor.use_kl_loss:
            names.append(f"the KL term {self.actor.kl_loss_type}")
        if self.actor.entropy_coeff:
            names.append("the entropy bonus")
        return names

    def other_terms(self) -> Float[Tensor, "2 batch time"]:
        """Compute the gradient of KL term and entropy bonus by their definitions.

        Raises:
            RuntimeError: verl's, at advantages of 0, is another one.
        """
        actor = self.actor
        tokens = self.tokens
        share = token_shares(tokens.used, actor.loss_agg_mode, self.sizes)
        kl = torch.zeros_like(share)
        if actor.use_kl_loss:
            kl = actor.kl_loss_coef * kl_slope(actor.kl_loss_type, tokens.logp, tokens.logp_reference)
        by_definition = torch.stack([kl * share, -actor.entropy_coeff * share])

        found = self.gradient(advantages=0.0, loss_mode="vanilla")
        kl_settings = f"kl_loss_type={actor.kl_loss_type}, kl_loss_coef={actor.kl_loss_coef:g}"
        terms = (
            ("its KL term", kl_settings, bool(actor.use_kl_loss)),
            ("its entropy bonus", f"entropy_coeff={actor.entropy_coeff:g}", bool(actor.entropy_coeff)),
        )
        for (term, settings, is_set), x, expected in zip(terms, found, by_definition, strict=True):
            # For a term that is 0. The loss vanilla has a gradient of exactly 0.
            unit = expected.abs().max() if is_set else TOLERANCE * share.max()
            difference = relative_differences(x, expected, unit).max()
            if difference > TOLERANCE and is_set:
                raise self.problem(
                    f"{term} has another gradient than by its definition with {settings} and "
                    f"loss_agg_mode={actor.loss_agg_mode}: it differs by {difference:.2g}"
                )
            if difference > TOLERANCE:
                raise self.problem(
                    f"with advantages of 0 it has a gradient of up to {x.abs().max():.2g}: another term"
                )
        return by_definition

    def problem(self, text: str) -> RunProblem:
        name = repr(self.method) if self.has_method else f"verl's {self.loss_mode}"
        return RunProblem(f"{self.loss} is not that of {name} with these settings: {text}{self.hint}")


def kl_slope(kind: str, logp: Tensor, reference: Tensor) -> Tensor:
    """Compute the derivative of verl's estimate of the KL divergence by the log-probability, per token.

    Args:
        kind: verl's ``kl_loss_type``. With a ``+`` at its end the derivative is that of ``k2``.
        logp: The log-probabilities (nats).
        reference: Those of the reference policy.

    Raises:
        RuntimeError: there is no such estimate.

    >>> logp, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0])
    >>> kl_slope("k2", logp, reference), kl_slope("k3", logp, reference)
    (tensor([ 0., -1.]), tensor([ 0.0000, -1.7183]))
    """
    gap = logp - reference
    if kind.endswith("+") or kind in ("mse", "k2"):
        return gap
    if kind in ("kl", "k1"):
        return torch.ones_like(gap)
    if kind == "abs":
        return gap.sign()
    if kind in ("low_var_kl", "k3"):
        return 1 - torch.exp(-gap)
    raise RunProblem(
        f"kl_loss_type={kind}: bandpo cannot compare this KL term of verl {verl.__version__}{HINT}"
    )


@contextmanager
def _probing(device: torch.device) -> Generator[None, None, None]:
    """Mark that losses in the block are those of the probe, and set back the state of random numbers afterwards."""
    token = _is_probing.set(True)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        _is_probing.reset(token)
