"""The loss, compiled by ``torch.compile`` into one pass over the tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from ._derivatives import refuse_second_derivative
from ._loss import LossOutputs
from .batch import Batch
from .methods import Method
from .rules import ClipRule
from .schedules import TrainingState
from .text import as_method

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["compile_loss"]

ONE_PASS = {
    "realize_opcount_threshold": 100_000,
    "realize_reads_threshold": 100_000,
    "realize_acc_reads_threshold": 100_000,
}
"""Options of ``torch.compile`` with which long expressions are recomputed instead of stored.

By default the compiler stores intermediate tensors of shape (batch, time). A loss is bound by memory bandwidth, so
recomputation is faster.
"""


def _loss_of_tensors(
    method: Method,
    *tensors: Tensor | None,
    aggregation: str | Callable[[Tensor], Tensor] | None = None,
    normalizer: float | Tensor | None = None,
    metrics: bool = True,
    **settings: Any,
) -> LossOutputs:
    batch = Batch.read(*tensors, **settings)  # pyright: ignore[reportArgumentType]
    return method.loss(batch, aggregation=aggregation, normalizer=normalizer, metrics=metrics)


def _copy(function: FunctionType) -> FunctionType:
    """Return a copy of a function with its own code object.

    torch.compile counts compilations per code object and stops compiling after eight. With copies, each method has a
    limit of its own.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_NUMBERS)}")
    copy = FunctionType(code, function.__globals__, code.co_name)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_NUMBERS = itertools.count()


def _mark_sizes(x: Any) -> None:
    """Tell torch.compile that the sizes of a tensor vary; do nothing for other values."""
    if isinstance(x, torch.Tensor) and not x.is_nested:
        torch._dynamo.maybe_mark_dynamic(x, list(range(x.dim())))  # pyright: ignore


def _refuse_second_derivative(gradient: Tensor) -> None:
    """Raise RuntimeError during a backward pass with ``create_graph=True``, whose graph the compiler would not have."""
    refuse_second_derivative("the policy loss")


def compile_loss(
    method: Method | ClipRule | str | None = None, *, kernels: bool = False, **settings: Any
) -> Callable[..., LossOutputs]:
    """Return the loss of one method, compiled into one pass over the tokens in each direction.

    With PPO's surrogate the forward pass reads ``logp``, ``logp_old`` and the mask and writes the derivative. The
    backward pass reads the derivative and writes the gradient. That is 24 bytes per token in float32, metrics included.
    On a CPU it is 20 more for a `Band` of KL, whose value beyond a bound takes a root. For divergences whose root takes
    many steps, intermediate tensors are stored.
    Schedules and controllers are replaced by their values outside of the graph, so a radius that changes with each step
    causes at most two compilations.

    Args:
        method: The method, as for `policy_loss`.
        kernels: Experimental, as no card has run them. True for kernels in Triton (the extra ``kernels``) in place of
            the compiler's, where they exist: on CUDA, for `Band` of KL, total variation and Pearson's χ², `FixedClip`,
            `LogClip`, and `TwoSided` of these, with PPO's surrogate and `DualClip`, without importance weights, in
            float32 or half precision, padded, and with an average that has a name. Their first results on a device are
            compared with those of `policy_loss`. If they differ, and for all other methods, batches and devices, a
            `BandWarning` gives the reason, once, and the compiled loss is computed.
        **settings: Further arguments of ``torch.compile``, such as ``backend="aot_eager"``. ``options`` are added to
            those for one pass. With ``dynamic=True`` the sizes of the tensors are variables from the first call on.

    Returns:
        A function with the arguments of `Batch.read` and of `Method.loss`, which are those of `policy_loss` without
        ``method`` and with ``entropy`` and ``logp_anchor``. The first call compiles, which takes seconds. A second
        shape compiles once more, for all further shapes, and one whose rows are a multiple of 1,024 tokens long once
        more. Values are not read, so an invalid value at a counted token raises no error but makes the loss NaN.

    Raises:
        TypeError, ValueError: if ``method`` is not a method, or its text cannot be parsed.

    >>> loss_of = compile_loss("GRPO()", backend="eager")
    >>> logp = torch.tensor([[0.2, 0.5]]).log().requires_grad_()
    >>> loss, metrics = loss_of(logp, torch.tensor([[0.08, 0.5]]).log(), torch.tensor([1.0]))
    >>> loss.backward()
    >>> logp.grad
    tensor([[-0.0000, -0.5000]])
    """
    chosen = as_method(method)
    settings.setdefault("fullgraph", True)
    any_sizes = settings.get("dynamic") is True
    if any_sizes:
        # torch would take each number of the method, and each constant, for an input too, and build a tensor of it in
        # each call.
        del settings["dynamic"]
    if settings.get("backend", "inductor") == "inductor" and "mode" not in settings:
        one_pass = ONE_PASS if chosen.objective.one_pass and chosen.clip.one_pass else {}
        settings["options"] = {**one_pass, **(settings.get("options") or {})}
    compiled: Callable[..., LossOutputs] = torch.compile(_copy(_loss_of_tensors), **settings)  # pyright: ignore[reportUnknownMemberType]
    run = compiled
    if kernels:
        from .kernels._token_loss import TokenLoss

        run = TokenLoss(compiled)

    def loss(
        logp: Tensor,
        logp_old: Tensor,
        advantages: Tensor,
        mask: Tensor | None = None,
        *,
        state: TrainingState | None = None,
        **kwargs: Any,
    ) -> LossOutputs:
        if any_sizes:
            for x in (logp, logp_old, advantages, mask, *kwargs.values()):
                _mark_sizes(x)
        resolved = chosen.resolve(TrainingState() if state is None else state)
        if state is not None:
            # The values of controllers are in the method now. Without their names, the graph has fewer guards.
            state = replace(state, controller_state=None)
        outputs = run(resolved, logp, logp_old, advantages, mask, state=state, **kwargs)
        if outputs.loss.requires_grad and not torch.compiler.is_compiling():
            outputs.loss.register_hook(_refuse_second_derivative)  # pyright: ignore[reportUnknownMemberType]
        return outputs

    loss.__doc__ = f"Compute the loss of {chosen!r}; arguments are those of `bandpo.policy_loss`."
    return loss
