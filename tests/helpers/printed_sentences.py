"""A reader of the printed diagnosis that checks each sentence against the raw rows of the log.

It shares no code with the checks: it has its own means, its own list of what a sentence claims, and the limits of
docs/diagnose.md. A sentence of a level is compared with the level of the rows, however they came to it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median

Rows = Sequence[Mapping[str, float]]

LOWEST_SHARE_WITH_ROUNDING = 0.006
"""Rounding of a share that is printed as a whole percentage."""


class Columns:
    """The quantities of a log as lists, under rlvet's names for them, without rows that lack them."""

    def __init__(self, rows: Rows):
        self.rows = rows

    def __getitem__(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]

    def steps(self, name: str) -> list[float]:
        return [row["step"] for row in self.rows if name in row]

    @property
    def clip(self) -> list[float]:
        names = ["clip"] if self["clip"] else ["clip_high", "clip_low"]
        rows = [[row[name] for name in names if name in row] for row in self.rows]
        return [sum(values) for values in rows if values]


def end(values: Sequence[float], parts: int = 10) -> float:
    """Return the mean of the last part of a list."""
    return fmean(values[-max(1, len(values) // parts) :])


def start(values: Sequence[float], parts: int = 10) -> float:
    return fmean(values[: max(1, len(values) // parts)])


def second_half(values: Sequence[float]) -> list[float]:
    return list(values[len(values) // 2 :])


def blocks(values: Sequence[float]) -> list[float]:
    """Return the means of ten parts of nearly equal length."""
    n = len(values)
    edges = [round(n * part / 10) for part in range(11)]
    return [fmean(values[a:b]) for a, b in pairwise(edges)]


def equal_parts(values: Sequence[float], count: int = 10) -> list[float]:
    """Return the means of parts, of which the first are one value longer if they are not equal."""
    n = len(values)
    edges = [sum((n + count - 1 - k) // count for k in range(part)) for part in range(count + 1)]
    return [fmean(values[a:b]) for a, b in pairwise(edges)]


def rose(values: Sequence[float]) -> bool:
    return len(values) > 1 and end(values, 3) > start(values, 3)


# --- What a passed check claims. Each function returns True if the rows contradict the claim. ---


def far_from_reference(c: Columns) -> bool:
    return bool(c["kl"]) and (end(c["kl"]) > 1 or median(second_half(c["kl"])) > 1)


def reference_is_another(c: Columns) -> bool:
    return bool(c["kl"]) and c["kl"][0] > 0.1


def early_steps_are_large(c: Columns) -> bool:
    if c["moved"]:
        return max(c["moved"]) > 2.5
    return bool(c["kl"]) and max(c["kl"][:10]) >= 1


MISMATCH_LIMITS = {"mismatch_kl": 0.05, "mismatch": 0.1, "mismatch_probs": 0.05}


def engine_differs(c: Columns) -> bool:
    for name, limit in MISMATCH_LIMITS.items():
        if c[name] and (end(c[name]) > limit or fmean(second_half(c[name])) > limit):
            return True
        if len(c[name]) >= 40:
            means = blocks(c[name])
            climbs = sum(b > a for a, b in pairwise(means))
            if climbs >= 8 and means[-1] > max(5 * means[0], limit / 10):
                return True
    # The weight of a sequence may be far from 1 though its tokens agree, so weights count only without their distance.
    weights = [] if c["mismatch"] else c["importance_weight"]
    if weights and (end(weights) > 2 or end(weights) < 0.5):
        return True
    return bool(c["staleness"]) and fmean(c["staleness"]) > 4


def spikes_are_many(c: Columns) -> bool:
    norms = c["grad_norm"]
    above_zero = [norm for norm in norms if norm > 0] or [0.0]
    count = 0
    for row in range(5, len(norms) - 5):
        around = max(median(norms[row - 5 : row]), median(norms[row + 1 : row + 6]), median(above_zero) / 2)
        count += norms[row] > 16 * around > 0
    return count >= 3


def clip_is_heavy(c: Columns) -> bool:
    return bool(c.clip) and max(end(c.clip), fmean(second_half(c.clip))) > 0.2


def many_are_cut(c: Columns) -> bool:
    if not c["cut"]:
        # Nothing in the rows says which answers were finished, unless the longest of them is far below a cap.
        return not c["length_max"]
    means = [end(c["cut"]), fmean(second_half(c["cut"]))]
    if len(c["cut"]) >= 10:
        means += blocks(c["cut"])
    return max(means) > 0.5


def rewards_are_equal(c: Columns) -> bool:
    values = c["reward"]
    return len(values) >= 8 and len(set(values[-max(8, len(values) // 4) :])) == 1


def groups_are_equal(c: Columns) -> bool:
    dead = c["dead"]
    return bool(dead) and (fmean(second_half(dead)) > 0.5 or end(dead, 10) > 0.5)


def entropy_lost_or_random(c: Columns) -> bool:
    entropy = c["entropy"]
    if len(entropy) < 2:
        return False
    is_lost = end(entropy) < 0.25 * start(entropy) and not rose(c["reward"])
    is_random = end(entropy) > 1.2 * max(2 * start(entropy), start(entropy) + 1)
    return is_lost or is_random


def only_longer(c: Columns) -> bool:
    length = c["length"]
    better = rose(c["reward"]) or rose(c["evaluation"])
    return len(length) > 1 and end(length) >= 1.8 * start(length) > 0 and not better


def only_shorter(c: Columns) -> bool:
    length = c["length"]
    return len(length) > 1 and end(length) < 0.2 * start(length) and not rose(c["reward"])


def no_baseline(c: Columns) -> bool:
    rows = [
        row for row in c.rows if "advantage_max" in row and "reward_max" in row and row["reward_max"] != 0
    ]
    equal = [math.isclose(row["advantage_max"], row["reward_max"], rel_tol=1e-4) for row in rows]
    lower = [row["advantage_min"] < 0 for row in rows]
    return bool(rows) and all(equal) and not any(lower)


def weights_rest(c: Columns) -> bool:
    rates = c["learning_rate"]
    norms = c["grad_norm"]
    return (bool(rates) and max(rates) <= 1e-9) or (bool(norms) and not any(norms))


def policy_rests(c: Columns) -> bool:
    kl = c["kl"]
    return bool(kl) and max(abs(value) for value in kl) < 0.001 and not rose(c["reward"])


def last_part_is_other(c: Columns) -> bool:
    for name in ("entropy", "cut", "kl", "length", "mismatch", "mismatch_kl", "grad_norm"):
        if len(c[name]) < 40:
            continue
        *earlier, last = blocks(c[name])
        low, high = min(earlier), max(earlier)
        is_outside = last * 3 < low or last > 3 * high
        if is_outside and (name != "cut" or last > 0.1):
            return True
    return False


def reward_is_lost(c: Columns) -> bool:
    if len(c["reward"]) < 10:
        return False
    means = blocks(c["reward"])
    height = max(means) - min(0.0, *means)
    return max(means) - means[-1] > 0.6 * height


def reward_is_constant(c: Columns) -> bool:
    values = second_half(c["reward"])
    return len(values) >= 15 and len(set(values)) == 1


def has_bad_numbers(c: Columns) -> bool:
    return any(row.get("not_finite") for row in c.rows)


def weights_are_far(c: Columns) -> bool:
    weights = c["importance_weight"]
    return bool(weights) and (end(weights) > 1.4 or end(weights) < 0.7)


def levels_jump_together(c: Columns) -> bool:
    """Both halves are level, and reward and length change between them by ten times what they vary within each."""
    jumps = []
    for name in ("reward", "length"):
        values = c[name]
        if len(values) < 40:
            return False
        half = len(values) // 2
        before, after = values[:half], values[half:]
        within = max(max(before) - min(before), max(after) - min(after))
        jumps.append(abs(fmean(after) - fmean(before)) > 10 * within)
    return all(jumps)


def _components(c: Columns) -> dict[str, list[float]]:
    """Return the values of each component of the reward, in the rows that have a reward."""
    names = {name for row in c.rows for name in row if re.search(r"(^|/)rewards?/[^/]+(/mean)?$", name)}
    rows = [row for row in c.rows if "reward" in row]
    return {name: [row[name] for row in rows if name in row] for name in names}


def a_component_is_constant(c: Columns) -> bool:
    components = _components(c)
    constant = [len(values) >= 20 and len(set(values)) == 1 for values in components.values()]
    varying = [len(set(values)) > 1 for values in components.values()]
    return any(constant) and any(varying)


def one_component_is_all(c: Columns) -> bool:
    """One component is 1 in the whole later half, the others are nearly 0, and the reward is their sum."""
    components = {name: second_half(values) for name, values in _components(c).items() if len(values) >= 20}
    full = [values for values in components.values() if min(values) > 0.99 and max(values) <= 1]
    rest = [values for values in components.values() if max(map(abs, values)) < 0.1]
    return len(full) == 1 and len(rest) == len(components) - 1 >= 1 and fmean(second_half(c["reward"])) > 0.9


def score_is_lost(c: Columns) -> bool:
    """The score has fallen by half since its best third, while the reward rose in each of its thirds since."""
    score, steps = c["evaluation"], c.steps("evaluation")
    if len(score) < 9 or min(score) <= 0:
        return False
    third = len(score) // 3
    best = max(range(len(score) - third), key=lambda row: fmean(score[row : row + third]))
    level = min(score[best : best + third])
    reward = [
        value for step, value in zip(c.steps("reward"), c["reward"], strict=True) if step >= steps[best]
    ]
    if len(reward) < 12:
        return False
    part = len(reward) // 3
    parts = [reward[:part], reward[part : 2 * part], reward[-part:]]
    rises = max(parts[0]) < min(parts[1]) and max(parts[1]) < min(parts[2])
    return rises and max(score[-third:]) < level / 2


def run_is_dead(c: Columns) -> bool:
    """The reward is gone in the last rows, or 0 in all of them and never small before."""
    rewards = [row.get("reward") for row in c.rows]
    if len(rewards) < 40:
        return False
    before, after = rewards[:-12], rewards[-12:]
    if None in before:
        return False
    if after.count(None) == 12:
        return True
    is_zero = after.count(0.0) == 12 and c["reward_std"][-12:] in ([], [0.0] * 12)
    return is_zero and min(before) > 0.2 * fmean(before) > 0


def a_metric_is_lost(c: Columns) -> bool:
    """A quantity was in every row of the first half, and is in none of the last four."""
    names = ("reward", "reward_std", "dead", "cut", "entropy", "kl", "grad_norm", "learning_rate", "length")
    for name in names:
        has_it = [name in row for row in c.rows]
        if len(has_it) >= 20 and all(second_half(has_it[::-1])) and not any(has_it[-4:]):
            return True
    return False


def critic_is_bad(c: Columns) -> bool:
    """The critic explains nothing in each row of the later half, or its loss is twenty times larger at the end."""
    explained = second_half(c["explained_variance"])
    if len(explained) >= 10 and max(explained) < 0.04:
        return True
    for name in ("value_loss", "critic_grad_norm"):
        values = c[name]
        if len(values) >= 40 and min(values[-4:]) > 20 * max(second_half(values)[: len(values) // 4]) > 0:
            return values[-1] > 10 * max(values[:4])
    return False


CLAIMS: Mapping[str, Callable[[Columns], bool]] = {
    "the critic explains returns, and its loss and gradient stay bounded": critic_is_bad,
    "metrics live to the last log step": run_is_dead,
    "metrics are logged to the end, and those that changed still do": a_metric_is_lost,
    "the log holds numbers": has_bad_numbers,
    "weights move": weights_rest,
    "a baseline is subtracted from rewards": no_baseline,
    "answers are not much shorter at the end, or the reward is higher": only_shorter,
    "the reference is the model that training began with": reference_is_another,
    "engine and trainer agree, as logged": engine_differs,
    "the first steps do not move the policy too far": early_steps_are_large,
    "spikes of the gradient norm are few": spikes_are_many,
    "the clip keeps most of the gradient": clip_is_heavy,
    "the policy stays near the reference": far_from_reference,
    "most answers are finished": many_are_cut,
    "rewards differ": rewards_are_equal,
    "half of the groups or more carry signal": groups_are_equal,
    "entropy is not lost without a higher reward, nor ends both twofold and a nat higher": entropy_lost_or_random,
    "answers are less than a quarter longer at the end, or better too": only_longer,
    "the policy moves": policy_rests,
    "entropy, KL, answers, gradient and engine do not change suddenly in the last tenth of the run": last_part_is_other,
    "the reward does not collapse": reward_is_lost,
    "the reward is not flat for half of the run": reward_is_constant,
    "importance weights of sequences keep the gradient": weights_are_far,
    "the largest changes of reward and length are not one jump": levels_jump_together,
    "every component of the reward varies": a_component_is_constant,
    "most of the reward comes from components that still change": one_component_is_all,
    "the score on other prompts does not fall while the reward rises": score_is_lost,
}
"""For each passed check, a function that returns True if the rows contradict it."""
NO_CLAIM = {"the effect of the clip": "names the part of a run that is described, and claims nothing of it"}
"""The reasons why a sentence of a passed check has no function in `CLAIMS`."""


# --- What a headline "ok" claims ---


def fault_of(c: Columns) -> str | None:
    """Return a fault that the level of the rows shows by itself; None if there is none."""
    n = len(c["reward"])
    if has_bad_numbers(c):
        return "nan"
    if n >= 8 and c["kl"] and min(c["kl"]) > 1.1:
        return "every KL above 1"
    if len(c["kl"]) >= 10 and median(second_half(c["kl"])) > 1.1 and end(c["kl"]) > 1.1:
        return "KL above 1"
    if len(c["cut"]) >= 2 and min(second_half(c["cut"])) > 0.5:
        return "answers cut off"
    if len(c["dead"]) >= 16 and min(second_half(c["dead"])) > 0.55 and end(c["reward"]) < 0.5:
        return "groups without signal"
    for name, limit in MISMATCH_LIMITS.items():
        if len(c[name]) >= 8 and min(second_half(c[name])) > limit * 1.1:
            return "engine differs"
    if len(c.clip) >= 8 and min(second_half(c.clip)) > 0.31:
        return "clip"
    return None


# --- What the text of a finding claims ---

NUMBER = r"(-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)"
SHARE = r"(\d+(?:\.\d+)?)%"


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def _equal(text: str, value: float) -> bool:
    """Return whether a printed number is the value, to its three digits."""
    number = _value(text)
    return (
        math.isclose(number, value, rel_tol=0.006, abs_tol=1e-9)
        or abs(number - value) < 0.5000001 <= abs(value) / 100
    )


def _equal_share(text: str, value: float) -> bool:
    return abs(float(text) / 100 - value) < LOWEST_SHARE_WITH_ROUNDING


CHANGE = re.compile(rf"{NUMBER}%? → {NUMBER}%?")
"""Two values of a quantity, before and after."""

WINDOWS = re.compile(
    r"from the (?:first|best) (?:tenth|third) of (?:the run|these steps|the log steps before step [\d.]+)"
    r"(?: before step [\d.]+)? to the last|from the best of \d+ parts of the run(?: before step [\d.]+)? to the last"
    r"|from the first log step to the last tenth|from steps [\d.]+ to [\d.]+ to the last tenth"
    r"|from (?:its lowest|the ninth) tenth to the last|in the first \d+ log steps"
    r"|from step [\d.]+ (?:on|to [\d.]+)|(?:all|nearly) at once"
    r"|scores: the best mean of \d+ and the last; rewards: the first third of these steps and the last"
)
"""The rows to which the two values of a change belong."""

QUANTITIES = {
    "reward": "reward",
    "where it falls": "reward",
    "entropy": "entropy",
    "mean length": "length",
    "length": "length",
    "KL to the reference": "kl",
    "the standard deviation of rewards": "reward_std",
    "score on other prompts": "evaluation",
}
"""The names of quantities in a sentence, each with that of the rows."""

OTHER_NAMES = re.compile(r"\w+ norm|\w+_\w+|\w+/\w+|\bkl\b|\bcut\b|sample size|the loss|share of")
"""Names of quantities whose values are not read again here."""


def _named(text: str) -> str | None:
    """Return the quantity that a sentence names last, the longest of its names; None if it is another one."""
    ends = {name: text.rfind(name) + len(name) for name in QUANTITIES if name in text}
    others = [match.end() for match in OTHER_NAMES.finditer(text)]
    last = max(ends, key=lambda name: (ends[name], len(name)), default=None)
    return QUANTITIES[last] if last and ends[last] >= max(others, default=0) else None


def _best_and_last(
    values: list[float], reward: list[float], count: int, onset: int | None
) -> tuple[float, float] | None:
    """Return the means of the part with the highest reward, and of the last; None if some rows have no reward.

    Args:
        values: The values of the quantity.
        reward: The rewards.
        count: The number of parts.
        onset: The row of the best part from which on it does not count; None if all of it does.
    """
    if len(values) != len(reward):
        return None
    rewards = equal_parts(reward, count)
    best = rewards.index(max(rewards))
    size, longer = divmod(len(values), count)
    first = best * size + min(best, longer)
    end = first + size + (best < longer)
    if onset is not None:
        # The best of as many rows that follow each other before it.
        length = end - first
        means = {
            row: fmean(reward[row : min(row + length, onset)]) for row in range(max(1, onset - length + 1))
        }
        first = max(means, key=means.__getitem__)
        end = min(first + length, onset)
    return fmean(values[first:end]), equal_parts(values, count)[-1]


def _rows_of(
    window: str, before: str, values: list[float], steps: list[float], reward: list[float]
) -> tuple[float, float] | None:
    """Return the two values that a window has; None if they are not computed again.

    Args:
        window: The words for it.
        before: The sentence up to the change.
        values: The values of the quantity.
        steps: Their steps.
        reward: The rewards.
    """
    if match := re.match(r"scores: the best mean of (\d+) and the last", window):
        size = int(match[1])
        if "the reward rose" not in before:
            means = [fmean(values[row : row + size]) for row in range(len(values) - size + 1)]
            return max(means), means[-1]
    if "these steps" in window:
        if "two thirds of the run" in before:
            values = values[len(values) // 3 :]
        elif match := re.search(
            r"KL to the reference went .* in the first (\d+) log steps.* after that", before
        ):
            values = values[int(match[1]) - 1 :]
        elif match := re.search(rf"(?:since|from) step {NUMBER}", before):
            values = [value for value, step in zip(values, steps, strict=True) if step >= _value(match[1])]
        else:
            return None
        if "third" in window:
            return start(values, 3), end(values, 3)
        parts = equal_parts(values)
        return parts[0], parts[-1]
    if match := re.search(r"of the log steps before step ([\d.]+)", window):
        values = [value for value, step in zip(values, steps, strict=True) if step < _value(match[1])]
        return start(values), end(values)
    if window == "from the first tenth of the run to the last":
        return start(values), end(values)
    if window == "from the first third of the run to the last":
        return start(values, 3), end(values, 3)
    if match := re.match(
        r"from the best (?:tenth|of (\d+) parts) of the run(?: before step ([\d.]+))? to the", window
    ):
        count = int(match[1] or 10)
        onset = steps.index(_value(match[2])) if match[2] else None
        return _best_and_last(values, reward, count, onset)
    if window == "from the first log step to the last tenth":
        return values[0], end(values)
    return None


def false_changes_of(text: str, c: Columns) -> Iterator[str]:
    """Yield the changes in a finding's sentence whose rows are not named, or whose values are not those of them."""
    for match in CHANGE.finditer(text):
        window = WINDOWS.search(text, match.end())
        if window is None:
            yield f"the rows of a change: {match[0]}"
            continue
        name = _named(text[: match.start()])
        if name is None or not c[name]:
            continue
        values = c[name]
        rows = _rows_of(window[0], text[: match.start()], values, c.steps(name), c["reward"])
        if rows is not None and not (_equal(match[1], rows[0]) and _equal(match[2], rows[1])):
            yield f"a change of {name}: {match[0]}, not {rows[0]:.3g} → {rows[1]:.3g} {window[0]}"


def false_parts_of(text: str, c: Columns) -> Iterator[str]:
    """Yield the parts of a finding's sentence that the rows contradict."""
    yield from false_changes_of(text, c)
    match = re.search(rf"KL to the reference is {NUMBER} at step {NUMBER}", text)
    if match and (not _equal(match[1], c["kl"][0]) or c["kl"][0] <= 0.1):
        yield "KL at the first step"
    if match := re.search(
        rf"KL to the reference went {NUMBER} → {NUMBER} in the first (\d+) log steps", text
    ):
        row = int(match[3]) - 1
        if not (_equal(match[1], c["kl"][0]) and _equal(match[2], c["kl"][row])):
            yield "KL of the first steps"
        elif c["kl"][row] < 1 or c["kl"][row] <= c["kl"][0]:
            yield "a growth of the KL that is none"
    if re.search(rf"^KL to the reference {NUMBER} → {NUMBER} nats", text) and end(c["kl"]) <= c["kl"][0]:
        yield "a drift of the KL that is none"
    if match := re.search(rf"KL to the reference is above {NUMBER} in (\d+) of (\d+) log steps", text):
        above = sum(value > _value(match[1]) for value in c["kl"])
        if above != int(match[2]) or len(c["kl"]) != int(match[3]):
            yield "steps with a large KL"
    if match := re.match(rf"{SHARE} of answers are cut off", text):
        shares = [fmean(second_half(c["cut"])), fmean(c["cut"][-max(3, len(c["cut"]) // 10) :])]
        if not any(_equal_share(match[1], share) for share in shares):
            yield "share of answers cut off"
    if "at which most answers are cut off" in text:
        yield "a share of answers cut off that is not in the log"
    if match := re.match(rf"{SHARE} of groups[^%]* teach nothing", text):
        late = second_half(c["dead"])
        shares = [fmean(late), fmean(late[-max(8, len(late) // 5) :])]
        if not any(_equal_share(match[1], share) for share in shares):
            yield "share of groups without signal"
    if match := re.search(
        r"in the last two thirds of the run, the reward (still rises|does not surely rise)", text
    ):
        later = c["reward"][len(c["reward"]) // 3 :]
        means = blocks(later)
        if match[1] == "still rises" and means[-1] + means[-2] + means[-3] < sum(means[:3]):
            yield "a rise of the reward that is none"
    if "answers are right" in text or "answer is right" in text:
        mean = fmean(second_half(c["reward"]))
        is_share = min(c["reward"]) >= 0 and max(c["reward"]) <= 1
        least, most = (0.0, 0.11)
        if "nearly all" in text:
            least, most = (0.89, 1.0)
        elif "most answers are right" in text:
            least, most = (0.74, 0.91)
        if not is_share or not least <= mean <= most:
            yield "difficulty of the prompts"
    if "the reward did not rise: the policy" in text and end(c["reward"], 3) > start(c["reward"], 3):
        yield "a reward that rose is said not to have risen"
    if match := re.match(rf"mean reward {NUMBER} from step {NUMBER} to {NUMBER}", text):
        first, last = _value(match[2]), _value(match[3])
        values = [v for s, v in zip(c.steps("reward"), c["reward"], strict=True) if first <= s <= last]
        if not _equal(match[1], fmean(values)):
            yield "mean reward"
        fall = start(values, 3) - end(values, 3)
        deviation = math.sqrt(fmean([(v - fmean(values)) ** 2 for v in values]))
        if fall > 1.2 * deviation > 0 and "falls" not in text:
            yield "a reward that falls is called level"
    if match := re.search(rf"^(.*): {NUMBER} → {NUMBER}, from the first tenth", text):
        names = {"KL between": "mismatch_kl", "log-prob": "mismatch", "probabilities from": "mismatch_probs"}
        name = next((name for words, name in names.items() if words in match[1]), None)
        if name and not (_equal(match[2], start(c[name])) and _equal(match[3], end(c[name]))):
            yield "distance of engine and trainer"
    match = re.match(rf"{SHARE} of tokens are clipped", text)
    if match and not _equal_share(match[1], max(end(c.clip), fmean(second_half(c.clip)))):
        yield "share of clipped tokens"
    match = re.match(rf"data is {NUMBER} updates old", text)
    if match and abs(_value(match[1]) / fmean(c["staleness"]) - 1) > 0.06:
        yield "age of the data"
    if "each batch gets one update" in text and (
        max(c.clip, default=0.0) > 0 or max(c["kl_old"], default=0.0) > 1e-6
    ):
        yield "one update, though ratios differ from 1"
    if "no token was clipped" in text and max(c.clip, default=0.0) > 0:
        yield "no clipped token"


def violations(text: str, rows: Rows) -> list[tuple[str, str]]:
    """Return the sentences of a printed diagnosis that the rows contradict, each with its kind.

    Args:
        text: The diagnosis as it is printed, with all of its parts.
        rows: The rows of the log, under rlvet's names of quantities.
    """
    c = Columns(rows)
    found = []
    own_text = text.partition("\nthe configuration:")[0]
    headline = own_text.splitlines()[0]
    if headline.startswith("ok"):
        fault = fault_of(c)
        if fault:
            found.append(("ok against the rows", fault))
    passed = re.search(r"^passed[^:]*: (.*)$", own_text, re.M)
    for name in passed[1].split("; ") if passed else []:
        if name in CLAIMS and CLAIMS[name](c):
            found.append(("passed against the rows", name))
    causes = re.findall(r"^\d+\. [a-z-]+ \((?:stop|fix|look|note)\): (.*)$", own_text, re.M)
    # The first finding has no cause of its own if the headline is it.
    told = re.match(r"(?:[a-z-]+ or )*[a-z-]+: (.*)", headline)
    if told and re.search(r"^1\. [a-z-]+ \([a-z]+\)$", own_text, re.M):
        causes.append(told[1])
    for cause in causes:
        for part in false_parts_of(cause, c):
            found.append(("a finding against the rows", part))
    return found
