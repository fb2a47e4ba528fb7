"""What a study file says: the question and its terms, fixed before anything runs, and the runs that follow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from bandpo.errors import InvalidValue
from bandpo.text import as_method, importable_current_folder
from bandpo_lab.file_models import FileModel, checked, read_yaml


class Tuning(FileModel):
    """A search on seeds of its own, by which each arm chooses its options before it is reported on others."""

    options: Mapping[str, Sequence[Any]]
    """The values to try, for each option."""
    seeds: Sequence[int]

    def choices(self) -> list[dict[str, Any]]:
        """All combinations of values."""
        return combinations(self.options)


def combinations(options: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every choice of one value for each option.

    >>> combinations({"learning_rate": [1e-4, 2e-4], "max_steps": [320]})
    [{'learning_rate': 0.0001, 'max_steps': 320}, {'learning_rate': 0.0002, 'max_steps': 320}]
    """
    return [dict(zip(options, values, strict=True)) for values in product(*options.values())]


def options_text(values: Mapping[str, Any]) -> str:
    """Values, by the names of their options.

    >>> options_text({"learning_rate": 1e-4, "max_steps": 320})
    'learning_rate 0.0001, max_steps 320'
    """
    return ", ".join(f"{name} {value}" for name, value in values.items())


class Experiment(FileModel):
    """One comparison of arms: the same options and seeds for each.

    Raises:
        ValueError: no seeds, or seeds that were tuned on.
    """

    name: str
    question: str
    seeds: Annotated[Sequence[int], Field(min_length=1)]
    options: Mapping[str, Any] = {}
    arms: Sequence[str] = ()
    """Which of the study's arms take part; all if empty."""
    tune: Tuning | None = None
    tuned_in: str | None = None
    """The experiment whose tuned options this one takes over."""
    sweep: Mapping[str, Annotated[Sequence[Any], Field(min_length=1)]] = {}
    """Options to vary, each over its values: the study runs, and reports, one experiment for each combination."""

    def points(self) -> list[Experiment]:
        """One experiment for each combination of the swept values; itself, if none are."""
        if not self.sweep:
            return [self]
        return [
            self.model_copy(
                update={"name": f"{self.name}, {options_text(point)}", "options": {**self.options, **point}}
            )
            for point in combinations(self.sweep)
        ]

    @model_validator(mode="after")
    def _fits_together(self) -> Experiment:
        if self.tune and (both := set(self.seeds) & set(self.tune.seeds)):
            raise InvalidValue(f"seeds {sorted(both)} are tuned on and reported on; report on others")
        if self.tune and self.tuned_in:
            raise InvalidValue("has both `tune` and `tuned_in`; leave one out")
        if self.sweep and (self.tune or self.tuned_in):
            raise InvalidValue(
                "has `sweep` and a tuned option; a sweep reports every value, so leave the tuning out"
            )
        return self


@dataclass(frozen=True)
class PlannedRun:
    """One `bandpo-lab train`."""

    experiment: str
    arm: str
    seed: int
    options: Mapping[str, Any]
    tuning: Mapping[str, Any] | None = None
    """The values on trial, where the run is one of a search."""

    @property
    def folder(self) -> Path:
        """Where it lies under the study's ``runs``."""
        tried = [f"{name}-{value}" for name, value in (self.tuning or {}).items()]
        place = [self.experiment, *(["tuning"] if tried else []), self.arm, *tried, f"seed-{self.seed}"]
        return Path(*(re.sub(r"[^\w.+-]+", "-", part.lower()) for part in place))

    def __str__(self) -> str:
        tried = "".join(f", {name} {value}" for name, value in (self.tuning or {}).items())
        return f"{self.experiment}: {self.arm}{tried}, seed {self.seed}"


def _with_names(experiments: Any) -> Any:
    if not isinstance(experiments, dict):
        return experiments
    return {k: {"name": k, **v} if isinstance(v, dict) else v for k, v in experiments.items()}


def _with_points(experiments: Mapping[str, Experiment]) -> Mapping[str, Experiment]:
    return {point.name: point for e in experiments.values() for point in e.points()}


class Study(FileModel):
    """A study file, read and checked.

    Raises:
        ValueError: a baseline or arm that is not among the arms, or an option of the runs that the study sets itself.
    """

    title: str
    question: str
    primary: str
    """The metric that decides, one of `bandpo_lab.study.collect.METRICS`."""
    stopping: str
    """The stopping rule, in words: it is printed, and nothing else ends a run or the study."""
    baseline: str
    """The arm that the others are compared with."""
    arms: Mapping[str, Mapping[str, Any]]
    """For each arm its own options of `bandpo-lab train`: a ``method`` at least."""
    options: Mapping[str, Any]
    """Options of `bandpo-lab train` that all runs share."""
    experiments: Annotated[
        Mapping[str, Experiment],
        BeforeValidator(_with_names),
        Field(min_length=1),
        AfterValidator(_with_points),
    ]
    """By name, each point of a sweep on its own."""

    @model_validator(mode="after")
    def _fits_together(self) -> Study:
        if self.baseline not in self.arms:
            raise InvalidValue(f"baseline {self.baseline!r} is none of the arms {', '.join(self.arms)}")
        for name, options in self.arms.items():
            if "objective" in options:
                raise InvalidValue(
                    f"arm {name!r} has an objective beside its rule; write one method of both, "
                    f"`{name}: {{method: 'Method({options.get('method', 'Band()')}, {options['objective']})'}}`"
                )
            if "method" not in options:
                raise InvalidValue(
                    f"arm {name!r} names no method; write `{name}: {{method: 'Band(KL(), 0.05)'}}`"
                )
        for e in self.experiments.values():
            if unknown := [arm for arm in e.arms if arm not in self.arms]:
                raise InvalidValue(f"experiment {e.name!r}: unknown arms {', '.join(unknown)}")
            if e.tuned_in and not (e.tuned_in in self.experiments and self.experiments[e.tuned_in].tune):
                raise InvalidValue(
                    f"experiment {e.name!r}: tuned_in {e.tuned_in!r} is no experiment that tunes"
                )
            taken = {"output_dir", "seed", "resume"} & {*self.options, *e.options}
            if taken:
                raise InvalidValue(f"options may not set {', '.join(sorted(taken))}: the study does")
        return self

    def check_methods(self) -> None:
        """Read the method of each arm, which may be a class of your own in the current folder.

        A study that is about to run calls this. A report does not, since the results may be a stranger's.

        Raises:
            ValueError: if one cannot be read; the message names the arm.
        """
        for name, options in self.arms.items():
            try:
                with importable_current_folder():
                    as_method(options["method"])
            except ValueError as error:
                raise InvalidValue(f"arm {name!r}: {error}") from error

    def arms_of(self, experiment: Experiment) -> list[str]:
        """The arms that take part, in the study's order."""
        return [arm for arm in self.arms if not experiment.arms or arm in experiment.arms]

    def searches(self) -> list[PlannedRun]:
        """The runs by which arms choose their options."""
        return [
            self._run(e, arm, seed, choice, tuning=choice)
            for e in self.experiments.values()
            if e.tune
            for seed in e.tune.seeds
            for choice in e.tune.choices()
            for arm in self.arms_of(e)
        ]

    def reported(self, chosen: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[PlannedRun]:
        """The runs that are reported: all experiments with one seed before the next seed.

        ``chosen`` has, for each experiment that tunes and each of its arms, the values chosen.
        """
        return [
            self._run(e, arm, seed, chosen[e.tuned_in or e.name, arm] if e.tune or e.tuned_in else {})
            for seed in dict.fromkeys(seed for e in self.experiments.values() for seed in e.seeds)
            for e in self.experiments.values()
            if seed in e.seeds
            for arm in self.arms_of(e)
        ]

    def _run(
        self,
        e: Experiment,
        arm: str,
        seed: int,
        values: Mapping[str, Any],
        tuning: Mapping[str, Any] | None = None,
    ) -> PlannedRun:
        options = {**self.options, **values, **e.options, **self.arms[arm], "seed": seed}
        return PlannedRun(e.name, arm, seed, options, tuning)


def study_text(file: str) -> str:
    """The text of a study file, or of the study that comes with the package, ``quick``.

    Raises:
        ValueError: there is no such file.
    """
    if file == "quick":
        return (resources.files("bandpo_lab.study") / "quick.yaml").read_text(encoding="utf-8")
    if not Path(file).is_file():
        raise InvalidValue(f"{file} is no file; the study that comes with bandpo is called quick")
    return Path(file).read_text(encoding="utf-8", errors="replace")


def parse_study(text: str) -> Study:
    """Read a study.

    Raises:
        ValueError: no valid YAML, unknown or missing keys, or values that cannot work together; named in the message.
    """
    return checked(Study, read_yaml(text, "the study"), "the study")
