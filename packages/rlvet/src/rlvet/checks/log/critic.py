"""Check the critic of PPO: whether its values explain the returns, and whether its loss and gradient stay bounded."""

from __future__ import annotations

from statistics import fmean, median

from rlvet._numbers import format_number
from rlvet.checks.course import Case, Course, Series, onset, tenths
from rlvet.checks.findings import Finding, Kind
from rlvet.checks.log.results import change_text, last_tenth, later_half, passed_check, undecided_check
from rlvet.checks.log.reward import check_constant_reward
from rlvet.checks.registry import LOGS

FEWEST_ROWS = 20
"""Number of log steps below which a critic is not judged, since it is trained from its start on."""

EXPLAINS_NOTHING = 0.05
"""Explained variance up to which the values of a critic are no better than the mean return."""

WORSE_THAN_MEAN = -1.0
"""Explained variance below which values are farther from the returns than twice their spread."""

GROWTH = 10.0
"""Factor by which the loss or the gradient of a critic is above its lowest tenth if it diverges."""

GROWTH_SINCE_START = 3.0
"""Factor by which it is also above its first tenth, in which a new critic has a large loss."""

GROWING = {"value_loss": "the loss of the critic", "critic_grad_norm": "the gradient norm of the critic"}
"""The quantities of a critic that grow without bound if it diverges, each with its name in a sentence."""

CRITIC_NO_FIT = Kind(
    code="critic-no-fit",
    severity="look",
    meaning="the critic explains nothing of the returns",
    condition=(
        f"the median explained variance of the later half is at most {EXPLAINS_NOTHING:g}, over {FEWEST_ROWS} or more "
        "log steps whose rewards differ"
    ),
    remedy=(
        "train the critic before the policy, or raise its learning rate; or use advantages without a critic, "
        "from groups of answers"
    ),
    evidence=("explained_variance",),
    source="arXiv:2503.01491, which trains the critic first; the definition of the explained variance",
    scenarios=("critic explains nothing",),
)

CRITIC_DIVERGES = Kind(
    code="critic-diverges",
    severity="fix",
    meaning="the critic diverges",
    condition=(
        f"in the last tenth, its loss or gradient norm is {GROWTH:g} times that of its lowest tenth and "
        f"{GROWTH_SINCE_START:g} times that of the first; or the explained variance of the later half is below "
        f"{WORSE_THAN_MEAN:g}"
    ),
    remedy=(
        "lower the learning rate of the critic, clip its gradient and its values, and check the scale of the rewards"
    ),
    is_in_the_weights=True,
    evidence=("value_loss", "critic_grad_norm", "explained_variance"),
    source="verl-project/verl issue 498, with an explained variance of -72; simulated runs of `benchmarks/doctor`",
    scenarios=("critic diverges",),
)


@LOGS.check(
    "fit of the critic",
    after="baseline of the advantages",
    tested="the critic explains returns, and its loss and gradient stay bounded",
    explained="the values of the critic explain the returns, and neither its loss nor its gradient grows without bound",
    reports=(CRITIC_DIVERGES, CRITIC_NO_FIT),
)
def check_critic(case: Case) -> Finding:
    """Check that the critic explains a part of the returns, and that neither its loss nor its gradient diverges."""
    course = case.course
    for name, description in GROWING.items():
        metric = course.series(name)
        if _diverges(metric):
            means = tenths(metric.values)
            cause = (
                f"{description} went {change_text(min(means), means[-1])}, from its lowest tenth to the last"
            )
            measure = f"{description}, last tenth"
            finding = passed_check(metric, means[-1], measure, last_tenth(metric))
            limit = GROWTH * min(means)
            start = onset(metric, lambda mean, limit=limit: mean > limit)
            return finding.failed(CRITIC_DIVERGES, cause, onset=start, quantities=[name])

    explained = course.series("explained_variance")
    if not explained.values:
        return undecided_check("no critic is logged")
    if len(explained.values) < FEWEST_ROWS:
        return undecided_check(f"needs at least {FEWEST_ROWS} log steps")
    if not _rewards_differ(case, course):
        return undecided_check("returns do not differ")
    late = median(explained.later_half)
    measure = "median explained variance of the later half"
    finding = passed_check(explained, late, measure, later_half(explained))
    if late < WORSE_THAN_MEAN:
        cause = f"the critic is worse than the mean return: explained variance {format_number(late)} in the later half"
        start = onset(explained, lambda mean: mean < WORSE_THAN_MEAN)
        return finding.failed(CRITIC_DIVERGES, cause, onset=start, quantities=["explained_variance"])
    if late <= EXPLAINS_NOTHING:
        variance = f"explained variance {format_number(late)} in the later half"
        cause = f"the critic explains nothing of the returns: {variance}"
        start = onset(explained, lambda mean: mean <= EXPLAINS_NOTHING)
        return finding.failed(CRITIC_NO_FIT, cause, onset=start, quantities=["explained_variance"])
    if fmean(explained.values[-max(1, len(explained.values) // 10) :]) <= EXPLAINS_NOTHING:
        return undecided_check("it explains less at the end")
    return finding


def _diverges(metric: Series) -> bool:
    """Return whether the last tenth of a metric is far above its lowest tenth, and above its first."""
    if len(metric.values) < FEWEST_ROWS:
        return False
    means = tenths(metric.values)
    # The median is not moved by a single spike.
    size = len(metric.values) // 10
    last = median(metric.values[-max(3, size) :])
    return 0 < min(means) * GROWTH < last and last > GROWTH_SINCE_START * means[0]


def _rewards_differ(case: Case, course: Course) -> bool:
    """Return whether the mean reward changes, so that returns have a variance that can be explained."""
    rewards = course.series("reward").values
    return case.of(check_constant_reward).ok is not False and (not rewards or len(set(rewards)) > 1)
