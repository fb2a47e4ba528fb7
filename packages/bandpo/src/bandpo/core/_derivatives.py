"""The refusal of second derivatives, by autograd functions that compute the first one themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .errors import RunProblem


def refuse_second_derivative(what: str) -> None:
    """Raise RuntimeError during a backward pass with ``create_graph=True``.

    Autograd takes the first derivative for a constant there. Without the error, the second derivative would lack terms.

    Args:
        what: The differentiated function, for the error.
    """
    # Autograd enables gradients during a backward pass exactly if it is to create a graph. While torch.compile traces a
    # backward pass they are enabled in any case.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RunProblem(
            f"{what} has no second derivative, which create_graph=True requests; take its gradient in a call without "
            "create_graph=True, and that of the other terms of the loss in a call of their own"
        )


def first_derivative_only(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the ``backward`` of an autograd function whose result must not be differentiated again.

    ``torch.autograd.function.once_differentiable`` does not suffice: its error does not occur if the function's result
    is added to another loss, as the incoming gradient is a constant then.

    Args:
        what: The function, for the error.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def checked(ctx: Any, *gradients: Any) -> Any:
            refuse_second_derivative(what)
            return backward(ctx, *gradients)

        return checked

    return decorate
