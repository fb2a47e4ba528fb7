"""The settings of `BandGRPOTrainer`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from trl import GRPOConfig

from bandpo.errors import InvalidType, InvalidValue
from bandpo.integrations._adapt import composed
from bandpo.integrations._trl_audit import CLIPPED_LOSS_TYPES
from bandpo.methods import Method
from bandpo.objectives import ClippedWeight, Surrogate
from bandpo.rules import Capped, Sides, Unclipped
from bandpo.text import as_method, as_text, parse


class _Replaced(float):
    """TRL's ``epsilon`` beside a method: it reads as a number, and stops a trainer that would clip with it."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise InvalidType(
            "this config names a clip rule or method, which only BandGRPOTrainer knows; use it as trainer"
        )

    __rsub__ = __radd__ = __sub__ = __add__ = _refuse

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:  # torch.clamp(x, max=epsilon)
        cls()._refuse()


@dataclass
class BandGRPOConfig(GRPOConfig):
    """`GRPOConfig` with a method, or a clip rule and an objective, in place of ``epsilon`` and ``epsilon_high``.

    Attributes:
        method: A method of `bandpo.methods` as text (``"DPPO()"``, ``"SAPO(1.0, 1.05)"``) or as an object, in place of
            ``clip`` and ``objective``. A method of sequences sets ``importance_sampling_level``. The average is
            ``loss_type``'s.
        clip: The clip rule, as text (``"FixedClip(0.2, 0.28)"``) or as a `ClipRule`; ``Band(KL(), 0.05)`` by default.
            Its radius may be one of `bandpo.radius`. With ``importance_sampling_level="sequence"`` it bounds GSPO's
            ratio, see `bandpo.policy_loss`.
        objective: What the loss makes of the rule, as text or as an `Objective`; PPO's ``Surrogate()`` by default.
        anchor: Whose log-probabilities the bounds surround: ``trainer`` (its own at generation time, to which the
            ratio refers too) or ``rollout`` (those that vLLM or a ``rollout_func`` gives).
        audit_steps: The losses of every so-many-th optimiser step are audited; 0 for none.
        audit_detail: Whether the console and trackers get all ``audit/…`` metrics, and not only the twelve of
            `bandpo.audit.metrics.LOGGED`.
        record: Folder to which the tokens of every loss are written, see `bandpo.Recorder`; ``bandpo audit`` replays
            it under any rule. A run that is resumed goes on in the same folder.

    Raises:
        ValueError: a text cannot be read; a ``loss_type`` that is an objective of its own; a combination that cannot
            work; ``epsilon`` or ``epsilon_high`` given too.

    >>> BandGRPOConfig("out", clip="FixedClip(0.2, 0.28)", bf16=False, use_cpu=True).clip
    'FixedClip(low=0.2, high=0.28)'
    """

    method: str | None = field(
        default=None,
        metadata={
            "help": "A method in place of clip and objective: 'DPPO()', 'CISPO()', 'GSPO()', 'SAPO(1.0, 1.05)', ..."
        },
    )
    clip: str | None = field(
        default=None,
        metadata={
            "help": "Clip rule, e.g. 'Band(KL(), 0.05)' (the default), 'Band(KL(), Linear(0.05, 0.01))', "
            "'FixedClip(0.2, 0.28)', 'DCPO', 'Unclipped()'."
        },
    )
    objective: str | None = field(
        default=None,
        metadata={
            "help": "What the loss makes of the clip rule: 'Surrogate()' (PPO, the default), 'Surrogate(0.1)' (soft "
            "clip), 'Masked(20)' (DPPO), 'ClippedWeight()' (CISPO), 'Quadratic()', ..."
        },
    )
    anchor: str = field(
        default="trainer",
        metadata={
            "help": "Whose log-probabilities the bounds surround: 'trainer', or 'rollout' (vLLM's or a rollout_func's)."
        },
    )

    audit_steps: int = field(
        default=1,
        metadata={"help": "Audit the losses of every so-many-th optimiser step; 0 for none."},
    )
    audit_detail: bool = field(
        default=False,
        metadata={
            "help": "Send all audit metrics to the console and trackers, not only the twelve that matter."
        },
    )
    record: str | None = field(
        default=None,
        metadata={
            "help": "Folder for the tokens of every loss, which `bandpo audit` replays under any rule."
        },
    )

    def __post_init__(self) -> None:
        if self.audit_steps < 0:
            raise InvalidValue(f"audit_steps must be at least 0 (no audit), got {self.audit_steps}")
        if self.method is None:
            parts = composed(clip=self.clip, objective=self.objective)
            self.clip, self.objective = as_text(parts.clip), as_text(parts.objective)
        else:
            parts = composed(self.method, clip=self.clip, objective=self.objective)
            self.method = as_text(parse(self.method) if isinstance(self.method, str) else self.method)
            if parts.level == "token" and self.importance_sampling_level != "token":
                raise InvalidValue(
                    f"importance_sampling_level={self.importance_sampling_level!r}, but {self.method} is a method of "
                    "tokens; write clip= and objective= for a combination of your own"
                )
            self.importance_sampling_level = parts.level
        super().__post_init__()
        chosen = self.method or f"objective={self.objective!r}"
        plain = parts.objective == Surrogate()
        if self.loss_type not in CLIPPED_LOSS_TYPES:
            raise InvalidValue(
                f"loss_type={self.loss_type!r} is an objective of its own; choose an average for {chosen}, "
                f"one of {', '.join(CLIPPED_LOSS_TYPES[:-1])}, or for {self.loss_type} its method, e.g. "
                f"method='{self.loss_type.upper()}()'"
            )
        if self.loss_type == "cispo" and not plain:
            raise InvalidValue(f"{chosen} and loss_type='cispo' both say how to clip; leave one out")
        if self.delta is not None and not (plain and self.delta > 1):
            other = "is no bound above 1" if plain else f"and {chosen} both say how to clip"
            raise InvalidValue(f"delta={self.delta} {other}; write the dual clip as objective='DualClip(3)'")
        if self.anchor not in ("trainer", "rollout"):
            raise InvalidValue(f"anchor must be 'trainer' or 'rollout', got {self.anchor!r}")
        if (self.epsilon, self.epsilon_high) != (0.2, None):
            raise InvalidValue(
                f"epsilon={self.epsilon}, epsilon_high={self.epsilon_high} have no effect beside a clip rule or "
                "method; write the interval as clip='FixedClip(low, high)'"
            )
        self.epsilon = _Replaced(self.epsilon)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"epsilon": float(self.epsilon)}

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"BandGRPOConfig has no {name!r}; it is a GRPOConfig for BandGRPOTrainer, not for another trainer"
        )

    @property
    def parts(self) -> Method:
        """The method, as TRL's loss is to be steered by it."""
        parts = as_method(self.method) if self.method else composed(clip=self.clip, objective=self.objective)
        parts = replace(parts, level=self.importance_sampling_level)
        if self.loss_type == "cispo":  # which has no lower bound
            parts = replace(parts, clip=Sides(Unclipped(), parts.clip), objective=ClippedWeight())
        if self.delta is not None:  # which caps positive advantages too
            parts = replace(parts, clip=Capped(parts.clip, self.delta))
        return parts

    @property
    def updates_per_batch(self) -> int:
        """Optimiser steps made on each generated batch. With 1 the ratio is always 1 and no rule can act."""
        return max(
            1, (self.steps_per_generation or 1) * self.num_iterations // self.gradient_accumulation_steps
        )
