"""The settings of TRL's trainers with a method."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, cast

from trl import GRPOConfig

from bandpo.errors import InvalidType, InvalidValue
from bandpo.integrations._adapt import read_method
from bandpo.loss import TRL_LOSS_TYPES, known_aggregation
from bandpo.methods import Method
from bandpo.objectives import ClippedWeight, GammaWeight, RatioCap, SigmoidGate, Surrogate
from bandpo.rules import ClipRule, FixedClip, TwoSided, Unclipped
from bandpo.runs.configs import TRL_CLIPS
from bandpo.text import as_method, as_text

LOSS_TYPES = {average: name for name, average in TRL_LOSS_TYPES.items()}
"""TRL's name of an average; of two, the one whose denominator is that of the whole update."""
AVERAGES = {"cispo": "dapo", "vespo": "dapo", "sapo": "grpo"}
"""The average of each of TRL's objectives of their own, by the ``loss_type`` that has it alone."""

OBJECTIVES = {
    "sapo_": "method='SAPO(POSITIVE, NEGATIVE)'",
    "vespo_": "method='VESPO(K_POS, LAMBDA_POS, ...)'",
}
"""Settings of TRL's own objectives, by how their names begin, and what a method writes in their place."""


def native_settings(method: Method, loss_type: str) -> dict[str, Any] | None:
    """Return the settings with which TRL's own loss is a method under an average; None if TRL does not have it.

    Args:
        method: The whole method.
        loss_type: The average, one of TRL's ``loss_type``s that clamp the ratio.
    """
    clip, objective = method.clip, method.objective
    if method.varying() or method.old_policy != "trainer" or method.bound_level not in (None, method.level):
        return None
    if isinstance(clip, FixedClip):
        bounds = {"loss_type": loss_type, "epsilon": clip.low, "epsilon_high": clip.high}
        if objective == Surrogate():
            return bounds
        if isinstance(objective, RatioCap):
            return bounds | {"delta": objective.max_ratio}
    upper = _upper_bound(clip)
    if upper is not None and objective == ClippedWeight() and loss_type == AVERAGES["cispo"]:
        return {"loss_type": "cispo", "epsilon_high": upper}
    if clip == Unclipped() and isinstance(objective, SigmoidGate) and loss_type == AVERAGES["sapo"]:
        temperatures = {
            "sapo_temperature_pos": objective.positive,
            "sapo_temperature_neg": objective.negative,
        }
        return {"loss_type": "sapo"} | temperatures
    if clip == Unclipped() and isinstance(objective, GammaWeight) and loss_type == AVERAGES["vespo"]:
        names = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
        numbers = (getattr(objective, parameter.name) for parameter in fields(objective))
        return {"loss_type": "vespo"} | dict(zip(names, numbers, strict=True))
    return None


def _upper_bound(clip: ClipRule) -> float | None:
    """Return the upper bound of a fixed clip without a lower one, as TRL's CISPO has; None of another rule."""
    if isinstance(clip, TwoSided) and clip.lower == Unclipped():
        clip = clip.upper
    elif not (isinstance(clip, FixedClip) and clip.low == 1):
        return None
    return 1 + clip.high if isinstance(clip, FixedClip) else None


class _Replaced(float):
    """TRL's ``epsilon`` beside a method: it reads as a number, and stops a trainer that would clip with it."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise InvalidType(
            "this config names a clip rule or method, which only BandGRPOTrainer knows; use it as trainer, and call "
            "super()._compute_loss in a subclass of it"
        )

    __rsub__ = __radd__ = __sub__ = __add__ = _refuse

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:  # torch.clamp(x, max=epsilon)
        cls()._refuse()


def _setting(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass
class MethodSettings:
    """Settings that every TRL config has: a method in place of two epsilons."""

    method: str | None = _setting(
        None,
        "A clip rule or a method: 'Band(KL(), 0.05)' (the default), 'Band(KL(), Linear(0.05, 0.01))', "
        "'FixedClip(0.2, 0.28)', 'Unclipped()', 'DPPO()', 'SAPO(1.0, 1.05)', "
        "'Method(FixedClip(0.2), DropOutside(20))', ...",
    )
    epsilon: float | None = _setting(None, "Refused; the interval is part of method, as in 'FixedClip(0.2)'.")

    def settle(self, method: Method) -> None:
        """Put a method into ``method``, as text, and refuse epsilons beside it."""
        self.method = as_text(method)
        self._replace_epsilons({})

    def _replace_epsilons(self, native: dict[str, Any]) -> None:
        """Refuse epsilons that are not the method's own, and set these.

        Args:
            native: TRL's settings of the method; without any, a trainer that would clip with an epsilon is stopped.
        """
        config = cast("Any", self)
        values = {"epsilon": config.epsilon, "epsilon_high": config.epsilon_high}
        refused = [
            f"{name}={value}"
            for name, value in values.items()
            if value is not None and not isinstance(value, _Replaced) and value != native.get(name)
        ]
        if refused:
            raise InvalidValue(
                f"{', '.join(refused)} would have no effect beside method={self.method!r}; write the interval as "
                "method='FixedClip(low, high)'"
            )
        config.epsilon = native.get("epsilon", _Replaced(0.2))
        config.epsilon_high = native.get("epsilon_high")

    def to_dict(self) -> dict[str, Any]:
        written = cast("dict[str, Any]", cast("Any", super()).to_dict())
        return written | {"epsilon": None} if isinstance(self.epsilon, _Replaced) else written


@dataclass
class BandGRPOConfig(MethodSettings, GRPOConfig):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`GRPOConfig` with a method in place of ``epsilon`` and ``epsilon_high``.

    A clip rule alone leaves to TRL what it does not say: ``importance_sampling_level``, ``loss_type='cispo'`` and
    ``delta`` stand beside it. A whole method brings its own level, objective and average; a ``loss_type`` named beside
    it wins, which the trainer says in one line. The page docs/measured/trl-settings.md has every setting.

    A method that TRL has itself becomes TRL's settings: ``FixedClip(0.2, 0.28)`` sets ``epsilon`` and
    ``epsilon_high``, ``SAPO()`` sets ``loss_type='sapo'`` and its temperatures.

    Attributes:
        method: A clip rule, a method of `bandpo.methods`, or a combination, as text (``"FixedClip(0.2, 0.28)"``,
            ``"DPPO()"``, ``"Method(FixedClip(0.2), DropOutside(20))"``) or as an object; text from then on. By default
            ``Band(KL(), 0.05)``. A radius may be one of `bandpo.schedules`. At the level of sequences a rule bounds
            GSPO's ratio, see `bandpo.policy_loss`.
        loss_type: The average. By default the method's own; ``dapo`` for a rule alone.
        importance_sampling_level: Whether ratios are formed per ``token`` or per ``sequence``. By default the method's
            own; ``token`` for a rule alone.
        anchor: Whose log-probabilities the bounds surround: ``trainer`` (its own at generation time, to which the
            ratio refers too) or ``rollout`` (those that vLLM or a ``rollout_func`` gives).
        fused_logits: Whether log-probabilities come straight from hidden states, so that no pass of training holds
            logits, see `bandpo.linear_logp`. For text models with a plain linear head.
        certify: What a loss does whose gradient is not the method's: ``stop`` the run, ``warn``, or ``off``, unseen.
        audit_steps: The losses of every so-many-th optimiser step are audited; 0 for none.
        audit_detail: Whether the console and trackers get all ``audit/…`` metrics, and not only the twelve of
            `bandpo.audit.metrics.LOGGED`.
        record: Folder to which the tokens of every loss are written, see `bandpo.Recorder`; ``bandpo audit`` replays
            it under any rule. A run that is resumed goes on in the same folder.
        watched: What happens where the tests of `bandpo diagnose`, made of every tenth batch, find something wrong:
            ``warn``, ``stop`` the run, or ``off``.

    Raises:
        ValueError: ``method`` cannot be read, or `bandpo.check` refuses it; a ``loss_type`` that is an objective of its
            own; a setting beside a whole method that already says it; ``epsilon``, ``epsilon_high`` or a parameter of
            TRL's SAPO or VESPO given too;
            ``gradient_accumulation_steps`` above 1 beside a method whose sums run over all tokens of an update.

    >>> BandGRPOConfig("out", method="FixedClip(0.2, 0.28)", bf16=False, use_cpu=True).method
    'FixedClip(low=0.2, high=0.28)'
    """

    loss_type: str | None = _setting(  # pyright: ignore[reportIncompatibleVariableOverride]
        None, "The average; by default the method's own, and 'dapo' for a clip rule alone."
    )
    importance_sampling_level: str | None = _setting(  # pyright: ignore[reportIncompatibleVariableOverride]
        None, "Whether ratios are formed per 'token' or per 'sequence'; by default as the method does."
    )
    anchor: str = _setting(
        "trainer",
        "Whose log-probabilities the bounds surround: 'trainer', or 'rollout' (vLLM's or a rollout_func's).",
    )
    fused_logits: bool = _setting(
        False, "Compute log-probabilities straight from hidden states, without holding logits."
    )
    certify: str = _setting(
        "stop",
        "What happens where the gradient is not the method's: 'stop', 'warn', or 'off' (not compared).",
    )
    audit_steps: int = _setting(1, "Audit the losses of every so-many-th optimiser step; 0 for none.")
    audit_detail: bool = _setting(
        False, "Send all audit metrics to the console and trackers, not only the twelve that matter."
    )
    record: str | None = _setting(
        None, "Folder for the tokens of every loss, which `bandpo audit` replays under any rule."
    )
    watched: str = _setting(
        "warn", "What happens where the tests of `bandpo diagnose` fail: 'warn', 'stop' or 'off'."
    )

    def __post_init__(self) -> None:
        if self.audit_steps < 0:
            raise InvalidValue(f"audit_steps must be at least 0 (no audit), got {self.audit_steps}")
        method = read_method(method=self.method, has_state=True, whole_batch=True)
        self.method = as_text(method)
        self._settle_level(method)
        self._settle_average(method)
        native = self.native_settings or {}
        self._replace_epsilons(native)
        self._replace_parameters_of_objectives(native)
        super().__post_init__()
        if method.whole_batch and self.gradient_accumulation_steps > 1:
            raise InvalidValue(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}: the sums of {self.method} run over "
                "all tokens of an update; set it to 1, and per_device_train_batch_size as much higher"
            )
        if self.loss_type not in (*TRL_CLIPS, "cispo") and not native:
            raise InvalidValue(
                f"loss_type={self.loss_type!r} is an objective of its own; choose an average for {self.method}, "
                f"one of {', '.join(TRL_CLIPS)}, or for {self.loss_type} its method, e.g. "
                f"method='{str(self.loss_type).upper()}()'"
            )
        if not method.only_rule:
            self._refuse_another_clip(native)
        if self.delta is not None and self.loss_type == "cispo":
            raise InvalidValue(f"delta={self.delta} has no effect with loss_type='cispo'; leave it out")
        if self.delta is not None and not self.delta > 1:
            raise InvalidValue(
                f"delta={self.delta} is no bound above 1; a dual clip is Method(clip, DualClip(3))"
            )
        for name, known in {"anchor": ("trainer", "rollout"), "certify": ("stop", "warn", "off")}.items():
            if getattr(self, name) not in known:
                raise InvalidValue(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")

    def _replace_parameters_of_objectives(self, native: dict[str, Any]) -> None:
        """Refuse parameters of TRL's own losses that are not the method's, and set these and the ``loss_type``."""
        stock = {setting.name: setting.default for setting in fields(GRPOConfig)}
        for prefix, remedy in OBJECTIVES.items():
            for name in [name for name in stock if name.startswith(prefix)]:
                value = getattr(self, name)
                expected = native.get(name, stock[name])
                if value not in (stock[name], expected):
                    raise InvalidValue(
                        f"{name}={value} would have no effect beside method={self.method!r}; it is an argument of the "
                        f"method, as in {remedy}"
                    )
                setattr(self, name, expected)
        for name in ("loss_type", "delta"):
            if name in native:
                setattr(self, name, native[name])

    def _refuse_another_clip(self, native: dict[str, Any]) -> None:
        """Refuse settings of TRL by which it clips, beside a whole method of which they are no part."""
        clips: dict[str, Any] = {}
        if self.loss_type == "cispo":
            clips["loss_type"] = self.loss_type
        if self.delta is not None:
            clips["delta"] = self.delta
        for name, value in clips.items():
            if value != native.get(name):
                raise InvalidValue(f"{self.method} and {name}={value!r} both say how to clip; leave one out")

    def _settle_average(self, method: Method) -> None:
        """Put the average of the method into ``loss_type``, unless one is named."""
        if self.loss_type is not None:
            return
        average = known_aggregation(method.aggregation or "token-mean")
        if average not in LOSS_TYPES:
            raise InvalidValue(f"TRL has no average {average!r}, which {self.method} has; name a loss_type")
        self.loss_type = LOSS_TYPES[average]  # pyright: ignore[reportIncompatibleVariableOverride]

    def _settle_level(self, method: Method) -> None:
        """Put the level of the method's ratios into ``importance_sampling_level``, and refuse another."""
        level = self.importance_sampling_level
        if level is None:
            self.importance_sampling_level = method.level  # pyright: ignore[reportIncompatibleVariableOverride]
        elif level != method.level and not method.only_rule:
            raise InvalidValue(
                f"importance_sampling_level={level!r}, but {self.method} is a method of {method.level}s; a combination "
                f"of your own is written Method(clip, objective, level={level!r})"
            )

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"BandGRPOConfig has no {name!r}; it is a GRPOConfig for BandGRPOTrainer, not for another trainer"
        )

    @property
    def whole_method(self) -> Method:
        """The method, with what a clip rule alone leaves to TRL's own settings."""
        method = as_method(self.method)
        if not method.only_rule:
            return method
        rule, objective = method.clip, method.objective
        if self.loss_type == "cispo":  # which has no lower bound
            rule, objective = TwoSided(Unclipped(), rule), ClippedWeight()
        elif self.delta is not None:
            objective = RatioCap(self.delta)
        return Method(rule, objective, str(self.importance_sampling_level))

    @property
    def native_settings(self) -> dict[str, Any] | None:
        """TRL's own settings for the method and the average; None if TRL does not have it."""
        if self.anchor != "trainer":
            return None
        average = AVERAGES.get(str(self.loss_type), str(self.loss_type))
        native = native_settings(self.whole_method, average)
        # Another loss_type of TRL that has this average is refused, and not replaced in silence.
        return native if native is not None and self.loss_type in (average, native["loss_type"]) else None

    @property
    def updates_per_batch(self) -> int:
        """Optimiser steps made on each generated batch."""
        losses = (self.steps_per_generation or 1) * self.num_iterations
        return max(1, losses // self.gradient_accumulation_steps)

    @property
    def ratio_moves(self) -> bool:
        """Whether some loss has another policy than that which its batch was generated with, as TRL decides it."""
        losses = (self.steps_per_generation or 1) * self.num_iterations
        return self.gradient_accumulation_steps % losses != 0

    @property
    def other_average(self) -> bool:
        """Whether ``loss_type`` is another average than the method's own."""
        of_method = as_method(self.method).aggregation
        average = AVERAGES.get(str(self.loss_type), str(self.loss_type))
        return of_method is not None and known_aggregation(of_method) != TRL_LOSS_TYPES.get(average)
