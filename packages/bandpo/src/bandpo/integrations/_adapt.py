"""Code shared by the integrations: reading of methods, PPO's epsilons per token, metrics as floats, and records."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bandpo.audit.recorder import Recorder
from bandpo.certificate.tokens import LossBatch, trainer_batch
from bandpo.core.aggregation import canonical_aggregation
from bandpo.core.batch import Batch
from bandpo.core.errors import InvalidValue
from bandpo.core.methods import Method
from bandpo.core.objectives import DualClip, Surrogate
from bandpo.core.rule_check import check
from bandpo.core.rules import ClipRule
from bandpo.core.schedules import Controller, TrainingState
from bandpo.core.text import as_method

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

_logger = logging.getLogger("bandpo")


PROBABILITIES = (0.01, 0.1, 0.5, 0.9, 0.99)
"""Old probabilities, from a rare token to an almost certain one, at which a rule's bounds are computed."""
ANY_METHOD = (
    "train it with TRL, verl or Tinker, which take any method; here name a clip rule, as in Band(KL(), 0.05)"
)
"""The remedy for a method in a framework that takes bounds only."""
FAR = 10
"""A ratio that hardly any token reaches: the cap of the BandPO paper, and the dual clip of its authors."""


def read_method(
    prefix: str = "",
    method: Any = None,
    *,
    has_state: bool = False,
    whole_batch: bool = False,
    aggregation: str | None = None,
) -> Method:
    """Return the method that a framework's settings name, and raise an error if the framework cannot honour it.

    Args:
        prefix: The path of the settings, for error messages: ``trainer.algorithm.``.
        method: A method, a clip rule, or the text of one, as for `bandpo.policy_loss`. By default PPO's surrogate under
            ``Band(KL(), 0.05)``.
        has_state: True if the trainer supplies the training state that schedules and controllers need.
        whole_batch: True if one call of the loss gets all tokens of an update.
        aggregation: The loss aggregation that the framework always applies, as `bandpo.aggregate` names it. It replaces
            the method's own, with a warning in the log. None if the integration applies the method's.

    Raises:
        ValueError: the method cannot be read; `bandpo.check` refuses it; its clip can never act, see
            `check_clip_can_act`; one of its numbers needs a training state that the framework does not supply; or it
            needs all tokens of an update and the loss gets only some of them. The message starts with the setting's
            name.

    >>> read_method(method="DAPO()").clip
    FixedClip(low=0.2, high=0.28)
    """
    # Only text can be cached: a method or a clip rule need not be hashable.
    validate = _validate_text if isinstance(method, str) else _validate
    with prefix_errors(f"{prefix}method"):
        return validate(method, has_state, whole_batch, aggregation)


def read_bounds(
    prefix: str = "",
    method: Any = None,
    *,
    aggregation: str | None = None,
    dual_clip: bool = False,
    to_sampler: str = "",
) -> Method:
    """Return the method of a framework whose loss accepts bounds for the ratio and fixes everything else.

    Args:
        prefix: As for `read_method`.
        method: As for `read_method`.
        aggregation: As for `read_method`.
        dual_clip: True if the framework's loss also accepts the bound of a dual clip, see `dual_clip_of`.
        to_sampler: The setting of the framework that makes the ratio refer to the sampler's log-probabilities, as an
            imperative, if the method cannot do so. A method with ``old_policy='rollout'`` is then refused.

    Raises:
        ValueError: see `read_method`; the method is not PPO's surrogate with one ratio per token; or its ratio refers
            to the sampler, and a setting of the framework determines this.

    >>> read_bounds(method="DAPO()").clip, read_bounds().clip
    (FixedClip(low=0.2, high=0.28), Band(divergence=KL(), radius=0.05, max_ratio=10.0))
    >>> read_bounds(method="BandPO()", dual_clip=True).objective
    DualClip(max_ratio=10.0, objective=Surrogate(beyond=0.0))
    """
    # PPO's surrogate treats each token by itself, so it does not matter how an update is split into micro-batches.
    result = read_method(prefix, method, whole_batch=True, aggregation=aggregation)

    objective = result.objective
    if dual_clip and isinstance(objective, DualClip):
        objective = objective.objective
    if objective != Surrogate() or result.level != "token":
        raise InvalidValue(
            f"{prefix}method: {method!r} is {result.objective!r} per {result.level}, but this framework's loss can only"
            f" be given bounds per token; {ANY_METHOD}"
        )
    if result.clip.depends_on_tokens:
        raise InvalidValue(
            f"{prefix}method: {result.clip!r} computes its bounds from the tokens of a batch, but this framework's loss"
            f" can only be given bounds of the old log-probability; {ANY_METHOD}"
        )
    if to_sampler and result.old_policy == "rollout":
        raise InvalidValue(
            f"{prefix}method: {method!r} refers to the sampler's log-probabilities, which a setting of this framework "
            f"determines: {to_sampler}, and leave out old_policy='rollout'"
        )
    return result


def dual_clip_of(method: Method) -> float | None:
    """Return the ratio above which a method's dual clip drops tokens with A < 0; None if it has no dual clip.

    >>> dual_clip_of(read_bounds(method="BandPO()", dual_clip=True)), dual_clip_of(read_bounds(method="DAPO()"))
    (10.0, None)
    """
    return method.objective.max_ratio if isinstance(method.objective, DualClip) else None


def has_bias(method: Method) -> bool:
    """Return True if a part of the method's gradient does not scale with the advantage."""
    token = torch.full((1, 1), -1.0)
    tokens = method.tokens(Batch.read(token, token, token))
    return method.objective.bias(tokens) is not None


@contextmanager
def prefix_errors(setting: str) -> Iterator[None]:
    """Prefix TypeErrors and ValueErrors of the block with the name of a setting, and raise them as InvalidValue."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"{setting}: {error}") from error


def _validate(method: Any, has_state: bool, whole_batch: bool, aggregation: str | None) -> Method:
    """Return a method after the checks of `read_method`, whose arguments these are."""
    result = as_method(method)

    for number in result.varying().values():
        if not has_state:
            raise InvalidValue(
                f"{number!r} depends on {number.needs}, which this framework does not pass to its loss; give a number, "
                "or train with `bandpo-lab train` or BandGRPOTrainer, which know it"
            )
    if result.whole_batch and not whole_batch:
        raise InvalidValue(
            f"{result!r} needs all tokens of an update at once, and this framework splits an update into several calls "
            "of its loss; train it with TRL or verl, where an update that fits is one call, with Tinker's "
            "forward_backward_custom or a loop of your own"
        )
    check(result)
    check_clip_can_act(result)

    if aggregation and result.aggregation and canonical_aggregation(result.aggregation) != aggregation:
        _logger.warning(
            "%r aggregates its loss by %s; this framework replaces that with its own %s",
            result,
            result.aggregation,
            aggregation,
        )
    return result


def check_clip_can_act(method: Method) -> None:
    """Check that a method's clip rule has no bound that training never reaches, such as that of a mistyped number.

    A bound above 1 is never reached if at each of `PROBABILITIES` p it is above nine tenths of the largest ratio, 1/p
    or `FAR`. A bound below 1 is never reached if it is below 1/`FAR` everywhere. A rule without a bound on a side
    is meant so. Bounds that depend on the tokens of a batch are not known before training. A schedule or a controller
    is checked at both ends of its range.

    Raises:
        ValueError: if the clip rule has such a bound.

    >>> check_clip_can_act(as_method("FixedClip(0.2, 28)"))
    Traceback (most recent call last):
    bandpo.core.errors.InvalidValue: at no probability does FixedClip(low=0.2, high=28) block a ratio above 1 that \
training reaches. Is a number mistyped? No bound on a side is low=1 or high=inf
    """
    if method.clip.depends_on_tokens:
        return
    p = torch.tensor(PROBABILITIES, dtype=torch.float64)
    largest = (1 / p).clamp(max=FAR)
    never_above = True
    never_below = True
    for clip in _extremes(method.clip):
        if clip.varying():
            # A schedule of the user's own, whose value depends on the tokens.
            return
        bounds = clip.bounds(p.log()[None])
        never_above &= bool((bounds.upper > 0.9 * largest).all() and bounds.upper.isfinite().any())
        never_below &= bool((bounds.lower < 1 / FAR).all() and bounds.lower.any())
    if never_above or never_below:
        raise InvalidValue(
            f"at no probability does {method.clip!r} block a ratio {'above' if never_above else 'below'} 1 that "
            "training reaches. Is a number mistyped? No bound on a side is low=1 or high=inf"
        )


def check_ratio_moves(
    method: Method, updates: float, setting: str, fix: str, *, accepted: bool = False, accept: str = ""
) -> str:
    """Check that a ratio can differ from 1, so that a method can differ from the plain policy gradient.

    Args:
        method: The method of the run.
        updates: The number of optimiser steps with the same old policy. At the first of them every ratio is 1, unless
            the method's ratio refers to the sampler's log-probabilities.
        setting: The setting that determines the number.
        fix: The remedy that keeps the method, as an imperative.
        accepted: The value of the setting ``accept_idle_clip``, for the baseline of a sweep.
        accept: The text of that setting in the framework, such as ``accept_idle_clip=True``, which is the default.

    Returns:
        A line for the run's description, if the run is accepted though no clip can act; otherwise empty.

    Raises:
        ValueError: every ratio is 1, `is_idle_at_ratio_one`, and this is not accepted.

    >>> check_ratio_moves(as_method("GPG()"), 1, "mini_batch_size", "make it smaller")
    ''
    >>> check_ratio_moves(as_method("DAPO()"), 1, "mini_batch_size", "make it smaller", accepted=True)
    'DAPO(low=0.2, high=0.28) never acts, as every ratio is 1 (accept_idle_clip=True)'
    >>> check_ratio_moves(as_method("Band(KL(), 0.05)"), 1, "mini_batch_size", "make it smaller")
    Traceback (most recent call last):
    bandpo.core.errors.InvalidValue: mini_batch_size: there is one update for each batch, so every ratio is 1 and \
Band(divergence=KL(), radius=0.05, max_ratio=10.0) never acts: make it smaller. For a baseline in which it never acts, \
set accept_idle_clip=True
    """
    if updates > 1 or method.old_policy == "rollout" or not is_idle_at_ratio_one(method):
        return ""
    accept = accept or "accept_idle_clip=True"
    if accepted:
        return f"{method!r} never acts, as every ratio is 1 ({accept})"
    cause = f"there is one update for each batch, so every ratio is 1 and {method!r} never acts"
    raise InvalidValue(f"{setting}: {cause}: {fix}. For a baseline in which it never acts, set {accept}")


def describe_anchor(
    sampler: bool,
    setting: str,
    *,
    asynchronous: bool | None = False,
    fix: str = "",
    other: str = "the trainer's log-probabilities before the first update on a batch",
) -> str:
    """Return the line of a run's description about the log-probabilities that its ratio refers to.

    The ratio should refer to the policy that sampled. In a synchronous run the trainer's own log-probabilities before
    the first update are those of this policy, up to the rounding of sampler and trainer. In an asynchronous run they
    are not. If every ratio is then 1, `check_ratio_moves` refuses the run; otherwise this line says what follows.

    Args:
        sampler: True if the ratio refers to the sampler's log-probabilities.
        setting: The setting, with its value, that determines this.
        asynchronous: True if older weights sampled the data; None if the adapter cannot know.
        fix: The setting that makes the ratio refer to the sampler's, as an imperative. Needed unless ``sampler``, or
            the run is synchronous.
        other: The log-probabilities that the ratio refers to otherwise.

    >>> describe_anchor(True, "bypass_mode=true")
    "the sampler's log-probabilities (bypass_mode=true)"
    >>> describe_anchor(False, "bypass_mode=false")
    "the trainer's log-probabilities before the first update on a batch (bypass_mode=false)"
    >>> print(describe_anchor(False, "the default", asynchronous=True, fix="set bypass_mode=true"))
    the trainer's log-probabilities before the first update on a batch (the default). Training is asynchronous, and \
older weights sampled: what changed since is in no ratio, and no clip bounds it. For ratios that refer to the policy \
that sampled, set bypass_mode=true
    """
    if sampler:
        return f"the sampler's log-probabilities ({setting})"
    line = f"{other} ({setting})"
    if asynchronous is False:
        return line
    if asynchronous is None:
        cause = "If training is asynchronous, older weights sampled"
    else:
        cause = "Training is asynchronous, and older weights sampled"
    consequence = "what changed since is in no ratio, and no clip bounds it"
    return f"{line}. {cause}: {consequence}. For ratios that refer to the policy that sampled, {fix}"


def check_anchor(
    method: Method,
    updates: float,
    *,
    sampler: bool,
    setting: str,
    asynchronous: bool | None,
    to_sampler: str,
    more_updates: str,
    accepted: bool,
    accept: str,
) -> list[str]:
    """Check that a ratio can differ from 1, and return the lines of a run's description about its ratio.

    Args:
        method: The method of the run.
        updates: The number of optimiser steps with the same old policy.
        sampler: As for `describe_anchor`.
        setting: As for `describe_anchor`.
        asynchronous: As for `describe_anchor`.
        to_sampler: The setting that makes the ratio refer to the sampler's log-probabilities, as an imperative.
        more_updates: The setting that makes more updates on each batch, as an imperative.
        accepted: As for `check_ratio_moves`.
        accept: As for `check_ratio_moves`.

    Raises:
        ValueError: every ratio would be 1, see `check_ratio_moves`.

    >>> arguments = {"setting": "the default", "to_sampler": "set rollout=true", "more_updates": "set epochs=2"}
    >>> arguments |= {"accepted": False, "accept": "accept_idle_clip=true"}
    >>> check_anchor(as_method("DAPO()"), 1, sampler=True, asynchronous=True, **arguments)
    ["anchor      the sampler's log-probabilities (the default)"]
    >>> check_anchor(as_method("DAPO()"), 1, sampler=False, asynchronous=True, **arguments)
    Traceback (most recent call last):
    bandpo.core.errors.InvalidValue: anchor: there is one update for each batch, so every ratio is 1 and \
DAPO(low=0.2, high=0.28) never acts: training is asynchronous, so set rollout=true. For a baseline in which it never \
acts, set accept_idle_clip=true
    """
    if asynchronous is None:
        fix = f"{more_updates}; or, if training is asynchronous, {to_sampler}"
    else:
        fix = f"training is asynchronous, so {to_sampler}" if asynchronous else more_updates
    idle = check_ratio_moves(
        method, math.inf if sampler else updates, "anchor", fix, accepted=accepted, accept=accept
    )
    lines = [f"anchor      {describe_anchor(sampler, setting, asynchronous=asynchronous, fix=to_sampler)}"]
    return [*lines, f"clip        {idle}"] if idle else lines


def is_idle_at_ratio_one(method: Method) -> bool:
    """Return True if a method is the plain policy gradient while every ratio is 1, and another one otherwise.

    The plain policy gradient has the same weight ``w`` for all tokens, and no bias. True are all methods with bounds
    around 1, and those with a soft clip such as `SAPO`. Methods without any clip are not, as they promise nothing else:
    `Unclipped` (w = r) and `GPG` (w = 1). Nor are methods that change the gradient at a ratio of 1 too, such as
    `ClipCov`, which drops tokens by their covariance.

    >>> texts = ("BandPO()", "SAPO()", "GPG()", "Unclipped()", "ClipCov()")
    >>> [is_idle_at_ratio_one(as_method(text)) for text in texts]
    [True, True, False, False, False]
    """
    tokens = trainer_batch(torch.device("cpu"))
    at_one, bias_at_one, _ = _gradient(method, tokens, tokens.logp)
    is_multiple_of_plain = torch.allclose(at_one, at_one.max() * tokens.used)
    if not is_multiple_of_plain or bias_at_one.any():
        return False
    weight, bias, ratio = _gradient(method, tokens, tokens.logp_old)
    has_no_clip = torch.allclose(weight, ratio) or torch.equal(weight, tokens.used)
    return bool(bias.any()) or not has_no_clip


def _gradient(method: Method, tokens: LossBatch, logp_old: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weight ``w``, the bias ``b`` and the ratio of each token, 0 for those that do not count.

    The derivative of a token's loss with respect to its log-probability is ``−(w·A + b)``.

    Args:
        method: The method.
        tokens: The tokens, with their current log-probabilities.
        logp_old: The old log-probabilities (nats), of the same shape.
    """
    zeros = torch.zeros(len(tokens.mask), dtype=torch.long)
    state = TrainingState(progress=0.0, controller_state={}, group=zeros, age=zeros)
    batch = Batch.read(
        tokens.logp, logp_old, tokens.sequence_advantages, tokens.used, entropy=tokens.entropy, state=state
    )
    read = method.tokens(batch)
    objective = method.objective.resolve(state, strict=False)
    bias = objective.bias(read)
    bias = torch.zeros_like(tokens.used) if bias is None else bias * tokens.used
    return objective.weight(read) * tokens.used, bias, read.ratio * tokens.used


def _extremes(clip: ClipRule) -> list[ClipRule]:
    """Return a clip rule with each schedule and controller at the ends of its range; the rule itself without any."""
    controllers = [number for number in clip.varying().values() if isinstance(number, Controller)]
    extremes: list[ClipRule] = []
    for end in (0, 1):
        controller_state = {repr(controller): controller.range[end] for controller in controllers}
        state = TrainingState(progress=float(end), controller_state=controller_state)
        extremes.append(clip.resolve(state, strict=False))
    return extremes


_validate_text = lru_cache(_validate)  # verl reads its settings for each loss


class Epsilons(NamedTuple):
    """A clip rule in the form of PPO's hyperparameters, one pair per token."""

    logp_old: Float[Tensor, "*shape"]
    """The old log-probabilities, with 0 at padding: frameworks mask by multiplying, and 0·NaN is NaN."""
    low: Float[Tensor, "*shape"]
    """``1 − lower``, so that ``1 − low`` is the lower bound."""
    high: Float[Tensor, "*shape"]
    """``upper − 1``, so that ``1 + high`` is the upper bound."""


def epsilons(
    clip: ClipRule, logp_old: Float[Tensor, "*shape"], mask: Float[Tensor, "*shape"] | None = None
) -> Epsilons:
    """Return the epsilons for a framework that clamps the ratio at ``1 − low`` and ``1 + high``.

    The epsilons are in float32 or wider, and detached.

    Args:
        clip: The clip rule.
        logp_old: Old log-probabilities (nats) from which the bounds are computed, in the shape of the framework's
            ratio.
        mask: 0 (or False) for padding, which is ignored and may contain NaN.

    Raises:
        ValueError: a log-probability that is not padding is NaN or above 0.

    >>> from bandpo import FixedClip
    >>> epsilons(FixedClip(0.2, 0.28), torch.tensor([[-1.0, -2.0]])).high
    tensor([[0.2800, 0.2800]])
    """
    if mask is not None:
        logp_old = logp_old.masked_fill(mask == 0, 0.0)
    bounds = clip.bounds(logp_old)
    # expm1 keeps the digits that 1 − exp() would lose for the tight bounds of a likely token.
    return Epsilons(logp_old, -torch.expm1(bounds.log_lower), torch.expm1(bounds.log_upper))


def as_floats(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Return metrics as floats, with a single transfer from the device.

    NaN, the mean over no tokens, becomes 0, as in the frameworks' own masked means.
    """
    values = torch.stack([*metrics.values()]).nan_to_num(nan=0.0)
    return dict(zip(metrics, values.tolist(), strict=True))


def record(
    folder: str | None,
    framework: str,
    method: Method,
    *tensors: Tensor,
    logp_rollout: Tensor | None = None,
    old_is_rollout: bool = False,
    prompts: Iterable[Tensor] | None = None,
    sampling: Mapping[str, float | None] | None = None,
    **fields: Any,
) -> None:
    """Write the tokens of a loss to the folder of a framework's setting ``record``; do nothing without a folder.

    Each process continues the file that it opened at its first call.

    Args:
        folder: The folder of the record.
        framework: The name of the framework.
        method: The method of the run.
        tensors: New and old log-probabilities, advantages and mask, as for `bandpo.policy_loss`.
        logp_rollout: The sampler's log-probabilities.
        old_is_rollout: True if the old log-probabilities are the sampler's, because of the framework or the method.
        prompts: The token ids of each sequence's prompt. Their hash becomes the sequence's ``group``, so equal prompts
            have the same number in all losses and processes. For frameworks that do not number their prompts.
        sampling: Settings of the sampler; None for those that are not set.
        fields: Further arguments of `bandpo.audit.Recorder.add`.
    """
    if not folder:
        return
    if prompts is not None:
        fields["group"] = [_hash_of_prompt(ids) for ids in prompts]

    fields |= dict(zip(("logp", "logp_old", "advantages", "mask"), tensors, strict=True))
    fields["logp_rollout"] = fields["logp_old"] if old_is_rollout else logp_rollout

    settings = tuple((name, value) for name, value in (sampling or {}).items() if value is not None)
    anchor = "rollout" if old_is_rollout else "trainer"
    _recorder(folder, framework, method, anchor, settings).add(**fields)


def _hash_of_prompt(ids: Tensor) -> int:
    """Return a hash of 48 bits for the tokens of a prompt, which a float64 represents exactly."""
    digest = blake2b(ids.detach().cpu().long().numpy().tobytes(), digest_size=6)
    return int.from_bytes(digest.digest(), "little")


@lru_cache
def _recorder(
    folder: str, framework: str, method: Method, anchor: str, sampling: tuple[tuple[str, float], ...]
) -> Recorder:
    """Return the recorder of this process for a run, the same at each call."""
    return Recorder(folder, framework=framework, method=method, anchor=anchor, sampling=dict(sampling))
