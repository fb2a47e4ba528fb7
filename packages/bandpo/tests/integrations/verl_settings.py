"""Random combinations of verl's settings, each of which must be right, refused with a setting's name, or announced.

`PYTHONPATH=scripts python packages/bandpo/tests/integrations/verl_settings.py` writes the table of the report.

A composition is a loss and two or three settings of different topics. `outcome` does what verl's driver does: it
composes the configuration, and checks it as the trainer's main function does. If the configuration is accepted, verl's
own code applies the rollout correction to a batch, and the configured loss is called on micro-batches. Their total
gradient is compared with formulas in this file, which depend only on the settings; BAPO's weights are the library's.
"""

from __future__ import annotations

import contextlib
import io
import math
import random
import re
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bandpo.certificate.gradient import slope
from bandpo.core.batch import Batch
from bandpo.core.text import parse

PAGE = Path(__file__).parents[4] / "research/reports/verl-settings.md"
ACTOR, LOSS = "actor_rollout_ref.actor.", "actor_rollout_ref.actor.policy_loss."
ROLLOUT, MODEL = "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
CORRECTION, DISTILLATION = "algorithm.rollout_correction.", "distillation."
BAND = f"{LOSS}_target_=bandpo.integrations.verl.BandPolicyLossConfig"
AUDITED = f"{LOSS}_target_=bandpo.integrations.verl.AuditedPolicyLossConfig"
BASE = (
    "data.train_batch_size=256", "algorithm.adv_estimator=grpo", f"{ACTOR}ppo_mini_batch_size=64",
    f"{ACTOR}ppo_micro_batch_size_per_gpu=8", f"{ROLLOUT}log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8", f"{MODEL}use_remove_padding=true",
    "critic.ppo_micro_batch_size_per_gpu=8",
)  # fmt: skip
TRAINERS = ("main_ppo", "one_step_off", "fully_async")
LOSSES = (
    BAND, f"{BAND} +{LOSS}method='FixedClip(0.2, 0.28)'", f"{BAND} +{LOSS}method='DAPO()'",
    f"{BAND} +{LOSS}method='GRPO()'", f"{BAND} +{LOSS}method='BandPO()'", f"{BAND} +{LOSS}method='DPPO()'",
    f"{BAND} +{LOSS}method='SAPO()'", f"{BAND} +{LOSS}method='BAPO()'", AUDITED, f"{AUDITED} {LOSS}loss_mode=sapo",
    f"{AUDITED} {LOSS}loss_mode=geo_mean", f"{AUDITED} {LOSS}loss_mode=dppo_kl {ACTOR}clip_ratio_low=0.05 "
    f"{ACTOR}clip_ratio_high=0.05", f"{AUDITED} {LOSS}loss_mode=bypass_mode",
)  # fmt: skip
WINDOW = "rollout_rs=token_k1"
TOPICS: dict[str, tuple[str, ...]] = {
    "correction": (
        f"{CORRECTION}rollout_is=token",
        f"{CORRECTION}{WINDOW} {CORRECTION}rollout_rs_threshold=0.5_2.0",
        f"{CORRECTION}rollout_rs_threshold=0.5_2.0",
        f"{CORRECTION}loss_type=reinforce",
        f"+{LOSS}rollout_correction.{WINDOW} +{LOSS}rollout_correction.rollout_rs_threshold=0.5_2.0",
    ),
    "bypass": (f"{CORRECTION}bypass_mode=true", f"{CORRECTION}bypass_mode=false"),
    "log-probabilities": (f"{ROLLOUT}calculate_log_probs=false",),
    "average": (
        f"{ACTOR}loss_agg_mode=token-mean",
        f"{ACTOR}loss_agg_mode=seq-mean-token-mean",
        f"{ACTOR}loss_agg_mode=token-sum",
        f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm",
        f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm {ACTOR}loss_scale_factor=12",
    ),
    "setting of the average": (f"+{LOSS}average=method", f"+{LOSS}average=framework", f"+{LOSS}average=token-sum"),
    "attention": (f"+{MODEL}override_config={{attn_implementation:sdpa}}",),
    "sequence parallelism": (
        f"{ACTOR}ulysses_sequence_parallel_size=2",
        f"actor_rollout_ref.ref.ulysses_sequence_parallel_size=2 {ACTOR}use_kl_loss=true",
    ),
    "micro-batches": (f"{ACTOR}use_dynamic_bsz=true", f"{ACTOR}ppo_micro_batch_size_per_gpu=2"),
    "dynamic sampling": ("algorithm.filter_groups.enable=true algorithm.filter_groups.metric=acc",),
    "trainer": ("trainer.use_v1=false", "trainer.v1.trainer_mode=separate_async"),
    "critic": ("critic.enable=true",),
    "clip": (f"{ACTOR}clip_ratio_high=0.28", f"{ACTOR}clip_ratio_c=9"),
    "sampling": (f"{ROLLOUT}top_p=0.9", f"{ROLLOUT}top_k=50", f"{ROLLOUT}temperature=0.7"),
    "distillation": (f"{DISTILLATION}enabled=true",
                     f"{DISTILLATION}enabled=true {DISTILLATION}distillation_loss.use_task_rewards=false"),
    "library": (f"{MODEL}external_lib=math",),
}  # fmt: skip
"""Settings by topic. A composition has at most one of each topic."""


@dataclass(frozen=True)
class Composition:
    """A combination of overrides for a trainer's configuration."""

    trainer: str
    loss: str
    settings: tuple[str, ...]

    @property
    def overrides(self) -> list[str]:
        """Return all overrides as arguments of hydra."""
        text = " ".join((self.loss, *self.settings))
        return [*BASE, *re.findall(r"(?:[^\s']|'[^']*')+", text)]

    @property
    def keys(self) -> set[str]:
        """Return the last parts of the names of the overridden settings."""
        words = [word for word in self.overrides if word not in BASE]
        return {word.partition("=")[0].rpartition(".")[2] for word in words}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a composition: ``right``, ``announced``, ``refused``, or ``silent``, which is a fault."""

    kind: str
    detail: str


def draw(count: int, seed: int = 0) -> list[Composition]:
    """Draw compositions: a trainer, a loss and two or three settings of different topics."""
    chance = random.Random(seed)
    drawn: dict[Composition, None] = {}
    while len(drawn) < count:
        topics = chance.sample(sorted(TOPICS), chance.choice((2, 3)))
        settings = tuple(chance.choice(TOPICS[topic]) for topic in topics)
        trainer = chance.choices(TRAINERS, (6, 1, 1))[0]
        drawn[Composition(trainer, chance.choice(LOSSES), settings)] = None
    return list(drawn)


def compose_config(composition: Composition) -> Any:
    """Compose the configuration as the trainer's main function does.

    Raises:
        ValueError: if hydra refuses an override.
    """
    import verl
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import open_dict

    folder = Path(verl.__path__[0])
    config_folder = folder / "trainer/config"
    name = "ppo_trainer"
    extra = []
    if composition.trainer != "main_ppo":
        config_folder = folder / f"experimental/{composition.trainer}_policy/config"
        name = f"{composition.trainer}_{name}"
        extra = ["hydra.searchpath=[pkg://verl.trainer.config]"]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_folder), version_base=None):
        try:
            config = compose(name, [*composition.overrides, *extra], return_hydra_config=True)
        except HydraException as error:
            raise ValueError(f"hydra: {error}") from error
    HydraConfig.instance().set_config(config)
    with open_dict(config):
        del config["hydra"]
        config.trainer.device = "cpu"
    return config


def check_config(config: Any, trainer: str) -> str:
    """Check a configuration as the trainer's main function does, and return the printed text."""
    from verl.utils import config as settings
    from verl.utils import device

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # verl warns of a critic that is not enabled
        device.auto_set_device(config)
        if trainer == "main_ppo":
            settings.validate_config(config, bool(config.actor_rollout_ref.actor.use_kl_loss), False)
    return printed.getvalue()


def outcome(composition: Composition) -> Outcome:
    """Compose, check and run a composition, and return its outcome."""
    from hydra.errors import InstantiationException

    import bandpo.integrations.verl  # noqa: F401  (registers the losses and the checks)

    try:
        config = compose_config(composition)
        text = check_config(config, composition.trainer)
    except (ValueError, InstantiationException) as error:
        message = str(error.__cause__ or error).splitlines()[0]
        names_setting = any(key in str(error) or key in message for key in composition.keys)
        return Outcome("refused" if names_setting else "silent", message)
    lines = dict(re.findall(r"^bandpo: (.{11}) (.*)$", text, re.MULTILINE))
    lines = {topic.strip(): line for topic, line in lines.items()}
    average = lines["average"]
    with contextlib.redirect_stdout(io.StringIO()):  # the output of the gradient check
        gradient = gradient_by_verl(config)
    expected = gradient_by_formula(config)
    if torch.allclose(gradient, expected, rtol=1e-4, atol=1e-9):
        announcements = _announcements(lines)
        return Outcome("announced" if announcements else "right", announcements)
    # A deviation from the settings must be announced, and the gradient must be the announced one.
    changes: dict[str, Any] = {}
    if "whatever loss_agg_mode says" in average:
        changes["loss_agg_mode"] = average.partition(",")[0]
    if "geometric mean of its weights" in lines["correction"]:
        changes["mean_weights"] = True
    if changes and torch.allclose(gradient, gradient_by_formula(config, **changes), rtol=1e-4, atol=1e-9):
        correction = [f"correction {lines['correction']}"] if lines["correction"] != "none" else []
        return Outcome("announced", "; ".join([f"average {average}", *correction]))
    difference = (gradient - expected).abs().max() / expected.abs().max()
    return Outcome(
        "silent", f"the gradient is {difference:.2g} of its largest entry away from what the settings say"
    )


def _announcements(lines: dict[str, str]) -> str:
    """Return the announced lines about settings that interact with other settings."""
    announcements = []
    if "; " in lines["average"] or "in place of" in lines["average"]:
        announcements.append(f"average {lines['average']}")
    if "dual clip" in lines:
        announcements.append(f"dual clip {lines['dual clip']}")
    if "=" in lines["sampling"]:
        announcements.append(f"sampling {lines['sampling']}")
    if "distillation" in lines["loss"]:
        announcements.append(f"loss {lines['loss']}")
    if lines["correction"] != "none":
        announcements.append(f"correction {lines['correction']}")
    return "; ".join(announcements)


SHAPE = (32, 12)


def make_batch() -> dict[str, Tensor]:
    """Return a mini-batch: log-probabilities of three policies, advantages and ragged lengths, in float64."""
    chance = torch.Generator().manual_seed(3)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(SHAPE, generator=chance, dtype=torch.float64)

    rollout = -6 * torch.rand(SHAPE, generator=chance, dtype=torch.float64) ** 2 - 0.02
    old = (rollout + noise(0.3)).clamp(max=-1e-3)
    new = (old + noise(0.3)).clamp(max=-1e-3)
    lengths = torch.randint(1, SHAPE[1] + 1, (SHAPE[0], 1), generator=chance)
    # One per sequence, as with GRPO.
    advantages = torch.randn((SHAPE[0], 1), generator=chance, dtype=torch.float64).expand(SHAPE).contiguous()
    mask = torch.arange(SHAPE[1]) < lengths
    return {"rollout": rollout, "old": old, "new": new, "advantages": advantages * mask, "mask": mask}


def gradient_by_verl(config: Any) -> Tensor:
    """Compute the gradient of a mini-batch with verl's code: its rollout correction and the configured loss."""
    from verl import DataProto
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
    from verl.utils.config import omega_conf_to_dataclass

    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    correction = config.algorithm.rollout_correction
    tensors = make_batch()
    bypass = correction.bypass_mode
    batch = {
        "old_log_probs": tensors["rollout" if bypass else "old"],
        "response_mask": tensors["mask"].long(),
    }
    weights = None
    if config.actor_rollout_ref.rollout.calculate_log_probs:
        batch["rollout_log_probs"] = tensors["rollout"]
    if "rollout_log_probs" in batch and not bypass:
        data, _ = compute_rollout_correction_and_add_to_batch(DataProto.from_dict(batch), correction)
        batch["response_mask"] = data.batch["response_mask"]
        weights = data.batch.get("rollout_is_weights")
    actor.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=int(tensors["mask"].sum()),
        global_batch_size=SHAPE[0],
        loss_scale_factor=actor.loss_scale_factor,
    )
    loss: Any = get_policy_loss_fn(actor.policy_loss.loss_mode)
    gradient = torch.zeros(SHAPE, dtype=torch.float64)
    rows = SHAPE[0] if _needs_full_minibatch(actor) else 8
    for start in range(0, SHAPE[0], rows):
        chosen = slice(start, start + rows)
        # verl pads a micro-batch to its longest response.
        longest = int(tensors["mask"][chosen].sum(-1).max())
        logp = tensors["new"][chosen, :longest].clone().requires_grad_()
        value, _ = loss(
            old_log_prob=batch["old_log_probs"][chosen, :longest],
            log_prob=logp,
            advantages=tensors["advantages"][chosen, :longest],
            response_mask=batch["response_mask"][chosen, :longest].bool(),
            loss_agg_mode=actor.loss_agg_mode,
            config=actor,
            rollout_is_weights=None if weights is None else weights[chosen, :longest],
        )
        gradient[chosen, :longest] = torch.autograd.grad(value, logp)[0]
    return gradient


def _needs_full_minibatch(actor: Any) -> bool:
    """Return True if the loss depends on sums over a mini-batch, so that it cannot be split into micro-batches."""
    return "BAPO" in str(actor.policy_loss.get("method"))


METHOD_AVERAGES = {"DAPO()": "token-mean", "GRPO()": "seq-mean-token-mean", "BandPO()": "seq-mean-token-mean"}
METHOD_AVERAGES |= {"DPPO()": "token-mean", "SAPO()": "seq-mean-token-mean", "BAPO()": "token-mean"}


def gradient_by_formula(config: Any, loss_agg_mode: str | None = None, mean_weights: bool = False) -> Tensor:
    """Compute the gradient of a mini-batch from the settings, with the formulas of this file.

    Args:
        config: The run's configuration.
        loss_agg_mode: A loss aggregation that replaces the configured one.
        mean_weights: If True, each sequence has one importance weight, the geometric mean of its tokens' weights.
    """
    actor = config.actor_rollout_ref.actor
    settings = actor.policy_loss
    correction = config.algorithm.rollout_correction
    tensors = make_batch()
    method = settings.get("method") if "Band" in settings._target_ else settings.loss_mode
    method = "Band" if method is None else method
    old = tensors["rollout" if correction.bypass_mode else "old"]
    mask = tensors["mask"].clone()
    weights = torch.ones(SHAPE, dtype=torch.float64)
    inner = settings.get("rollout_correction") or {}
    off_policy = tensors["old"] - tensors["rollout"]
    if method == "bypass_mode":
        off_policy = tensors["new"] - tensors["rollout"]
    if correction.rollout_is == "token":
        weights = off_policy.exp().clamp(max=2.0)
    if correction.rollout_rs or inner.get("rollout_rs"):
        mask &= (off_policy >= math.log(0.5)) & (off_policy <= math.log(2.0))
    if mean_weights:
        counted = mask.sum(-1, keepdim=True).clamp(min=1)
        weights = ((weights.log() * mask).sum(-1, keepdim=True) / counted).exp().expand(SHAPE)
    own = METHOD_AVERAGES.get(str(method))
    average = settings.get("average") or "method"
    modes = {"method": own or actor.loss_agg_mode, "framework": actor.loss_agg_mode}
    mode = loss_agg_mode or modes.get(average, average)
    share = _token_share(mode, mask, tensors["mask"], actor.loss_scale_factor)
    token_weights = _token_weights(str(method), actor, tensors, old, mask)
    return -token_weights * tensors["advantages"] * share * weights * mask


def _token_share(mode: str, mask: Tensor, full_mask: Tensor, length: float | None) -> Tensor:
    """Return the factor of each token in the loss aggregation.

    Args:
        mode: The loss aggregation.
        mask: The tokens that the rollout correction accepts.
        full_mask: All response tokens, which give the size of the batch.
        length: verl's ``loss_scale_factor``.
    """
    lengths = mask.sum(-1, keepdim=True).clamp(min=1).double()
    if mode == "token-mean":
        share = torch.ones_like(lengths) / full_mask.sum()
    elif mode == "token-sum":
        share = torch.ones_like(lengths)
    elif mode == "seq-mean-token-mean":
        share = 1 / lengths / len(mask)
    elif mode == "a mean over the sequences of each micro-batch":
        share = 1 / lengths / 8
    else:
        share = torch.ones_like(lengths) / len(mask)
        if mode == "seq-mean-token-sum-norm":
            assert length is not None
            share = share / length
    return share.expand(mask.shape)


def _token_weights(method: str, actor: Any, tensors: dict[str, Tensor], old: Tensor, mask: Tensor) -> Tensor:
    """Return each token's weight ``w``, so that its gradient is ``−w·A``."""
    ratio = (tensors["new"] - old).exp()
    advantages = tensors["advantages"]
    p = old.exp()
    positive_advantage = advantages > 0
    negative_advantage = advantages < 0

    def clipped(low: float, high: float, dual: float, weight: Tensor = ratio) -> Tensor:
        drop = positive_advantage & (ratio > 1 + high)
        drop |= negative_advantage & ((ratio < 1 - low) | (ratio > dual))
        return weight.masked_fill(drop, 0.0)

    def in_band(radius: float, cap: float, dual: float, weight: Tensor = ratio) -> Tensor:
        q = p * ratio
        divergence = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
        outside = (divergence > radius) | (ratio > cap)
        drop = positive_advantage & (ratio > 1) & outside
        drop |= negative_advantage & (((ratio < 1) & outside) | (ratio > dual))
        return weight.masked_fill(drop, 0.0)

    def gate(positive: float, negative: float) -> Tensor:
        temperature = torch.where(positive_advantage, positive, negative)
        opened = torch.sigmoid(temperature * (ratio - 1))
        return 4 * ratio * opened * (1 - opened)

    if method == "Band":
        return in_band(0.05, 10.0, actor.clip_ratio_c)
    if method == "BandPO()":
        return in_band(0.05, 10.0, 10.0)
    if method == "FixedClip(0.2, 0.28)":
        return clipped(0.2, 0.28, actor.clip_ratio_c)
    if method in ("DAPO()", "GRPO()"):
        return clipped(0.2, 0.28 if method == "DAPO()" else 0.2, math.inf)
    if method in ("DPPO()", "dppo_kl"):
        most = 20.0 if method == "DPPO()" else actor.clip_ratio_c
        return in_band(0.05, math.inf, math.inf, ratio.clamp(max=most))
    if method in ("SAPO()", "sapo"):
        return gate(actor.tau_pos, actor.tau_neg)
    if method in ("vanilla", "bypass_mode"):
        return clipped(actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c)
    if method == "geo_mean":
        signed = torch.sign(advantages)
        log_ratio = tensors["new"] - old
        bounded = log_ratio.clamp(-actor.clip_ratio_low, actor.clip_ratio_high)
        surrogate = torch.minimum(signed * log_ratio, signed * bounded)
        count = mask.sum(-1, keepdim=True).clamp(min=1)
        sequence_ratio = ((signed * surrogate * mask).sum(-1, keepdim=True) / count).exp().expand(SHAPE)
        inside = signed * log_ratio <= signed * bounded
        return sequence_ratio.masked_fill(~inside, 0.0)
    assert method == "BAPO()", f"no formula of {method}"
    # BAPO searches for its bounds. This file has no second implementation, so the library's is used.
    batch = Batch.read(tensors["new"], old, advantages, mask)
    slopes = slope(parse(method), batch)
    return torch.where(advantages == 0, 0.0, -slopes / advantages)


def row(composition: Composition, result: Outcome) -> str:
    """Return the row of the table for a composition."""
    loss = re.sub(r"\S*_target_=\S*\.(\w+)PolicyLossConfig", r"\1", composition.loss).replace(LOSS, "")
    settings = " ".join(composition.settings).replace(LOSS, "policy_loss.").replace(ACTOR, "actor.")
    settings = settings.replace("actor_rollout_ref.", "")
    detail = result.detail if len(result.detail) <= 140 else f"{result.detail[:139]}…"
    cells = (
        composition.trainer,
        f"{result.kind}: {detail}" if detail else result.kind,
        f"`{loss}`",
        f"`{settings}`",
    )
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def main() -> None:
    """Write the table, and exit with 1 if a composition deviates from its settings without an announcement."""
    import verl

    from marked import write_between_marks

    outcomes = [(composition, outcome(composition)) for composition in draw(100)]
    outcomes.sort(key=lambda pair: (pair[1].kind, pair[0].trainer, pair[0].loss))
    kinds = Counter(result.kind for _, result in outcomes)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in ("right", "announced", "refused", "silent"))
    lines = [f"verl {verl.__version__}, 100 compositions: {counts}.", ""]
    lines += ["| trainer | outcome | loss | settings |", "|---|---|---|---|"]
    lines += [row(*pair) for pair in outcomes]
    write_between_marks(PAGE, "outcomes", lines)
    for composition, result in outcomes:
        if result.kind == "silent":
            print(composition, result.detail, file=sys.stderr)
    sys.exit(bool(kinds["silent"]))


if __name__ == "__main__":
    main()
