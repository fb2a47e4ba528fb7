"""The config of TRL's asynchronous trainer with a method in place of the epsilons."""

from __future__ import annotations

from dataclasses import dataclass

from trl.experimental.async_grpo import AsyncGRPOConfig

from bandpo.core.aggregation import canonical_aggregation
from bandpo.core.errors import InvalidValue
from bandpo.core.methods import Method
from bandpo.core.text import as_method
from bandpo.integrations._adapt import read_method
from bandpo.integrations.trl.announcements import NEUTRAL, restrictions
from bandpo.integrations.trl.config import MethodSettings
from bandpo.integrations.trl.trl_names import ASYNC_GRPO

AGGREGATION = "token-mean"
"""The loss aggregation of TRL's asynchronous trainer: the mean over the tokens of each micro-batch."""


@dataclass
class BandAsyncGRPOConfig(MethodSettings, AsyncGRPOConfig):  # pyright: ignore[reportIncompatibleVariableOverride]
    """An `AsyncGRPOConfig` with a method in place of ``epsilon`` and ``epsilon_high``.

    The ratios and the bounds of every method refer to the log-probabilities of the sampler, as this trainer has no
    others. Its loss aggregation is always the mean over tokens. The page docs/trl.md has every setting.

    Attributes:
        method: As for `BandGRPOConfig`.
        certify: As for `BandGRPOConfig`.
        audit_steps: As for `BandGRPOConfig`.
        audit_detail: As for `BandGRPOConfig`.
        record: As for `BandGRPOConfig`. The record has the version of the weights at the start of each group.
        watched: As for `BandGRPOConfig`.

    Raises:
        ValueError: ``method`` cannot be read, or `bandpo.check` refuses it; ``epsilon`` or ``epsilon_high`` is set as
            well; a sampling setting restricts or changes the sampled distribution; a number of the method follows the
            progress of training and ``max_steps`` is not set; ``gradient_accumulation_steps`` is above 1 beside a
            method whose sums are over all tokens of an update; or there are several processes, and a rule of the user's
            looks at the tokens of one of them only.

    >>> BandAsyncGRPOConfig("out", method="BandPO()", top_p=0.9, bf16=False, use_cpu=True)
    Traceback (most recent call last):
    bandpo.core.errors.InvalidValue: top_p=0.9: the only old log-probabilities are those of TRL's server, which are \
those after top_p=0.9, so ratios are not 1 before the first update, and bounds surround probabilities of the tokens \
that are left; sample with top_p=1.0
    """

    def __post_init__(self) -> None:
        ASYNC_GRPO.check_config(AsyncGRPOConfig)
        method = read_method(method=self.method, has_state=True, whole_batch=True, aggregation=AGGREGATION)
        self.set_method(method)
        super().__post_init__()

        self._check_added_settings()
        self._check_sampling()
        self._check_progress(method)
        size = "token_budget"
        if self.token_budget is not None and self.token_budget <= 0:
            size = "per_device_train_batch_size"
        self._check_whole_batch(method, size)

    def _check_sampling(self) -> None:
        """Check that the sampler's probabilities are those of the model over the whole vocabulary."""
        changed = ", ".join(f"{name}={value}" for name, value in restrictions(self).items())
        if not changed:
            return
        neutral = ", ".join(f"{name}={NEUTRAL[name]}" for name in restrictions(self))
        raise InvalidValue(
            f"{changed}: the only old log-probabilities are those of TRL's server, which are those after {changed}, so "
            "ratios are not 1 before the first update, and bounds surround probabilities of the tokens that are left; "
            f"sample with {neutral}"
        )

    def _check_progress(self, method: Method) -> None:
        """Check that the length of the training is known if a number of the method depends on it."""
        for number in method.varying().values():
            if number.needs == "progress" and self.max_steps <= 0:
                raise InvalidValue(
                    f"{number!r} depends on the progress of training, and without max_steps TRL's asynchronous trainer "
                    "only knows an upper limit of the number of steps; set max_steps"
                )

    @property
    def effective_method(self) -> Method:
        """The method that is trained."""
        return as_method(self.method)

    @property
    def overrides_aggregation(self) -> bool:
        """True if TRL's loss aggregation replaces the method's own."""
        of_method = self.effective_method.aggregation
        return of_method is not None and canonical_aggregation(of_method) != AGGREGATION

    @property
    def settings_on_card(self) -> str:
        """What completes a clip rule, or replaces a part of a method, as the model card shows it."""
        return "loss averaged over tokens"
