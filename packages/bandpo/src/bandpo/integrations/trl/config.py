"""The configs of TRL's trainers with a method in place of the epsilons."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, Self, cast

from trl import GRPOConfig

from bandpo.core.aggregation import TRL_LOSS_TYPES, canonical_aggregation
from bandpo.core.errors import InvalidType, InvalidValue
from bandpo.core.methods import Method
from bandpo.core.objectives import ClippedWeight, GammaWeight, RatioCap, SigmoidGate, Surrogate
from bandpo.core.rules import ClipRule, FixedClip, TwoSided, Unclipped
from bandpo.core.text import as_method, as_text
from bandpo.integrations._adapt import check_ratio_moves, read_method
from bandpo.integrations.stock_methods import TRL_CLIPS
from bandpo.integrations.trl.trl_names import GRPO

LOSS_TYPES = {aggregation: name for name, aggregation in TRL_LOSS_TYPES.items()}
"""TRL's ``loss_type`` for each loss aggregation. Where two have it, the one that normalises over the whole update."""
AGGREGATIONS = {"cispo": "dapo", "vespo": "dapo", "sapo": "grpo"}
"""For each of TRL's objectives with a ``loss_type`` of its own, the ``loss_type`` with the same loss aggregation."""

OBJECTIVES = {
    "sapo_": "method='SAPO(POSITIVE, NEGATIVE)'",
    "vespo_": "method='VESPO(K_POS, LAMBDA_POS, ...)'",
}
"""The prefix of the settings of each of TRL's own objectives, and the method to write instead."""

REMOVED = {
    "fused_logits": "fused_logits is no longer a setting; leave it out, as TRL from 1.15 on always computes "
    "log-probabilities without storing logits, and update an older TRL"
}
"""The settings of earlier versions, and what is said of them."""


def native_settings(method: Method, loss_type: str) -> dict[str, Any] | None:
    """Return the settings under which TRL's own loss is a method's loss; None if there are none.

    Args:
        method: The method.
        loss_type: The loss aggregation, one of TRL's ``loss_type``s that clamp the ratio.
    """
    clip = method.clip
    objective = method.objective
    if method.varying() or method.old_policy != "trainer" or method.bound_level not in (None, method.level):
        return None
    if isinstance(clip, FixedClip):
        bounds = {"loss_type": loss_type, "epsilon": clip.low, "epsilon_high": clip.high}
        if objective == Surrogate():
            return bounds
        if isinstance(objective, RatioCap):
            return bounds | {"delta": objective.max_ratio}
    upper = _upper_bound(clip)
    if upper is not None and objective == ClippedWeight() and loss_type == AGGREGATIONS["cispo"]:
        return {"loss_type": "cispo", "epsilon_high": upper}
    if clip == Unclipped() and isinstance(objective, SigmoidGate) and loss_type == AGGREGATIONS["sapo"]:
        return {
            "loss_type": "sapo",
            "sapo_temperature_pos": objective.positive,
            "sapo_temperature_neg": objective.negative,
        }
    if clip == Unclipped() and isinstance(objective, GammaWeight) and loss_type == AGGREGATIONS["vespo"]:
        names = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
        values = [getattr(objective, parameter.name) for parameter in fields(objective)]
        return {"loss_type": "vespo"} | dict(zip(names, values, strict=True))
    return None


def _upper_bound(clip: ClipRule) -> float | None:
    """Return the upper bound of a fixed clip without a lower bound, such as TRL's CISPO; None for other rules."""
    if isinstance(clip, TwoSided) and clip.lower == Unclipped():
        clip = clip.upper
    elif not (isinstance(clip, FixedClip) and clip.low == 1):
        return None
    return 1 + clip.high if isinstance(clip, FixedClip) else None


class _ReplacedEpsilon(float):
    """The value of ``epsilon`` beside a method: a float that raises an error in a trainer that would clip with it.

    TRL's GRPOTrainer accepts any config derived from GRPOConfig, and would train GRPO under the method's name. Each
    clip of TRL computes ``1 - epsilon`` or passes ``epsilon`` to ``torch.clamp``, so both raise the error.
    BandGRPOTrainer replaces the value before TRL's loss.
    """

    def _refuse(self, *_: Any) -> NoReturn:
        raise InvalidType(
            "this config names a clip rule or method, which only BandGRPOTrainer supports (with a BandAsyncGRPOConfig, "
            "BandAsyncGRPOTrainer); train with it, and call super()._compute_loss in a subclass of it"
        )

    __rsub__ = __radd__ = __sub__ = __add__ = _refuse

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:  # torch.clamp(x, max=epsilon)
        cls()._refuse()


def _setting(default: Any, help_text: str) -> Any:
    """Return a dataclass field with a default and a help text, which TRL's command-line parser shows."""
    return field(default=default, metadata={"help": help_text})


@dataclass
class MethodSettings:
    """The settings that bandpo adds to a TRL config: a method in place of the epsilons, its audit and its record."""

    method: str | None = _setting(
        None,
        "A clip rule or a method: 'Band(KL(), 0.05)' (the default), 'Band(KL(), Linear(0.05, 0.01))', "
        "'FixedClip(0.2, 0.28)', 'Unclipped()', 'DPPO()', 'SAPO(1.0, 1.05)', "
        "'Method(FixedClip(0.2), DropOutside(20))', ...",
    )
    epsilon: float | None = _setting(None, "Refused; the interval is part of method, as in 'FixedClip(0.2)'.")
    certify: str = _setting(
        "stop",
        "Reaction to a gradient that is not the method's: 'stop', 'warn', or 'off' (not compared).",
    )
    audit_steps: int = _setting(1, "Audit one in this many optimiser steps; 0 for none.")
    audit_detail: bool = _setting(
        False, "Log all audit metrics to the console and trackers, not only the twelve most important ones."
    )
    record: str | None = _setting(
        None, "Folder for the tokens of every loss, which `bandpo audit` replays under any rule."
    )
    watched: str = _setting(
        "warn", "Reaction to a failed check of `rlvet diagnose`: 'warn', 'stop' or 'off'."
    )

    def set_method(self, method: Method) -> None:
        """Set ``method`` to the text of a method, and check that no epsilon is set beside it."""
        self.method = as_text(method)
        self._replace_epsilons({})

    def _replace_epsilons(self, native: dict[str, Any]) -> None:
        """Set the epsilons of a method, after a check that the user has not set others.

        Args:
            native: TRL's settings for the method. If they have no ``epsilon``, it is set to a `_ReplacedEpsilon`, which
                raises an error in a trainer that would clip with it.
        """
        config = cast("Any", self)
        refused: list[str] = []
        for name in ("epsilon", "epsilon_high"):
            value = getattr(config, name)
            is_set = value is not None and not isinstance(value, _ReplacedEpsilon)
            if is_set and value != native.get(name):
                refused.append(f"{name}={value}")
        if refused:
            low = config.epsilon if isinstance(config.epsilon, float) else 0.2
            high = low if config.epsilon_high is None else config.epsilon_high
            pronoun = "it" if len(refused) == 1 else "them"
            raise InvalidValue(
                f"{', '.join(refused)} would have no effect beside method={self.method!r}, which has its own bounds: "
                f"leave {pronoun} out; or, to clip at this interval instead, write "
                f"method='FixedClip({low:g}, {high:g})'"
            )
        config.epsilon = native.get("epsilon", _ReplacedEpsilon(0.2))
        config.epsilon_high = native.get("epsilon_high")

    def _check_added_settings(self) -> None:
        """Check the settings of the audit and of the probe."""
        if self.audit_steps < 0:
            raise InvalidValue(f"audit_steps must be at least 0 (no audit), got {self.audit_steps}")
        self._check_choice("certify", "stop", "warn", "off")

    def _check_choice(self, name: str, *allowed: str) -> None:
        """Check that a setting has one of the allowed values."""
        if getattr(self, name) not in allowed:
            raise InvalidValue(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")

    def _check_whole_batch(self, method: Method, size: str) -> None:
        """Check that a method that depends on all tokens of an update gets all of them in one loss.

        Args:
            method: The method.
            size: The setting with the size of a micro-batch.
        """
        config = cast("Any", self)
        if method.whole_batch and config.gradient_accumulation_steps > 1:
            raise InvalidValue(
                f"gradient_accumulation_steps={config.gradient_accumulation_steps}: {self.method} sums over, ranks or "
                "thresholds all tokens of an update, and TRL runs the backward pass of each accumulation step before "
                f"the next is known; set it to 1, and {size} as much higher"
            )
        if method.within_process and config.world_size > 1:
            raise InvalidValue(
                f"method={self.method!r} depends on all tokens of an update, and a part of it only looks at those of "
                f"its own process, of {config.world_size}; train on one process with {size} as much "
                "higher, or let that part gather the tokens of TrainingState(processes=...), as "
                "bandpo.core.token_rules.SecondMoment does, and return False in within_process"
            )

    def to_dict(self) -> dict[str, Any]:
        settings = cast("dict[str, Any]", cast("Any", super()).to_dict())
        if isinstance(self.epsilon, _ReplacedEpsilon):
            settings = settings | {"epsilon": None}
        return settings


@dataclass
class BandGRPOConfig(MethodSettings, GRPOConfig):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A `GRPOConfig` with a method in place of ``epsilon`` and ``epsilon_high``.

    A clip rule alone only replaces the bounds: ``importance_sampling_level``, ``loss_type='cispo'`` and ``delta`` keep
    their meaning beside it. A whole method fixes level, objective and loss aggregation. A ``loss_type`` that is set
    beside it replaces the loss aggregation, and the trainer prints a line about that. The page
    docs/trl.md has every setting.

    A method that TRL implements itself becomes TRL's settings: ``FixedClip(0.2, 0.28)`` sets ``epsilon`` and
    ``epsilon_high``, ``SAPO()`` sets ``loss_type='sapo'`` and its temperatures.

    Attributes:
        method: A clip rule, a method of `bandpo.core.methods`, or a combination, as text (``"FixedClip(0.2, 0.28)"``,
            ``"DPPO()"``, ``"Method(FixedClip(0.2), DropOutside(20))"``) or as an object, which becomes text. By default
            ``Band(KL(), 0.05)``. A radius may be one of `bandpo.core.schedules`. At the level of sequences a rule
            bounds GSPO's ratio, see `bandpo.policy_loss`.
        loss_type: The loss aggregation. By default the method's own; ``dapo`` for a rule alone.
        importance_sampling_level: The level of the ratios, ``token`` or ``sequence``. By default the method's own;
            ``token`` for a rule alone.
        anchor: The log-probabilities from which the bounds are computed: ``trainer`` (the trainer's own at generation
            time, which are also those of the ratio) or ``rollout`` (those of vLLM or of a ``rollout_func``).
        certify: Reaction to a loss whose gradient, on a synthetic batch before training, is not the method's: ``stop``
            the run, ``warn``, or ``off`` to compare none. The loss of a subclass that ends with an error on this batch,
            as it reads inputs of its own, is not compared, also with ``stop``: a line on stderr says so. Every value
            refuses a TRL that lacks a name of `bandpo.integrations.trl.trl_names`, and at the first loss one that reads
            the advantages before it asks for the log-probabilities, or has none of the old policy under their name.
            All other changes of TRL's loss, such as another clip, are only found by the comparison.
        audit_steps: Number of optimiser steps from one audited step to the next; 0 to audit none.
        audit_detail: True to log all ``audit/…`` metrics to the console and trackers, False for the twelve of
            `bandpo.audit.metrics.LOGGED`.
        record: Folder to which the tokens of every loss are written, see `bandpo.audit.Recorder`; ``bandpo audit``
            replays it under any rule. A resumed run continues the record of its folder.
        watched: Reaction to a failed check of `rlvet diagnose`, made on every tenth batch: ``warn``, ``stop`` the run,
            or ``off`` to check nothing.
        accept_idle_clip: True to accept one update for each batch, with which every ratio is 1 and no clip acts, as the
            baseline of a sweep. TRL's defaults are such a run.

    Raises:
        ValueError: ``method`` cannot be read, or `bandpo.check` refuses it; every ratio would be 1, so that the method
            never acts; ``loss_type`` is an objective of its own; a setting contradicts a whole method; ``epsilon``,
            ``epsilon_high`` or a parameter of TRL's SAPO or VESPO is set as well; ``gradient_accumulation_steps`` is
            above 1 beside a method whose sums are over all tokens of an update; or there are several processes, and a
            rule of the user's looks at the tokens of one of them only.

    >>> config = BandGRPOConfig("out", method="FixedClip(0.2, 0.28)", num_iterations=2, bf16=False, use_cpu=True)
    >>> config.method
    'FixedClip(low=0.2, high=0.28)'
    """

    loss_type: str | None = _setting(  # pyright: ignore[reportIncompatibleVariableOverride]
        None, "The loss aggregation; by default the method's own, and 'dapo' for a clip rule alone."
    )
    importance_sampling_level: str | None = _setting(  # pyright: ignore[reportIncompatibleVariableOverride]
        None, "The level of the ratios, 'token' or 'sequence'; by default the method's own."
    )
    anchor: str = _setting(
        "trainer",
        "The log-probabilities from which the bounds are computed: 'trainer', or 'rollout' (vLLM's or a "
        "rollout_func's).",
    )
    accept_idle_clip: bool = _setting(
        False,
        "Accept one update for each batch, with which every ratio is 1 and no clip acts, as a baseline.",
    )

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        """Refuse a setting of earlier versions, which ``__init__`` would only call unexpected."""
        for name in REMOVED.keys() & settings:
            raise InvalidValue(REMOVED[name])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        GRPO.check_config(GRPOConfig)
        method = read_method(method=self.method, has_state=True, whole_batch=True)
        self.method = as_text(method)
        self._set_level(method)
        self._set_loss_type(method)

        # If TRL implements the method, its own settings for it; else TRL's parameters of losses are unused.
        native = self.native_settings or {}
        self._replace_epsilons(native)
        self._replace_parameters_of_objectives(native)
        super().__post_init__()

        # Refuse settings of TRL that contradict the method or would have no effect.
        self._check_added_settings()
        self._check_whole_batch(method, "per_device_train_batch_size")
        if self.loss_type not in (*TRL_CLIPS, "cispo") and not native:
            raise InvalidValue(
                f"loss_type={self.loss_type!r} is an objective of its own; choose an average for {self.method}, "
                f"one of {', '.join(TRL_CLIPS)}, or for {self.loss_type} its method, e.g. "
                f"method='{str(self.loss_type).upper()}()'"
            )
        if not method.only_rule:
            self._check_other_clips(native)
        if self.delta is not None and self.loss_type == "cispo":
            raise InvalidValue(f"delta={self.delta} has no effect with loss_type='cispo'; leave it out")
        if self.delta is not None and not self.delta > 1:
            raise InvalidValue(
                f"delta={self.delta} is no bound above 1; a dual clip is Method(clip, DualClip(3))"
            )
        self._check_choice("anchor", "trainer", "rollout")
        self.check_ratio_moves()

    def check_ratio_moves(self) -> str:
        """Check that ratios can differ from 1, see `bandpo.integrations._adapt.check_ratio_moves`."""
        iterations = self.num_iterations
        accumulated = self.gradient_accumulation_steps
        losses = self.steps_per_generation or 1
        enough = iterations + 1
        while accumulated % (losses * enough) == 0:
            enough += 1
        return check_ratio_moves(
            self.effective_method,
            math.inf if self.ratio_moves or self.anchor == "rollout" else 1,
            f"num_iterations={iterations}, steps_per_generation={losses}, gradient_accumulation_steps={accumulated}",
            f"set num_iterations={enough}, or steps_per_generation={2 * accumulated}",
            accepted=self.accept_idle_clip,
        )

    def _replace_parameters_of_objectives(self, native: dict[str, Any]) -> None:
        """Set the parameters and the ``loss_type`` of TRL's own losses, after a check that the user set no others.

        Args:
            native: TRL's settings for the method.
        """
        defaults = {setting.name: setting.default for setting in fields(GRPOConfig)}
        for prefix, remedy in OBJECTIVES.items():
            for name in [name for name in defaults if name.startswith(prefix)]:
                value = getattr(self, name)
                expected = native.get(name, defaults[name])
                if value not in (defaults[name], expected):
                    raise InvalidValue(
                        f"{name}={value} would have no effect beside method={self.method!r}; leave it out; or, for "
                        f"that loss, write {remedy}"
                    )
                setattr(self, name, expected)
        for name in ("loss_type", "delta"):
            if name in native:
                setattr(self, name, native[name])

    def _check_other_clips(self, native: dict[str, Any]) -> None:
        """Check that TRL's settings do not clip in another way than a whole method does.

        Args:
            native: TRL's settings for the method.
        """
        clips: dict[str, Any] = {}
        if self.loss_type == "cispo":
            clips["loss_type"] = self.loss_type
        if self.delta is not None:
            clips["delta"] = self.delta
        for name, value in clips.items():
            if value != native.get(name):
                raise InvalidValue(
                    f"{self.method} and {name}={value!r} both define a clip; leave {name} out, or in place of the "
                    "method name a clip rule alone"
                )

    def _set_loss_type(self, method: Method) -> None:
        """Set ``loss_type`` to the method's loss aggregation, unless the user has set it."""
        if self.loss_type is not None:
            return
        aggregation = canonical_aggregation(method.aggregation or "token-mean")
        if aggregation not in LOSS_TYPES:
            raise InvalidValue(
                f"TRL does not support the loss aggregation {aggregation!r} of {self.method}; set loss_type"
            )
        self.loss_type = LOSS_TYPES[aggregation]  # pyright: ignore[reportIncompatibleVariableOverride]

    def _set_level(self, method: Method) -> None:
        """Set ``importance_sampling_level`` to the level of the method's ratios, and refuse another."""
        level = self.importance_sampling_level
        if level is None:
            self.importance_sampling_level = method.level  # pyright: ignore[reportIncompatibleVariableOverride]
        elif level != method.level and not method.only_rule:
            raise InvalidValue(
                f"importance_sampling_level={level!r}, but {self.method} is a method of {method.level}s; leave it out; "
                f"or, for a combination of your own, write Method(clip, objective, level={level!r})"
            )

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"BandGRPOConfig has no {name!r}; it is a GRPOConfig for BandGRPOTrainer, not for another trainer"
        )

    @property
    def effective_method(self) -> Method:
        """The method that is trained: a clip rule alone is completed by TRL's settings for the rest of the loss."""
        method = as_method(self.method)
        if not method.only_rule:
            return method

        rule = method.clip
        objective = method.objective
        if self.loss_type == "cispo":  # TRL's CISPO has no lower bound
            rule = TwoSided(Unclipped(), rule)
            objective = ClippedWeight()
        elif self.delta is not None:
            objective = RatioCap(self.delta)
        return Method(rule, objective, str(self.importance_sampling_level))

    @property
    def native_settings(self) -> dict[str, Any] | None:
        """TRL's own settings for the method and its loss aggregation; None if TRL does not implement it."""
        if self.anchor != "trainer":
            return None
        aggregation = AGGREGATIONS.get(str(self.loss_type), str(self.loss_type))
        native = native_settings(self.effective_method, aggregation)
        # A loss_type with this aggregation but another objective is refused later, and must not be replaced silently.
        if native is None or self.loss_type not in (aggregation, native["loss_type"]):
            return None
        return native

    @property
    def updates_per_batch(self) -> int:
        """The number of optimiser steps on each generated batch."""
        losses = (self.steps_per_generation or 1) * self.num_iterations
        return max(1, losses // self.gradient_accumulation_steps)

    @property
    def ratio_moves(self) -> bool:
        """True if a loss may have ratios other than 1, because TRL computes it after an update on the same batch."""
        losses = (self.steps_per_generation or 1) * self.num_iterations
        return self.gradient_accumulation_steps % losses != 0

    @property
    def settings_on_card(self) -> str:
        """The settings that complete a clip rule, or replace a part of a method, as the model card shows them."""
        return f"loss_type {self.loss_type}, ratios per {self.importance_sampling_level}"

    @property
    def overrides_aggregation(self) -> bool:
        """True if ``loss_type`` replaces the method's own loss aggregation by another one."""
        of_method = as_method(self.method).aggregation
        loss_type = AGGREGATIONS.get(str(self.loss_type), str(self.loss_type))
        return of_method is not None and canonical_aggregation(of_method) != TRL_LOSS_TYPES.get(loss_type)
