"""The conditions under which a kernel runs, and the comparison of its first results with the path without it.

A kernel is an option. Where it cannot run, or where its first results differ, the path without kernels is taken, and
one `BandWarning` gives the reason.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Hashable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from ..errors import BandWarning

if TYPE_CHECKING:
    from torch import Tensor

OLDEST_CARD = (8, 0)
"""The compute capability (CUDA) from which the kernels are compiled: bfloat16 and the memory of Ampere."""


def is_interpreted() -> bool:
    """Return True if Triton interprets kernels on the CPU, as in tests: ``TRITON_INTERPRET=1``."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def reason_against(*tensors: Tensor | None) -> str | None:
    """Return the reason for which no kernel can run on these tensors, as a part of a sentence; None if one can."""
    given = [x for x in tensors if x is not None]
    devices = {x.device for x in given}
    # To look for the package takes as long as a launch, and each call asks.
    if "triton" not in sys.modules and find_spec("triton") is None:
        return "triton is not installed (pip install 'bandpo[kernels]')"
    if torch.compiler.is_compiling():
        return "torch.compile traces the call"
    if any(x.is_nested for x in given):
        return "tensors are nested"
    if len(devices) > 1:
        return f"tensors are on several devices: {', '.join(sorted(map(str, devices)))}"
    (device,) = devices
    if is_interpreted() and device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"kernels are for CUDA, and the tensors are on {device.type}"
    if torch.cuda.get_device_capability(device) < OLDEST_CARD:
        major, minor = OLDEST_CARD
        return f"{torch.cuda.get_device_name(device)} is older than compute capability {major}.{minor}"
    return None


class Trial:
    """The verdicts on a kernel: one for each device and each variant of the kernel, from its first results there.

    Args:
        name: What the user called, for warnings: ``compile_loss(…, kernels=True)``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._passed: dict[Hashable, bool] = {}
        self._reasons: set[str] = set()

    def refuse(self, reason: str) -> None:
        """Warn, once for each reason, that the path without kernels is taken."""
        if reason not in self._reasons:
            self._reasons.add(reason)
            message = f"{self.name} takes the path without kernels: {reason}"
            warnings.warn(message, BandWarning, stacklevel=_level_of_caller())

    def verdict(self, variant: Hashable) -> bool | None:
        """Return what `passed` returned for a variant; None if its results have not been compared."""
        return self._passed.get(variant)

    def passed(
        self,
        variant: Hashable,
        results: Callable[[], Mapping[str, Tensor]],
        expected: Callable[[], Mapping[str, Tensor]],
        tolerances: Mapping[str, float],
    ) -> bool:
        """Return True if the kernel's first results agree with those of the path without kernels.

        Both are computed in the first call with a variant, and never again. If they differ, or if the kernel fails, a
        warning names the difference. The values are read, so the first call waits for the device. A call whose results
        are NaN without kernels decides nothing.

        Args:
            variant: What the compiled kernel depends on, and the device.
            results: Computes the kernel's results, by name. Each call has the same tensors as ``expected``.
            expected: Computes the results without kernels.
            tolerances: The largest difference of each floating-point result, as a share of the largest magnitude that
                is expected of it. Boolean results must be equal.
        """
        if variant not in self._passed:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                self.refuse(
                    "a CUDA graph is being captured; call it once before, so that its results are compared"
                )
                return False
            references = expected()
            if any(bool(x.isnan().any()) for x in references.values()):
                return False
            difference = _difference_from(references, results, tolerances)
            self._passed[variant] = difference is None
            if difference is not None:
                self.refuse(difference)
        return self._passed[variant]


def _level_of_caller() -> int:
    """Return the ``stacklevel`` with which the caller of this function warns about the code that called this folder."""
    package = __name__.rpartition(".kernels")[0] + "."
    level = 1
    frame = inspect.currentframe()
    frame = frame and frame.f_back
    while frame is not None and frame.f_globals.get("__name__", "").startswith(package):
        frame = frame.f_back
        level += 1
    return level


def _difference_from(
    references: Mapping[str, Tensor],
    results: Callable[[], Mapping[str, Tensor]],
    tolerances: Mapping[str, float],
) -> str | None:
    """Return the first difference of a function's results from the references; None if there is none."""
    try:
        found = results()
        for name, reference in references.items():
            difference = describe_difference(name, found[name], reference, tolerances.get(name, 0.0))
            if difference is not None:
                return difference
    except torch.OutOfMemoryError:
        raise  # not the kernel's fault, and the other path needs more
    except Exception as error:
        # Triton compiles in the first call, and raises errors of many kinds: of its own, of ptxas, of a missing C
        # compiler.
        return f"the kernel failed in its first call: {type(error).__name__}: {str(error)[:500]}"
    return None


def describe_difference(name: str, result: Tensor, expected: Tensor, tolerance: float) -> str | None:
    """Return a sentence's part that names the difference of two tensors; None if it is within the tolerance.

    Args:
        name: The name of the result.
        result: The kernel's result.
        expected: The result without kernels.
        tolerance: The largest difference of floating-point results, as a share of the largest magnitude expected.

    >>> describe_difference("loss", torch.tensor(1.5), torch.tensor(1.0), 1e-5)
    'loss differs by 0.5, and the tolerance is 1e-05 of 1'
    >>> describe_difference("clip decisions", torch.tensor([True, False]), torch.tensor([True, True]), 0.0)
    'clip decisions differ at 1 of 2 tokens, first at 1'
    """
    if result.shape != expected.shape:
        return f"{name} has the shape {tuple(result.shape)}, and without kernels {tuple(expected.shape)}"
    if not expected.is_floating_point():
        differs = (result != expected).flatten()
        count = int(differs.sum())
        if count == 0:
            return None
        first = int(differs.nonzero()[0])
        return f"{name} differ at {count:,} of {differs.numel():,} tokens, first at {first:,}"
    if not expected.numel():
        return None
    if result.isnan().any():
        return f"{name} is NaN at {int(result.isnan().sum()):,} of {result.numel():,} places"
    # Equal infinities do not differ.
    difference = torch.where(result == expected, 0.0, result.double() - expected.double()).abs().max().item()
    scale = expected.double().masked_fill(expected.isinf(), 0.0).abs().max().item()
    if difference <= tolerance * scale:
        return None
    return f"{name} differs by {difference:.3g}, and the tolerance is {tolerance:g} of {scale:.3g}"
