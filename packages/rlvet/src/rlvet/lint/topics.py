"""What rules of several frameworks share: id, severity, title, effect, and the condition and source if all have one.

Each topic is called with the rest of a rule. A framework that differs passes its own value of a field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rlvet.lint.learning_rate import learning_rate_is_high
from rlvet.lint.rules import Rule
from rlvet.lint.values import Values
from rlvet.runs.files import load_table

# Limits and sources

GREEDY_BELOW = 0.01
"""Temperatures below this are greedy. vLLM does not sample below 1e-5, and raises lower temperatures to 0.01."""
NEAR_ZERO = 0.2
"""The largest temperature that is near 0. Published runs use 0.6 to 1.0."""
LARGEST_ENTROPY_COEFFICIENT = 0.01
"""The largest coefficient of the entropy without a finding."""

GSPO_PAPER = (
    "Zheng et al., Group Sequence Policy Optimization, arXiv 2507.18071, section 5.1; "
    "huggingface/trl issue 3834"
)
KEEP_SAMPLING_MASK = (
    "DeepSeek-V3.2, arXiv 2512.02556, section 3.1 (keep sampling mask), on the effect; {} on the trainer's "
    "probabilities"
)
"""A source to which a framework adds its own code, by `str.format`."""
ENTROPY_SOURCE = (
    "verl-project/verl pull requests 781 and 1770; He et al., Skywork Open Reasoner 1, arXiv 2505.22312, section 4; "
    "{}"
)
"""A source to which a framework adds its own code, by `str.format`."""


# Conditions


def without_effect(
    v: Values, table: Mapping[str, Sequence[str]], is_read: Callable[[Values, str], bool]
) -> list[str]:
    """Return the short names of the settings that a configuration sets, and that its loss does not read.

    A setting with the framework's default is left out: the file of a run has all of them.

    Args:
        v: The values of a rule that reads ``loss``, and each setting of the table.
        table: For each setting, by its short name, the losses that do not read it.
        is_read: Returns True if the loss reads a setting all the same, beside other settings.

    Raises:
        UnknownValue: if it depends on a value that is not known.
    """
    names: list[str] = []
    for name, losses in table.items():
        if v.setting(name) is None or v.loss not in losses or getattr(v, name) == v.default(name):
            continue
        if not is_read(v, name):
            names.append(name)
    if not names and v.loss is not None:
        # None of them has the fault only if none of them is set elsewhere.
        v.is_set(*table)
    return names


def samples_greedily(v: Values) -> bool:
    """Return whether several answers to a prompt are sampled, and all are the most probable one.

    Args:
        v: The values of a rule that reads ``temperature`` and ``group``, and ``top_k`` if the framework has it.
    """
    if v.temperature >= GREEDY_BELOW and not (v.reads("top_k") and v.top_k == 1):
        return False
    return v.group > 1


def samples_nearly_greedily(v: Values) -> bool:
    """Return whether several answers to a prompt are sampled at a temperature near 0, but not greedily.

    Args:
        v: The values of a rule that reads ``temperature`` and ``group``.
    """
    return GREEDY_BELOW <= v.temperature <= NEAR_ZERO and v.group > 1


# The loss


def setting_without_effect(
    framework: str,
    names: Mapping[str, str],
    loss: str,
    source: str,
    is_read: Callable[[Values, str], bool] = lambda v, name: False,
) -> Rule:
    """Return the rule about settings that the loss in use does not read.

    Args:
        framework: The key of the framework.
        names: The dotted name of each setting of the framework's losses, by its last part.
        loss: The dotted name of the setting that selects the loss.
        source: The evidence.
        is_read: As for `without_effect`.
    """
    known = load_table("without_effect")[framework]
    table = {name: known[name] for name in names if name in known}
    return Rule(
        id="setting-without-effect",
        severity="look",
        title="a setting of the loss has no effect",
        effect="No value of it that was tried changes a gradient of the loss in use.",
        details="{loss.name} is {loss}, beside {concerned}.",
        reads={"loss": loss} | {name: names[name] for name in table},
        condition=lambda v: bool(without_effect(v, table, is_read)),
        concerns=lambda v: without_effect(v, table, is_read),
        fix="remove the setting, or choose a loss that reads it",
        source=f"{source}; each setting was changed and the gradients compared, docs/atlas.md",
    )


# Sampling

TRUNCATED_SAMPLING = partial(
    Rule,
    id="truncated-sampling",
    severity="look",
    title="sampling is truncated, and importance weights are used",
    effect="The engine reports probabilities over the tokens that remain after truncation, the trainer computes them "
    "over all tokens. Every importance weight is thus multiplied by the total probability of the remaining tokens, "
    "although the policy has not changed.",
)
TRUNCATED_WITHOUT_WEIGHT = partial(
    Rule,
    id="truncated-without-weight",
    severity="note",
    title="sampling is truncated",
    effect="Answers are sampled from a part of the vocabulary, and the trainer computes probabilities over all of it. "
    "The gradient is not that of the policy that answers.",
)
GREEDY_SAMPLING = partial(
    Rule,
    id="greedy-sampling",
    severity="fix",
    title="the answers to a prompt are all the same",
    condition=samples_greedily,
    effect="Sampling is greedy: the answers to a prompt are all the same, so that no advantage compares them.",
)
TEMPERATURE_NEAR_ZERO = partial(
    Rule,
    id="temperature-near-zero",
    severity="look",
    title="the temperature is near 0",
    condition=samples_nearly_greedily,
    effect="At a temperature near 0, the answers to a prompt differ little or not at all. A group of equal rewards "
    "has no advantage, and no gradient.",
)
SAMPLING_PENALTY = partial(
    Rule,
    id="sampling-penalty",
    severity="look",
    title="a penalty changes how answers are sampled",
    effect="The engine changes the probabilities of tokens that the answer has already, and with a repetition penalty "
    "those of the prompt. The trainer computes them without the penalty, so the gradient is not that of the policy "
    "that answers, and an importance weight that compares both, where one is used, is far from 1.",
)
PENALTY_IGNORED = partial(
    Rule,
    id="penalty-ignored",
    severity="look",
    title="the repetition penalty has no effect",
)

# The loss

CLIP_CANNOT_ACT = partial(
    Rule,
    id="clip-cannot-act",
    severity="look",
    title="the clip has no effect",
    effect="Each batch gets one update. The ratio of new to old probabilities is computed before it, so it is 1 for "
    "every token, and the clip has no effect.",
)
ASYNCHRONOUS_ANCHOR = partial(
    Rule,
    id="asynchronous-anchor",
    severity="look",
    title="the ratio is not relative to the sampling policy",
    effect="The old probabilities are the trainer's. Training is asynchronous, and older weights sampled: what "
    "changed since is in no ratio, and no clip bounds it.",
)
GSPO_CLIP = partial(
    Rule,
    id="gspo-clip",
    severity="look",
    title="the clip of GSPO is that of GRPO",
    effect="GSPO clips the geometric mean of the ratios of an answer, which stays near 1: its paper clips at 3e-4 and "
    "4e-4. At 0.05 or more, hardly any answer is clipped.",
    source=GSPO_PAPER,
)
ENTROPY_BONUS = partial(
    Rule,
    id="entropy-bonus",
    severity="look",
    title="the bonus for entropy is far above published ones",
    effect="Published runs use 0, or up to 0.01. A larger bonus can make the entropy grow until the answers are noise.",
)
NEGATIVE_KL = partial(
    Rule,
    id="negative-kl",
    severity="look",
    title="the KL term pays for distance from the reference",
    effect="The coefficient times the KL is added to the loss, so that a negative one drives the policy away from the "
    "reference. Forks and early versions that subtract the term need one.",
)
MEAN_DEPENDS_ON_MICRO_BATCH = partial(
    Rule,
    id="mean-depends-on-micro-batch",
    severity="look",
    title="the loss depends on how a batch is split",
)

# Groups and batches

BATCH_DOES_NOT_DIVIDE = partial(
    Rule,
    id="batch-does-not-divide",
    severity="fix",
    only_before_start=True,
)
GROUP_OF_ONE = partial(
    Rule,
    id="group-of-one",
    severity="fix",
    title="one answer to each prompt",
    effect="An advantage compares an answer with the other answers to its prompt, and there are no other answers:",
)
GROUP_OF_TWO = partial(
    Rule,
    id="group-of-two",
    severity="note",
    title="two answers to each prompt",
    effect="With two answers to a prompt, division by their standard deviation gives all advantages the same absolute "
    "value, however little the rewards differ.",
    source="Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.1",
)
CRITIC_AND_GROUP = partial(
    Rule,
    id="critic-and-group",
    severity="look",
    title="the answers of a group are not compared",
    effect="{estimator.name} is not set, and its default {estimator} learns a critic. The {group} answers to a prompt "
    "are not compared with each other, and no setting of a critic is in the configuration.",
)

# The optimizer

LEARNING_RATE = partial(
    Rule,
    id="learning-rate",
    severity="look",
    title="the learning rate is far above published ones",
    condition=learning_rate_is_high,
    effect="{rate.name} is {rate}. Of 314 examples that verl, SkyRL, prime-rl and OpenRLHF ship for training all "
    "weights, 268 use 1e-6 and none more than 1e-5; 27 with LoRA use 1e-6 to 1e-4. Far above these rates, a few steps "
    "can move the policy far from the model that training began with.",
    source="examples of verl, verl-recipe, SkyRL, prime-rl and OpenRLHF, August 2026; DAPO, arXiv 2503.14476 (32B: "
    "1e-6); Schulman et al., LoRA Without Regret, 2025 (with LoRA ten times the rate for all weights)",
)
