"""The quantities in which configurations are compared: what a run trains, under names of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlvet._numbers import format_number

EFFECTS: Mapping[str, str] = {
    "gradient": "changes the gradient or the step",
    "data": "changes the answers that are trained on",
    "speed": "changes memory and time only",
}
"""The kinds of effect that a quantity can have, the gravest first."""


@dataclass(frozen=True)
class Quantity:
    """A property of a run that settings of the frameworks determine."""

    name: str
    effect: str
    """A key of `EFFECTS`."""
    only_with: str = ""
    """Another quantity. If that one is None in one of two runs, this one is not compared."""
    with_ratio: bool = False
    """True if the quantity has no effect while every ratio of new to old probabilities is 1."""
    none: str = "none"
    """The text for the value None."""


QUANTITIES: tuple[Quantity, ...] = (
    Quantity("policy loss", "gradient", with_ratio=True),
    Quantity("clip below", "gradient", with_ratio=True),
    Quantity("clip above", "gradient", with_ratio=True),
    Quantity("dual clip", "gradient", with_ratio=True),
    Quantity("average of the loss", "gradient"),
    Quantity("old policy", "gradient"),
    Quantity("passes over a batch", "gradient"),
    Quantity("answers an update", "gradient"),
    Quantity("baseline", "gradient"),
    Quantity("scale of the advantages", "gradient"),
    Quantity("weights of the rewards", "gradient", none="all 1"),
    Quantity("truncated answers", "gradient"),
    Quantity("rejected tokens", "gradient"),
    Quantity("off-policy answers", "gradient", none="trained on"),
    Quantity("tokens by entropy", "gradient", none="all"),
    Quantity("importance weights", "gradient"),
    Quantity("KL coefficient", "gradient"),
    Quantity("KL estimator", "gradient", only_with="KL coefficient"),
    Quantity("average of the KL term", "gradient", only_with="KL coefficient"),
    Quantity("KL reference", "gradient", only_with="KL coefficient"),
    Quantity("KL in the reward", "gradient"),
    Quantity("entropy bonus", "gradient"),
    Quantity("average of the entropy", "gradient", only_with="entropy bonus"),
    Quantity("temperature", "gradient"),
    Quantity("learning rate", "gradient"),
    Quantity("schedule", "gradient"),
    Quantity("warm-up", "gradient"),
    Quantity("optimizer", "gradient"),
    Quantity("weight decay", "gradient"),
    Quantity("betas of Adam", "gradient"),
    Quantity("limit of the gradient norm", "gradient"),
    Quantity("LoRA rank", "gradient"),
    Quantity("LoRA alpha", "gradient", only_with="LoRA rank"),
    Quantity("precision", "gradient"),
    Quantity("dropout", "gradient"),
    Quantity("model", "gradient"),
    Quantity("answers to a prompt", "data"),
    Quantity("answers a batch", "data"),
    Quantity("longest answer", "data"),
    Quantity("engine's temperature", "data", none="the trainer's"),
    Quantity("top-p", "data"),
    Quantity("top-k", "data"),
    Quantity("min-p", "data"),
    Quantity("repetition penalty", "data"),
    Quantity("groups left out", "data"),
    Quantity("prompts left out", "data"),
    Quantity("age of the data", "data", none="that of the batch"),
    Quantity("data set", "data"),
    Quantity("length of the run", "data"),
    Quantity("sampler", "speed"),
)
"""The quantities, those that change the gradient first, in the order in which differences are listed."""

AVERAGES_OF_TERMS = ("average of the KL term", "average of the entropy")
"""Averages that are not listed where each is the average of the policy loss."""

UPDATES = "updates on a batch"
"""The name of the number of optimizer steps on each batch, which is derived and therefore not compared."""


class PerProcess(NamedTuple):
    """A number of answers for each process, of which the configuration does not have the number.

    >>> str(PerProcess(16))
    '16 a process'
    """

    number: float

    def __str__(self) -> str:
        return f"{format_number(self.number, 6)} a process"


@dataclass(frozen=True)
class Origin:
    """A setting from which a quantity is computed."""

    name: str
    """The framework's name of the setting."""
    value: Any
    source: str
    """``run.sh:12``, or ``default of TRL 1.16.0``."""


@dataclass(frozen=True)
class Reading:
    """The value of a quantity in one configuration."""

    value: Any
    """A number, text or `PerProcess`; None for ``Quantity.none``, or if it is not known."""
    origins: tuple[Origin, ...] = ()
    """The setting of the quantity, and the conditions that the configuration sets."""
    unknown: str = ""
    """The reason why the value is not known; empty if it is."""
    elsewhere: str = ""
    """The place where a setting may be set that the file does not set, as a clause; empty for other reasons."""


@dataclass(frozen=True)
class Training:
    """The quantities and settings of a configuration, as far as they are known.

    >>> training = Training("trl", "train.py", {"temperature": Reading(0.7)}, {})
    >>> training.value("temperature")
    0.7
    """

    framework: str
    """The key of the framework."""
    path: str
    readings: Mapping[str, Reading]
    """The quantities, by name."""
    settings: Mapping[str, Any]
    """The settings that the configuration sets, by the framework's names."""
    shape: Mapping[str, Origin] = field(default_factory=dict)
    """What the run saved of the shape of its model, by the names of `rlvet.runs.held_settings.SHAPE`."""
    file: str = ""
    """The name of the file with the settings, and that of them in it; empty if each setting has a line."""
    read: frozenset[str] = frozenset()
    """The names of the settings that the quantities were computed from."""
    is_earlier: bool = False
    """True if a version saved it that lacks settings of the one whose meaning the quantities have."""

    def value(self, name: str) -> Any:
        """Return the value of a quantity; None if it is not known."""
        return self.readings[name].value

    @property
    def ratios_are_one(self) -> bool:
        """True if every ratio of new to old probabilities is 1 when its gradient is computed."""
        return (
            self.value(UPDATES) == 1
            and self.value("old policy") == "the trainer's own"
            and not self.readings["age of the data"].unknown
            and self.value("age of the data") is None
        )
