"""Check the components of the reward."""

from __future__ import annotations

from statistics import fmean

from rlvet._numbers import format_number, format_share
from rlvet.checks.course import Case, Series, deviation, fit_weights, tenths
from rlvet.checks.findings import Finding, Kind
from rlvet.checks.log.results import MOST, later_half, passed_check, undecided_check
from rlvet.checks.log.reward import CONSTANT_ROWS
from rlvet.checks.registry import LOGS
from rlvet.runs.quantities import component_name

ZERO_ROWS = 10
"""Number of rows from which a component of 0 in every row is reported. No answer has received it, whereas another value
may be a score that changes slowly. unslothai/unsloth issue 2291 has eleven rows."""

NARROW_BAND = 0.01
"""Range of a component's values, as a share of the largest, up to which it is constant if another one varies."""

NEARLY_ALL_ZERO = 0.95
"""Share of log steps with a component of 0 from which it can hardly be said to vary."""

COMPONENT_CONSTANT = Kind(
    code="component-constant",
    severity="look",
    meaning="a component of the reward never changes",
    condition=(
        f"a component of the reward has one value in every log step, over {CONSTANT_ROWS} or more, or over "
        f"{ZERO_ROWS} or more if the value is 0, or stays within {NARROW_BAND:.0%} of one, while another varies"
    ),
    remedy=(
        "read some answers with their values of this component: a reward function that always returns the "
        "same value has no effect"
    ),
    evidence=("components of the reward",),
    source="logs of IMJONEZZ/UnslothGRPO and abdo-ashraf/Gemma-3-RL-Finetuning, and unslothai/unsloth issue 2291",
    scenarios=("a judge at 0 beside another",),
)


def _components(case: Case) -> tuple[dict[str, Series], bool]:
    """Return the components of the reward by name, over the rows that have a reward, and whether these are all.

    A component with fewer than `ZERO_ROWS` rows is left out.
    """
    course = case.course
    keys: dict[str, str] = {}
    for number in course.rows.numbers_of_rows("reward")[:100]:
        for key in course.rows[number]:
            name = component_name(key)
            if name is not None:
                keys.setdefault(name, key)
    components = {}
    for name, key in keys.items():
        metric = course.series(key, "reward")
        if len(metric.values) >= ZERO_ROWS:
            components[name] = metric
    return components, len(components) == len(keys)


def _with_many_rows(components: dict[str, Series]) -> dict[str, Series]:
    """Return the components with enough rows for a fit of their weights."""
    return {name: metric for name, metric in components.items() if len(metric.values) >= CONSTANT_ROWS}


def _is_constant(component: Series) -> bool:
    """Return whether a component has one value, or over `CONSTANT_ROWS` or more stays within a narrow band."""
    low = min(component.values)
    high = max(component.values)
    largest = max(abs(low), abs(high))
    return low == high or (len(component.values) >= CONSTANT_ROWS and high - low <= NARROW_BAND * largest)


def _values_of(component: Series) -> str:
    """Return the value of a constant component, or the ends of its band."""
    low = format_number(min(component.values))
    high = format_number(max(component.values))
    return low if low == high else f"{low} to {high}"


@LOGS.check(
    "reward components that never change",
    after="a change of the prompts",
    tested="every component of the reward varies",
    explained="every component of the reward varies",
    reports=(COMPONENT_CONSTANT,),
)
def check_constant_components(case: Case) -> Finding:
    """Check that no component is constant while another varies."""
    components, are_all = case.of(_components)
    if len(components) < 2:
        return undecided_check("fewer than two components are logged")
    varying = {name: metric for name, metric in components.items() if not _is_constant(metric)}
    constant = {
        name: metric
        for name, metric in components.items()
        if name not in varying and (len(metric.values) >= CONSTANT_ROWS or not any(metric.values))
    }
    reported = constant or components
    first_component = next(iter(reported.values()))
    count = min(len(metric.values) for metric in reported.values())
    finding = passed_check(first_component, count, "log steps with this value")
    if not constant:
        if not are_all or len(varying) < len(components):
            return undecided_check(f"needs at least {CONSTANT_ROWS} log steps of each")
        for name, metric in components.items():
            zeros = sum(value == 0 for value in metric.values)
            if zeros >= NEARLY_ALL_ZERO * len(metric.values):
                return undecided_check(f"{name} is 0 in {zeros} of {len(metric.values)} log steps")
        return finding._replace(figure=None, measure="")
    if not varying:
        return undecided_check("no component varies")
    constants = ", ".join(f"{name} is {_values_of(metric)}" for name, metric in constant.items())
    means = ", ".join(f"{name} {format_number(fmean(metric.values))}" for name, metric in varying.items())
    cause = f"{constants} in every one of {count} log steps; means of the other components: {means}"
    quantities = [f"rewards/{name}" for name in constant]
    start = first_component.steps[0]
    return finding.failed(COMPONENT_CONSTANT, cause, onset=start, quantities=quantities)


LEVEL_PART = 0.03
"""Relative spread of the means of a component's tenths up to which the component is constant."""

FULL = 0.9
"""Mean of a component between 0 and 1 from which nearly every answer reaches its maximum."""

MOST_OF_REWARD = 0.6
"""Share of the reward above which one component dominates it."""

EXPLAINED = 0.8
"""Share of the reward's variance that its components must explain for their fitted weights to be used."""

MOST_COMPONENTS = 8
"""Largest number of components whose weights are fitted."""

COMPONENT_DOMINATES = Kind(
    code="component-dominates",
    severity="look",
    meaning="most of the reward is a component that every answer gets",
    condition=(
        f"a component stays near its maximum, makes up {MOST_OF_REWARD:.0%} of the reward, and varies less from row to "
        "row than the others"
    ),
    remedy="judge the run by the other components, or lower the weight of this one{reward weights}",
    evidence=("components of the reward", "reward"),
    source="huggingface/trl issues 3903 and 5298; simulated runs of `benchmarks/doctor` and of `rldoctor`",
    scenarios=("form is most of the reward",),
)


@LOGS.check(
    "reward components that outweigh the others",
    after="reward components that never change",
    tested="most of the reward comes from components that still change",
    explained="no component that stays at its maximum is most of the reward",
    reports=(COMPONENT_DOMINATES,),
)
def check_largest_component(case: Case) -> Finding:
    """Check that no component that has stopped changing makes up most of the reward."""
    components, _ = case.of(_components)
    reward = case.course.series("reward")
    varying = {}
    for name, metric in _with_many_rows(components).items():
        if len(metric.values) == len(reward.values) and len(set(metric.values)) > 1:
            varying[name] = metric
    if not 2 <= len(varying) <= MOST_COMPONENTS:
        vary = "1 component varies" if len(varying) == 1 else f"{len(varying)} components vary"
        return undecided_check(f"needs 2 to {MOST_COMPONENTS} components that vary, and {vary}")
    finding = passed_check(reward)

    # A log does not contain the weights of the components, so they are fitted.
    fit = fit_weights(reward.values, [metric.values for metric in varying.values()])
    if fit is None:
        return undecided_check("the weights of the components are not known")
    weights, explained = fit
    if explained < EXPLAINED:
        return undecided_check("the weights of the components are not known")
    contributions = {}
    for weight, (name, metric) in zip(weights, varying.items(), strict=True):
        contributions[name] = weight * fmean(metric.later_half)
    total = sum(abs(value) for value in contributions.values())
    if not total:
        return finding
    shares = {name: value / total for name, value in contributions.items()}
    largest = max(contributions, key=lambda name: contributions[name])

    means = tenths(varying[largest].values)[5:]
    is_level = max(means) - min(means) <= LEVEL_PART * abs(fmean(means))
    # A component that is constant below its maximum may be the goal of the run. That would be a plateau.
    is_full = max(means) <= 1.0 and fmean(means) >= FULL
    if shares[largest] < MOST_OF_REWARD or not is_level or not is_full:
        return finding
    # Near its maximum too, it may be what still differs from row to row, as the others are nearer to theirs.
    variances = {
        name: (weight * deviation(metric.later_half)) ** 2
        for weight, (name, metric) in zip(weights, varying.items(), strict=True)
    }
    if variances[largest] > MOST * sum(variances.values()):
        return finding
    other_shares = ", ".join(
        f"{name} {format_share(share)}" for name, share in shares.items() if name != largest
    )
    cause = (
        f"{format_share(shares[largest])} of the reward is {largest}, which stays at {format_number(fmean(means))} in "
        f"the later half, so that the reward hardly shows the other components ({other_shares})"
    )
    measure = f"share of the reward that is {largest}, later half"
    finding = passed_check(reward, shares[largest], measure, later_half(reward))
    start = reward.steps[later_half(reward)][0]
    return finding.failed(
        COMPONENT_DOMINATES, cause, onset=start, quantities=[f"rewards/{largest}", "reward"]
    )
