"""The loss compiled by ``torch.compile`` into one pass over the tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from bandpo.loss import LossOutputs, policy_loss
from bandpo.methods import Method
from bandpo.rules import ClipRule
from bandpo.schedules import TrainingState
from bandpo.text import as_method

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["compile_loss"]

ONE_PASS = {
    "realize_opcount_threshold": 2000,
    "realize_reads_threshold": 2000,
    "realize_acc_reads_threshold": 2000,
}
"""Options of ``torch.compile`` under which a long expression is computed again where it is needed, and not stored.

By default the compiler stores intermediate tensors of the tokens' size, for which a loss has no need: it is bound by
memory, not by arithmetic.
"""


def _loss_and_metrics(*arguments: Any, **named: Any) -> LossOutputs:
    return policy_loss(*arguments, **named)


def _copy(function: FunctionType) -> FunctionType:
    """Return a copy of a function with a code object of its own.

    The compiler counts by code object how often it has compiled, and gives up after eight times. Without a copy the
    methods of a process would share that number.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_NUMBERS)}")
    return FunctionType(code, function.__globals__, code.co_name)


_NUMBERS = itertools.count()


def compile_loss(
    method: Method | ClipRule | str | None = None, **settings: Any
) -> Callable[..., LossOutputs]:
    """Return `policy_loss` of one method, compiled into one pass over the tokens each way.

    Under PPO's surrogate the forward pass reads ``logp``, ``logp_old`` and the mask and writes the slope. The backward
    pass reads the slope and writes the gradient. That is 24 bytes a token in float32, metrics included. Schedules and
    controllers are replaced by their numbers outside of the graph, so a radius that changes with each step compiles at
    most twice.

    Args:
        method: The method, as for `policy_loss`.
        **settings: Further arguments of ``torch.compile``, such as ``dynamic=True`` or ``backend="aot_eager"``.
            ``options`` are added to those for one pass.

    Returns:
        A function that takes what `policy_loss` takes, but ``method``. The first call compiles, which takes seconds. A
        second shape compiles once more, for all further ones. Values are not read, so a wrong value at a counted token
        is not refused but makes the loss NaN.

    Raises:
        TypeError, ValueError: if the method cannot be read.

    >>> loss_of = compile_loss("GRPO()", backend="eager")
    >>> logp = torch.tensor([[0.2, 0.5]]).log().requires_grad_()
    >>> loss, metrics = loss_of(logp, torch.tensor([[0.08, 0.5]]).log(), torch.tensor([1.0]))
    >>> loss.backward()
    >>> logp.grad
    tensor([[-0.0000, -0.5000]])
    """
    chosen = as_method(method)
    settings.setdefault("fullgraph", True)
    if settings.get("backend", "inductor") == "inductor" and "mode" not in settings:
        one_pass = ONE_PASS if chosen.objective.one_pass else {}
        settings["options"] = {**one_pass, **(settings.get("options") or {})}
    compiled: Callable[..., LossOutputs] = torch.compile(_copy(_loss_and_metrics), **settings)  # pyright: ignore[reportUnknownMemberType]

    def loss(
        logp: Tensor,
        logp_old: Tensor,
        advantages: Tensor,
        mask: Tensor | None = None,
        *,
        state: TrainingState | None = None,
        **arguments: Any,
    ) -> LossOutputs:
        known = TrainingState() if state is None else state
        settled = chosen.resolve(known)
        if state is not None:
            # The numbers that controllers chose are in the method now; their names would only be compared.
            state = replace(state, controller_state=None)
        return compiled(logp, logp_old, advantages, mask, method=settled, state=state, **arguments)

    loss.__doc__ = f"Return the compiled loss of {chosen!r}; arguments are those of `bandpo.policy_loss`."
    return loss
