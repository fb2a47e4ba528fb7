"""What the adapters share: settings read, PPO's epsilons per token, metrics as numbers, and records."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bandpo.audit.recorder import Recorder
from bandpo.batch import Batch
from bandpo.errors import InvalidValue
from bandpo.loss import canonical_aggregation
from bandpo.methods import Method
from bandpo.objectives import DualClip, Surrogate
from bandpo.rule_check import check
from bandpo.rules import ClipRule
from bandpo.text import as_method

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

_logger = logging.getLogger("bandpo")


def read_method(
    prefix: str = "",
    method: Any = None,
    *,
    moves: bool = False,
    whole: bool = False,
    average: str | None = None,
) -> Method:
    """The method that a framework's settings name, refused where it cannot be had there.

    Args:
        prefix: Where the settings stand, for the error: ``trainer.algorithm.``.
        method: As for `bandpo.policy_loss`. By default PPO's surrogate under ``Band(KL(), 0.05)``.
        moves: Whether the trainer knows what a number may depend on.
        whole: Whether the loss is given all of an update at once.
        average: How the framework averages in any case, as `bandpo.aggregate` calls it. A method that has another
            average gets this one, and one line says so; None where that is not known, or the adapter sees to it.

    Raises:
        ValueError: it cannot be read, `bandpo.check` refuses it, a number depends on what a
            framework does not tell its loss, or the method needs all of an update and the loss gets parts; the
            message starts with the setting's name.

    >>> read_method(method="DAPO()").clip
    FixedClip(low=0.2, high=0.28)
    """
    read = _read_text if isinstance(method, str) else _read
    with naming(f"{prefix}method"):
        return read(method, moves, whole, average)


def read_bounds(
    prefix: str = "", method: Any = None, *, average: str | None = None, dual_clip: bool = False
) -> Method:
    """Return `read_method` for a framework that can be given bounds alone, since the rest of the loss is its own.

    Args:
        prefix: As for `read_method`.
        method: As for `read_method`.
        average: As for `read_method`.
        dual_clip: Whether the framework can be given the number of a dual clip too, see `dual_clip_of`.

    Raises:
        ValueError: see `read_method`; or the method is not PPO's surrogate on one ratio per token.

    >>> read_bounds(method="DAPO()").clip, read_bounds().clip
    (FixedClip(low=0.2, high=0.28), Band(divergence=KL(), radius=0.05, max_ratio=10.0))
    >>> read_bounds(method="BandPO()", dual_clip=True).objective
    DualClip(max_ratio=10.0, objective=Surrogate(beyond=0.0))
    """
    # The loss is given parts of an update, but PPO's surrogate looks at one token at a time.
    read = read_method(prefix, method, whole=True, average=average)
    objective = read.objective
    if dual_clip and isinstance(objective, DualClip):
        objective = objective.objective
    if (objective, read.level) != (Surrogate(), "token"):
        raise InvalidValue(
            f"{prefix}method: {method!r} is {read.objective!r} per {read.level}, but this framework's loss can only be "
            "given bounds per token; name a clip rule such as 'FixedClip(0.2, 0.28)'"
        )
    if read.clip.looks_at_tokens:
        raise InvalidValue(
            f"{prefix}method: {read.clip!r} makes its bounds of the tokens of a batch, but this framework's loss can "
            "only be given bounds of the old log-probability; name a clip rule such as 'FixedClip(0.2, 0.28)'"
        )
    return read


def dual_clip_of(method: Method) -> float | None:
    """Return the ratio above which a method's dual clip drops tokens with A < 0; None if it has no dual clip.

    >>> dual_clip_of(read_bounds(method="BandPO()", dual_clip=True)), dual_clip_of(read_bounds(method="DAPO()"))
    (10.0, None)
    """
    return method.objective.max_ratio if isinstance(method.objective, DualClip) else None


def has_bias(method: Method) -> bool:
    """Whether a part of the gradient does not scale with the advantage."""
    token = torch.full((1, 1), -1.0)
    return method.objective.bias(method.tokens(Batch.read(token, token, token))) is not None


@contextmanager
def naming(setting: str) -> Iterator[None]:
    """Puts the setting's name before the error that its value causes."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"{setting}: {error}") from error


def _read(method: Any, moves: bool, whole: bool, average: str | None) -> Method:
    read = as_method(method)
    for number in read.varying().values():
        if not moves:
            raise InvalidValue(
                f"{number!r} depends on {number.needs}, which this framework does not tell its loss; give "
                "a number, or train with `bandpo-lab train` or BandGRPOTrainer, which know it"
            )
    if read.whole_batch and not whole:
        raise InvalidValue(
            f"{read!r} needs all of an update at once, and this framework gives its loss parts; train with "
            "Tinker's forward_backward_custom or a loop of your own"
        )
    check(read)
    if average and read.aggregation and canonical_aggregation(read.aggregation) != average:
        _logger.warning(
            "%r has the average %s; this framework's own, %s, stands in its place",
            read,
            read.aggregation,
            average,
        )
    return read


_read_text = lru_cache(_read)  # verl reads its settings for each loss


class Epsilons(NamedTuple):
    """A clip rule in the form of PPO's hyperparameters, one pair per token."""

    logp_old: Float[Tensor, "*shape"]
    """The old log-probabilities, 0 where the mask is: frameworks mask by multiplying, and 0·NaN is NaN."""
    low: Float[Tensor, "*shape"]
    """``1 − lower``, so that ``1 − low`` is the lower bound."""
    high: Float[Tensor, "*shape"]
    """``upper − 1``."""


def epsilons(
    clip: ClipRule, logp_old: Float[Tensor, "*shape"], mask: Float[Tensor, "*shape"] | None = None
) -> Epsilons:
    """The pair to hand a framework that clamps at ``1 − low`` and ``1 + high``; float32 or wider, detached.

    Args:
        clip: The clip rule.
        logp_old: Log-probabilities (nats) that the bounds are anchored at, in the shape of the framework's ratio.
        mask: 0 (or False) for tokens that do not count, which may hold anything.

    Raises:
        ValueError: a counted log-probability is NaN or above 0.

    >>> from bandpo import FixedClip
    >>> epsilons(FixedClip(0.2, 0.28), torch.tensor([[-1.0, -2.0]])).high
    tensor([[0.2800, 0.2800]])
    """
    if mask is not None:
        logp_old = logp_old.masked_fill(mask == 0, 0.0)
    bounds = clip.bounds(logp_old)
    # expm1 keeps the digits that 1 − exp() would lose for the tight bounds of a likely token.
    return Epsilons(logp_old, -torch.expm1(bounds.log_lower), torch.expm1(bounds.log_upper))


def numbers(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Metrics as numbers, read from the device at once; 0 where no token counts, as a framework's own means are."""
    return dict(zip(metrics, torch.stack([*metrics.values()]).nan_to_num(nan=0.0).tolist(), strict=True))


def record(
    folder: str | None,
    framework: str,
    method: Method,
    *tensors: Tensor,
    logp_rollout: Tensor | None = None,
    sampler: bool = False,
    prompts: Iterable[Tensor] | None = None,
    sampling: Mapping[str, float | None] | None = None,
    **more: Any,
) -> None:
    """Write a loss to the folder that a framework's setting ``record`` names; nothing where it names none.

    Args:
        folder: Where the record goes. A process goes on with the file that it has begun.
        framework: What trains.
        method: The run's own.
        tensors: As `bandpo.policy_loss` takes them: new and old log-probabilities, advantages, mask.
        logp_rollout: The sampler's log-probabilities.
        sampler: Whether these are the old ones, by the framework's design or the method's.
        prompts: For each sequence the ids of its prompt, of which its ``group`` is made, where no number of it is
            known. Equal prompts have one number in all losses and processes.
        sampling: The engine's settings; None for those that are not set.
        more: As for `bandpo.Recorder.add`.
    """
    if folder:
        if prompts is not None:
            more["group"] = [_number_of_prompt(ids) for ids in prompts]
        known = tuple((name, value) for name, value in (sampling or {}).items() if value is not None)
        given = dict(zip(("logp", "logp_old", "advantages", "mask"), tensors, strict=True))
        more |= given | {"logp_rollout": given["logp_old"] if sampler else logp_rollout}
        _recorder(folder, framework, method, "rollout" if sampler else "trainer", known).add(**more)


def _number_of_prompt(ids: Tensor) -> int:
    """Return a number for the tokens of a prompt that a float holds too."""
    digest = blake2b(ids.detach().cpu().long().numpy().tobytes(), digest_size=6)
    return int.from_bytes(digest.digest(), "little")


@lru_cache
def _recorder(
    folder: str, framework: str, method: Method, anchor: str, sampling: tuple[tuple[str, float], ...]
) -> Recorder:
    return Recorder(folder, framework=framework, method=method, anchor=anchor, sampling=dict(sampling))
