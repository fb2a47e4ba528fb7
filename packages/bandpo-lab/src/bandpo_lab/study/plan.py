"""Study files: the question, settings and rules of a study, fixed before it runs, and the runs that they define."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from bandpo.core.text import as_method, importable_current_folder
from bandpo_lab.errors import InvalidValue
from bandpo_lab.files.validation import FileModel, read_yaml, validate_as


class Tuning(FileModel):
    """A grid search of options for each arm, on seeds that are not reported."""

    options: Mapping[str, Sequence[Any]]
    """The values to try, for each option."""
    seeds: Sequence[int]

    def choices(self) -> list[dict[str, Any]]:
        """Return all combinations of values."""
        return combinations(self.options)


def combinations(options: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return all combinations of one value for each option.

    >>> combinations({"learning_rate": [1e-4, 2e-4], "max_steps": [320]})
    [{'learning_rate': 0.0001, 'max_steps': 320}, {'learning_rate': 0.0002, 'max_steps': 320}]
    """
    return [dict(zip(options, values, strict=True)) for values in product(*options.values())]


def options_text(values: Mapping[str, Any]) -> str:
    """Return options and their values as a text.

    >>> options_text({"learning_rate": 1e-4, "max_steps": 320})
    'learning_rate 0.0001, max_steps 320'
    """
    return ", ".join(f"{name} {value}" for name, value in values.items())


class Experiment(FileModel):
    """A comparison of arms with the same options and seeds.

    Raises:
        ValueError: There are no seeds, a seed is also used for tuning, or two settings exclude each other.
    """

    name: str
    question: str
    seeds: Annotated[Sequence[int], Field(min_length=1)]
    options: Mapping[str, Any] = {}
    arms: Sequence[str] = ()
    """The arms of the study that take part; all if empty."""
    tune: Tuning | None = None
    tuned_in: str | None = None
    """The experiment whose tuned options are used."""
    sweep: Mapping[str, Annotated[Sequence[Any], Field(min_length=1)]] = {}
    """The options to vary and their values. The study runs and reports one experiment for each combination."""

    def points(self) -> list[Experiment]:
        """Return one experiment for each combination of the swept values; without a sweep, the experiment itself."""
        if not self.sweep:
            return [self]
        experiments = []
        for point in combinations(self.sweep):
            name = f"{self.name}, {options_text(point)}"
            options = {**self.options, **point}
            experiments.append(self.model_copy(update={"name": name, "options": options}))
        return experiments

    @model_validator(mode="after")
    def _check_consistency(self) -> Experiment:
        if self.tune:
            common_seeds = set(self.seeds) & set(self.tune.seeds)
            if common_seeds:
                raise InvalidValue(
                    f"seeds {sorted(common_seeds)} are tuned on and reported on; report on others"
                )
        if self.tune and self.tuned_in:
            raise InvalidValue("has both `tune` and `tuned_in`; leave one out")
        if self.sweep and (self.tune or self.tuned_in):
            raise InvalidValue(
                "has `sweep` and a tuned option; a sweep reports every value, so leave the tuning out"
            )
        return self


@dataclass(frozen=True)
class PlannedRun:
    """A planned run of `bandpo-lab train`."""

    experiment: str
    arm: str
    seed: int
    options: Mapping[str, Any]
    tuning: Mapping[str, Any] | None = None
    """The values of the tuned options, if the run is a tuning run."""

    @property
    def folder(self) -> Path:
        """The folder of the run, relative to the study's ``runs``."""
        names = [self.experiment, self.arm]
        if self.tuning:
            names = [self.experiment, "tuning", self.arm]
            names += [f"{name}-{value}" for name, value in self.tuning.items()]
        names.append(f"seed-{self.seed}")
        return Path(*(re.sub(r"[^\w.+-]+", "-", name.lower()) for name in names))

    def __str__(self) -> str:
        tuning = "".join(f", {name} {value}" for name, value in (self.tuning or {}).items())
        return f"{self.experiment}: {self.arm}{tuning}, seed {self.seed}"


def _with_names(experiments: Any) -> Any:
    """Add its name to each experiment of a file."""
    if not isinstance(experiments, dict):
        return experiments
    return {
        name: {"name": name, **experiment} if isinstance(experiment, dict) else experiment
        for name, experiment in experiments.items()
    }


def _with_points(experiments: Mapping[str, Experiment]) -> Mapping[str, Experiment]:
    """Replace each experiment that has a sweep by its points."""
    points: dict[str, Experiment] = {}
    for experiment in experiments.values():
        points |= {point.name: point for point in experiment.points()}
    return points


class Study(FileModel):
    """A study file after validation.

    Raises:
        ValueError: The baseline or an arm of an experiment is not among the arms, an arm has no method, or the options
            contain one that the study sets.
    """

    title: str
    question: str
    primary: str
    """The metric that decides, one of `bandpo_lab.study.collect.METRICS` or a score after training."""
    stopping: str
    """The stopping rule, in words. It is only printed."""
    baseline: str
    """The arm with which the others are compared."""
    arms: Mapping[str, Mapping[str, Any]]
    """The options of `bandpo-lab train` of each arm, at least a ``method``."""
    options: Mapping[str, Any]
    """The options of `bandpo-lab train` that all runs share."""
    experiments: Annotated[
        Mapping[str, Experiment],
        BeforeValidator(_with_names),
        Field(min_length=1),
        AfterValidator(_with_points),
    ]
    """The experiments by name; each point of a sweep is an experiment."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Study:
        if self.baseline not in self.arms:
            raise InvalidValue(f"baseline {self.baseline!r} is none of the arms {', '.join(self.arms)}")
        for name, options in self.arms.items():
            if "objective" in options:
                raise InvalidValue(
                    f"arm {name!r} has an objective in addition to its rule; write one method of both, "
                    f"`{name}: {{method: 'Method({options.get('method', 'Band()')}, {options['objective']})'}}`"
                )
            if "method" not in options:
                raise InvalidValue(
                    f"arm {name!r} names no method; write `{name}: {{method: 'Band(KL(), 0.05)'}}`"
                )
        for experiment in self.experiments.values():
            unknown = [arm for arm in experiment.arms if arm not in self.arms]
            if unknown:
                raise InvalidValue(f"experiment {experiment.name!r}: unknown arms {', '.join(unknown)}")
            source = experiment.tuned_in
            if source and not (source in self.experiments and self.experiments[source].tune):
                raise InvalidValue(
                    f"experiment {experiment.name!r}: tuned_in {source!r} is no experiment that tunes"
                )
            reserved = {"output_dir", "seed", "resume"} & {*self.options, *experiment.options}
            if reserved:
                raise InvalidValue(f"options may not set {', '.join(sorted(reserved))}: the study does")
        return self

    def check_methods(self) -> None:
        """Check the method of each arm, which may be a class of your own in the current folder.

        This imports that class, so it is only called before a study runs, and not for a report, whose results may come
        from an untrusted source.

        Raises:
            ValueError: A method cannot be read; the message names the arm.
        """
        for name, options in self.arms.items():
            try:
                with importable_current_folder():
                    as_method(options["method"])
            except ValueError as error:
                raise InvalidValue(f"arm {name!r}: {error}") from error

    def arms_of(self, experiment: Experiment) -> list[str]:
        """Return the arms of an experiment, in the study's order."""
        return [arm for arm in self.arms if not experiment.arms or arm in experiment.arms]

    def tuning_runs(self) -> list[PlannedRun]:
        """Return the runs by which the options of arms are tuned."""
        runs = []
        for experiment in self.experiments.values():
            if not experiment.tune:
                continue
            for seed, choice in product(experiment.tune.seeds, experiment.tune.choices()):
                for arm in self.arms_of(experiment):
                    runs.append(self._run(experiment, arm, seed, choice, tuning=choice))
        return runs

    def reported(self, tuned_values: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[PlannedRun]:
        """Return the runs that are reported, ordered by seed and then by experiment.

        Args:
            tuned_values: The values of the tuned options, by the name of the experiment that tunes and the arm.
        """
        seeds: dict[int, None] = {}
        for experiment in self.experiments.values():
            seeds |= dict.fromkeys(experiment.seeds)
        runs = []
        for seed, experiment in product(seeds, self.experiments.values()):
            if seed not in experiment.seeds:
                continue
            for arm in self.arms_of(experiment):
                values: Mapping[str, Any] = {}
                if experiment.tune or experiment.tuned_in:
                    values = tuned_values[experiment.tuned_in or experiment.name, arm]
                runs.append(self._run(experiment, arm, seed, values))
        return runs

    def _run(
        self,
        experiment: Experiment,
        arm: str,
        seed: int,
        values: Mapping[str, Any],
        tuning: Mapping[str, Any] | None = None,
    ) -> PlannedRun:
        options = {**self.options, **values, **experiment.options, **self.arms[arm], "seed": seed}
        return PlannedRun(experiment.name, arm, seed, options, tuning)


def study_text(file: str) -> str:
    """Return the text of a study file, or of the study ``quick`` that comes with the package.

    Raises:
        ValueError: The file does not exist.
    """
    if file == "quick":
        return (resources.files("bandpo_lab.study") / "quick.yaml").read_text(encoding="utf-8")
    if not Path(file).is_file():
        raise InvalidValue(f"{file} does not exist; the study that comes with bandpo is called quick")
    return Path(file).read_text(encoding="utf-8", errors="replace")


def parse_study(text: str) -> Study:
    """Parse the text of a study file.

    Raises:
        ValueError: The text is not valid YAML, a key is unknown or missing, or values exclude each other; the message
            names the key.
    """
    return validate_as(Study, read_yaml(text, "the study"), "the study")
