"""The settings of TRL's trainers with a method."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, cast

from trl import GRPOConfig

from bandpo.errors import InvalidType, InvalidValue
from bandpo.integrations._adapt import read_method
from bandpo.loss import TRL_LOSS_TYPES, known_aggregation
from bandpo.methods import Method
from bandpo.objectives import ClippedWeight, RatioCap
from bandpo.rules import TwoSided, Unclipped
from bandpo.runs.configs import TRL_CLIPS
from bandpo.text import as_method, as_text

LOSS_TYPES = {average: name for name, average in TRL_LOSS_TYPES.items()}
"""TRL's name of an average; of two, the one whose denominator is that of the whole update."""


OBJECTIVES = {
    "sapo_": "method='SAPO(POSITIVE, NEGATIVE)'",
    "vespo_": "method='VESPO(K_POS, LAMBDA_POS, ...)'",
}
"""Settings of TRL's own objectives, by how their names begin, and what a method writes in their place."""


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


def _setting(default: Any, told: str) -> Any:
    return field(default=default, metadata={"help": told})


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
        given = {"epsilon": self.epsilon, "epsilon_high": cast("Any", self).epsilon_high}
        given = {name: x for name, x in given.items() if x is not None and not isinstance(x, _Replaced)}
        if given:
            named = ", ".join(f"{name}={x}" for name, x in given.items())
            raise InvalidValue(
                f"{named} would have no effect beside method={self.method!r}; write the interval as "
                "method='FixedClip(low, high)'"
            )
        self.epsilon = _Replaced(0.2)

    def to_dict(self) -> dict[str, Any]:
        return cast("Any", super()).to_dict() | {"epsilon": None}


@dataclass
class BandGRPOConfig(MethodSettings, GRPOConfig):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`GRPOConfig` with a method in place of ``epsilon`` and ``epsilon_high``.

    A clip rule alone leaves to TRL what it does not say: ``importance_sampling_level``, ``loss_type='cispo'`` and
    ``delta`` stand beside it. A whole method brings its own level, objective and average; a ``loss_type`` named beside
    it wins, which the trainer says in one line. The page docs/measured/trl-settings.md has every setting.

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
        method = read_method(method=self.method, moves=True, whole=True)
        self.settle(method)
        self._refuse_parameters_of_objectives()
        self._settle_level(method)
        if self.loss_type is None:
            average = known_aggregation(method.aggregation or "token-mean")
            if average not in LOSS_TYPES:
                raise InvalidValue(
                    f"TRL has no average {average!r}, which {self.method} has; name a loss_type"
                )
            self.loss_type = LOSS_TYPES[average]  # pyright: ignore[reportIncompatibleVariableOverride]
        super().__post_init__()
        if method.whole_batch and self.gradient_accumulation_steps > 1:
            raise InvalidValue(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}: the sums of {self.method} run over "
                "all tokens of an update; set it to 1, and per_device_train_batch_size as much higher"
            )
        if self.loss_type not in (*TRL_CLIPS, "cispo"):
            raise InvalidValue(
                f"loss_type={self.loss_type!r} is an objective of its own; choose an average for {self.method}, "
                f"one of {', '.join(TRL_CLIPS)}, or for {self.loss_type} its method, e.g. "
                f"method='{self.loss_type.upper()}()'"
            )
        beside = {"loss_type": self.loss_type == "cispo", "delta": self.delta is not None}
        for name in [name for name, given in beside.items() if given and not method.only_rule]:
            raise InvalidValue(
                f"{self.method} and {name}={getattr(self, name)!r} both say how to clip; leave one out"
            )
        if self.delta is not None and self.loss_type == "cispo":
            raise InvalidValue(f"delta={self.delta} has no effect with loss_type='cispo'; leave it out")
        if self.delta is not None and not self.delta > 1:
            raise InvalidValue(
                f"delta={self.delta} is no bound above 1; a dual clip is Method(clip, DualClip(3))"
            )
        for name, known in {"anchor": ("trainer", "rollout"), "certify": ("stop", "warn", "off")}.items():
            if getattr(self, name) not in known:
                raise InvalidValue(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")

    def _refuse_parameters_of_objectives(self) -> None:
        """Refuse the parameters of TRL's SAPO and VESPO, which are arguments of a method here."""
        stock = {setting.name: setting.default for setting in fields(GRPOConfig)}
        for prefix, remedy in OBJECTIVES.items():
            for name in [name for name in stock if name.startswith(prefix)]:
                value = getattr(self, name)
                if value != stock[name]:
                    raise InvalidValue(
                        f"{name}={value} would have no effect beside method={self.method!r}; it is an argument of the "
                        f"method, as in {remedy}"
                    )

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
        own = as_method(self.method).aggregation
        return own is not None and known_aggregation(own) != TRL_LOSS_TYPES.get(str(self.loss_type))
