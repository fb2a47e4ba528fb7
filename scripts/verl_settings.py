"""Compositions of verl's settings, drawn by chance: each is right, refused by the name of a setting, or announced.

    python scripts/verl_settings.py                # writes docs/measured/verl-settings.md

A composition is a loss and two or three settings of different topics. What verl's driver does with it is done here: its
configuration is composed, and checked as the trainer's main function checks it. If it is accepted, verl's own code
corrects a batch, and the loss that the configuration names is called on micro-batches. The gradient that adds up is
compared with formulas in this file, which read the settings alone; BAPO's weights are the library's.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bandpo.batch import Batch
from bandpo.gradient_check import slope
from bandpo.text import parse

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
"""Settings by what they are about. A composition has at most one of each topic."""


@dataclass(frozen=True)
class Composition:
    """Overrides of one trainer's configuration."""

    trainer: str
    loss: str
    settings: tuple[str, ...]

    @property
    def overrides(self) -> list[str]:
        """All of them, as hydra takes them."""
        text = " ".join((self.loss, *self.settings))
        return [*BASE, *re.findall(r"(?:[^\s']|'[^']*')+", text)]

    @property
    def keys(self) -> set[str]:
        """The last names of what is set."""
        words = [word for word in self.overrides if word not in BASE]
        return {word.partition("=")[0].rpartition(".")[2] for word in words}


@dataclass(frozen=True)
class Outcome:
    """What became of a composition: ``right``, ``announced``, ``refused``, or ``silent``, which is a fault."""

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


def composed(composition: Composition) -> Any:
    """Compose the configuration as the trainer's main function has it.

    Raises:
        ValueError: hydra refuses an override.
    """
    import verl
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import open_dict

    folder, name = Path(verl.__path__[0]), "ppo_trainer"
    place, extra = folder / "trainer/config", []
    if composition.trainer != "main_ppo":
        place = folder / f"experimental/{composition.trainer}_policy/config"
        name, extra = f"{composition.trainer}_{name}", ["hydra.searchpath=[pkg://verl.trainer.config]"]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(place), version_base=None):
        try:
            config = compose(name, [*composition.overrides, *extra], return_hydra_config=True)
        except HydraException as error:
            raise ValueError(f"hydra: {error}") from error
    HydraConfig.instance().set_config(config)
    with open_dict(config):
        del config["hydra"]
        config.trainer.device = "cpu"
    return config


def examined(config: Any, trainer: str) -> str:
    """Check a configuration as the trainer's main function does, and return what is printed."""
    from verl.utils import config as settings
    from verl.utils import device

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # verl's, on a critic that is not enabled
        device.auto_set_device(config)
        if trainer == "main_ppo":
            settings.validate_config(config, bool(config.actor_rollout_ref.actor.use_kl_loss), False)
    return printed.getvalue()


def outcome(composition: Composition) -> Outcome:
    """Return what becomes of a composition."""
    from hydra.errors import InstantiationException

    import bandpo.integrations.verl  # noqa: F401  (registers the losses and the checks)

    try:
        config = composed(composition)
        text = examined(config, composition.trainer)
    except (ValueError, InstantiationException) as error:
        message = str(error.__cause__ or error).splitlines()[0]
        named = any(key in str(error) or key in message for key in composition.keys)
        return Outcome("refused" if named else "silent", message)
    lines = dict(re.findall(r"^bandpo: (.{11}) (.*)$", text, re.MULTILINE))
    lines = {topic.strip(): line for topic, line in lines.items()}
    average = lines["average"]
    with contextlib.redirect_stdout(io.StringIO()):  # what the check of the gradient says
        gradient = of_verl(config)
    wanted = by_formula(config)
    if torch.allclose(gradient, wanted, rtol=1e-4, atol=1e-9):
        told = _told(config, lines)
        return Outcome("announced" if told else "right", told)
    # What acts otherwise than the settings say has to be announced, and has to be what is announced.
    changes: dict[str, Any] = {}
    if "whatever loss_agg_mode says" in average:
        changes["loss_agg_mode"] = average.partition(",")[0]
    if "geometric mean of its weights" in lines["correction"]:
        changes["mean_weights"] = True
    if changes and torch.allclose(gradient, by_formula(config, **changes), rtol=1e-4, atol=1e-9):
        correction = [f"correction {lines['correction']}"] if lines["correction"] != "none" else []
        return Outcome("announced", "; ".join([f"average {average}", *correction]))
    difference = (gradient - wanted).abs().max() / wanted.abs().max()
    return Outcome(
        "silent", f"the gradient is {difference:.2g} of its largest entry away from what the settings say"
    )


def _told(config: Any, lines: dict[str, str]) -> str:
    """Return the lines in which something acts otherwise than a setting alone would have it."""
    told = []
    if "; " in lines["average"] or "in place of" in lines["average"]:
        told.append(f"average {lines['average']}")
    told += [f"dual clip {lines['dual clip']}"] if "dual clip" in lines else []
    told += [f"sampling {lines['sampling']}"] if "=" in lines["sampling"] else []
    told += [f"loss {lines['loss']}"] if "distillation" in lines["loss"] else []
    told += [f"correction {lines['correction']}"] if lines["correction"] != "none" else []
    return "; ".join(told)


SHAPE = (32, 12)


def tensors_of(config: Any) -> dict[str, Tensor]:
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


def of_verl(config: Any) -> Tensor:
    """Return the gradient of a mini-batch by verl's own code: its driver's correction, and the loss it looks up."""
    from verl import DataProto
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
    from verl.utils.config import omega_conf_to_dataclass

    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    correction, parts = config.algorithm.rollout_correction, tensors_of(config)
    bypass = correction.bypass_mode
    batch = {"old_log_probs": parts["rollout" if bypass else "old"], "response_mask": parts["mask"].long()}
    weights = None
    if config.actor_rollout_ref.rollout.calculate_log_probs:
        batch["rollout_log_probs"] = parts["rollout"]
    if "rollout_log_probs" in batch and not bypass:
        data, _ = compute_rollout_correction_and_add_to_batch(DataProto.from_dict(batch), correction)
        batch["response_mask"] = data.batch["response_mask"]
        weights = data.batch.get("rollout_is_weights")
    actor.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=int(parts["mask"].sum()),
        global_batch_size=SHAPE[0],
        loss_scale_factor=actor.loss_scale_factor,
    )
    loss: Any = get_policy_loss_fn(actor.policy_loss.loss_mode)
    gradient = torch.zeros(SHAPE, dtype=torch.float64)
    rows = SHAPE[0] if _whole(actor) else 8
    for start in range(0, SHAPE[0], rows):
        chosen = slice(start, start + rows)
        # verl pads a micro-batch to its longest response.
        longest = int(parts["mask"][chosen].sum(-1).max())
        logp = parts["new"][chosen, :longest].clone().requires_grad_()
        value, _ = loss(
            old_log_prob=batch["old_log_probs"][chosen, :longest],
            log_prob=logp,
            advantages=parts["advantages"][chosen, :longest],
            response_mask=batch["response_mask"][chosen, :longest].bool(),
            loss_agg_mode=actor.loss_agg_mode,
            config=actor,
            rollout_is_weights=None if weights is None else weights[chosen, :longest],
        )
        gradient[chosen, :longest] = torch.autograd.grad(value, logp)[0]
    return gradient


def _whole(actor: Any) -> bool:
    """Return whether the loss has sums over a mini-batch, which is then given whole."""
    return "BAPO" in str(actor.policy_loss.get("method"))


OWN_AVERAGES = {"DAPO()": "token-mean", "GRPO()": "seq-mean-token-mean", "BandPO()": "seq-mean-token-mean"}
OWN_AVERAGES |= {"DPPO()": "token-mean", "SAPO()": "seq-mean-token-mean", "BAPO()": "token-mean"}


def by_formula(config: Any, loss_agg_mode: str | None = None, mean_weights: bool = False) -> Tensor:
    """Return the gradient of a mini-batch as the settings say it, by formulas of this file.

    Args:
        config: The run's configuration.
        loss_agg_mode: An average in place of the one that the settings say.
        mean_weights: Whether a sequence has one importance weight, the geometric mean of its tokens'.
    """
    actor, parts = config.actor_rollout_ref.actor, tensors_of(config)
    settings, correction = actor.policy_loss, config.algorithm.rollout_correction
    method = settings.get("method") if "Band" in settings._target_ else settings.loss_mode
    method = "Band" if method is None else method
    old = parts["rollout" if correction.bypass_mode else "old"]
    mask, weights = parts["mask"].clone(), torch.ones(SHAPE, dtype=torch.float64)
    inner = settings.get("rollout_correction") or {}
    off_policy = parts["old"] - parts["rollout"]
    if method == "bypass_mode":
        off_policy = parts["new"] - parts["rollout"]
    if correction.rollout_is == "token":
        weights = off_policy.exp().clamp(max=2.0)
    if correction.rollout_rs or inner.get("rollout_rs"):
        mask &= (off_policy >= math.log(0.5)) & (off_policy <= math.log(2.0))
    if mean_weights:
        counted = mask.sum(-1, keepdim=True).clamp(min=1)
        weights = ((weights.log() * mask).sum(-1, keepdim=True) / counted).exp().expand(SHAPE)
    own = OWN_AVERAGES.get(str(method))
    average = settings.get("average") or "method"
    modes = {"method": own or actor.loss_agg_mode, "framework": actor.loss_agg_mode}
    mode = loss_agg_mode or modes.get(average, average)
    share = _share(mode, mask, parts["mask"], actor.loss_scale_factor)
    return -_weight(str(method), actor, parts, old, mask) * parts["advantages"] * share * weights * mask


def _share(mode: str, mask: Tensor, whole: Tensor, length: float | None) -> Tensor:
    """Return what each token counts for in an average of which the sizes are those of the batch before a rejection."""
    each = mask.sum(-1, keepdim=True).clamp(min=1).double()
    if mode == "token-mean":
        share = torch.ones_like(each) / whole.sum()
    elif mode == "token-sum":
        share = torch.ones_like(each)
    elif mode == "seq-mean-token-mean":
        share = 1 / each / len(mask)
    elif mode == "a mean over the sequences of each micro-batch":
        share = 1 / each / 8
    else:
        share = torch.ones_like(each) / len(mask)
        if mode == "seq-mean-token-sum-norm":
            assert length is not None
            share = share / length
    return share.expand(mask.shape)


def _weight(method: str, actor: Any, parts: dict[str, Tensor], old: Tensor, mask: Tensor) -> Tensor:
    """Return each token's weight ``w``, so that its gradient is ``−w·A``."""
    ratio, advantages, p = (parts["new"] - old).exp(), parts["advantages"], old.exp()
    rises, falls = advantages > 0, advantages < 0

    def clipped(low: float, high: float, dual: float, weight: Tensor = ratio) -> Tensor:
        drop = (rises & (ratio > 1 + high)) | (falls & (ratio < 1 - low)) | (falls & (ratio > dual))
        return weight.masked_fill(drop, 0.0)

    def in_band(radius: float, cap: float, dual: float, weight: Tensor = ratio) -> Tensor:
        q = p * ratio
        spent = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
        far = (spent > radius) | (ratio > cap)
        drop = (rises & (ratio > 1) & far) | (falls & (ratio < 1) & far) | (falls & (ratio > dual))
        return weight.masked_fill(drop, 0.0)

    def gate(positive: float, negative: float) -> Tensor:
        temperature = torch.where(rises, positive, negative)
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
        moved = parts["new"] - old
        kept = torch.minimum(
            signed * moved, signed * moved.clamp(-actor.clip_ratio_low, actor.clip_ratio_high)
        )
        count = mask.sum(-1, keepdim=True).clamp(min=1)
        whole = ((signed * kept * mask).sum(-1, keepdim=True) / count).exp().expand(SHAPE)
        inside = signed * moved <= signed * moved.clamp(-actor.clip_ratio_low, actor.clip_ratio_high)
        return whole.masked_fill(~inside, 0.0)
    assert method == "BAPO()", f"no formula of {method}"
    # Its search for bounds has no second form here: the library's, on the whole mini-batch.
    batch = Batch.read(parts["new"], old, advantages, mask)
    slopes = slope(parse(method), batch)
    return torch.where(advantages == 0, 0.0, -slopes / advantages)


def table(outcomes: Sequence[tuple[Composition, Outcome]]) -> str:
    """Return the table of outcomes as Markdown."""
    rows = ["| trainer | outcome | loss | settings |", "|---|---|---|---|"]
    for composition, found in sorted(
        outcomes, key=lambda pair: (pair[1].kind, pair[0].trainer, pair[0].loss)
    ):
        loss = re.sub(r"\S*_target_=\S*\.(\w+)PolicyLossConfig", r"\1", composition.loss).replace(LOSS, "")
        settings = " ".join(composition.settings).replace(LOSS, "policy_loss.").replace(ACTOR, "actor.")
        settings = settings.replace("actor_rollout_ref.", "")
        detail = found.detail if len(found.detail) <= 140 else f"{found.detail[:139]}…"
        cells = (
            composition.trainer,
            f"{found.kind}: {detail}" if detail else found.kind,
            f"`{loss}`",
            f"`{settings}`",
        )
        rows.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(rows)


def found_of(compositions: Sequence[Composition]) -> Iterator[tuple[Composition, Outcome]]:
    """Yield each composition with its outcome."""
    for composition in compositions:
        yield composition, outcome(composition)


def main() -> None:
    """Write the page, and exit with 1 if a composition trains something else in silence."""
    import verl

    outcomes = list(found_of(draw(100)))
    kinds = Counter(found.kind for _, found in outcomes)
    page = Path(__file__).parents[1] / "docs/measured/verl-settings.md"
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in ("right", "announced", "refused", "silent"))
    begin, end = "<!-- outcomes: begin -->", "<!-- outcomes: end -->"
    head, _, rest = page.read_text().partition(begin)
    foot = rest.partition(end)[2]
    body = f"verl {verl.__version__}, 100 compositions: {counts}.\n\n{table(outcomes)}"
    page.write_text(f"{head}{begin}\n{body}\n{end}{foot}")
    for composition, found in itertools.filterfalse(lambda pair: pair[1].kind != "silent", outcomes):
        print(composition, found.detail, file=sys.stderr)
    sys.exit(bool(kinds["silent"]))


if __name__ == "__main__":
    main()
