"""Settings drawn by chance, in pairs and triples: right against formulas of the papers, refused, or announced.

TRL's own `_compute_loss` runs on made-up log-probabilities. The reference is written from the papers' formulas and from
TRL's documentation, in float64, without bandpo.
"""

import random
from functools import partial

import pytest
import torch

from helpers.frameworks import needs

needs("trl")

from test_trl import SETTINGS, half, varied_reward
from transformers import AutoTokenizer
from trl import GRPOTrainer

import byte_model
import method_references as reference
from bandpo.integrations.trl import BandGRPOConfig, BandGRPOTrainer
from bandpo_lab.tasks import multiplication

pytestmark = [
    pytest.mark.filterwarnings("ignore:each batch is used for one optimiser step"),
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func'"),
]

TOKENS, SEQUENCES = ("dapo", "bnpo"), ("grpo",)
"""Loss types whose average is the mean over tokens, and over sequences of their means."""

RULES = {
    "FixedClip(0.05, 0.1)": {"low": 0.05, "high": 0.1},
    "FixedClip(0.02)": {"low": 0.02, "high": 0.02},
}
WHOLE = {
    "GRPO(0.05, 0.1)": (partial(reference.ppo, low=0.05, high=0.1), SEQUENCES),
    "DAPO(0.05, 0.1)": (partial(reference.ppo, low=0.05, high=0.1), TOKENS),
    "GSPO(0.01, 0.02)": (partial(reference.gspo, low=0.01, high=0.02), SEQUENCES),
    "SAPO(1.0, 2.0)": (partial(reference.sapo, positive=1.0, negative=2.0), SEQUENCES),
    "CISPO(1.0, 0.1)": (partial(reference.cispo, low=1.0, high=0.1), TOKENS),
    "SPO(0.05)": (partial(reference.spo, epsilon=0.05), TOKENS),
    "ASPO(0.1)": (partial(reference.aspo, low=0.1, high=0.1), TOKENS),
    "GPPO(0.05, 0.1)": (partial(reference.gppo, low=0.05, high=0.1, dual=10.0), TOKENS),
    "UPGRPO(0.05)": (partial(reference.up, low=0.05), SEQUENCES),
    "DRO(0.1)": (partial(reference.dro, beta=0.1), TOKENS),
    "PSPO(0.1)": (partial(reference.pspo, alpha=0.1), TOKENS),
    "MASPO()": (reference.maspo, TOKENS),
    "MHPO()": (reference.mhpo, SEQUENCES),
    "DGPO()": (reference.dgpo, TOKENS),
    "IcePop(0.05, 0.1)": (partial(reference.icepop, lower=0.95, upper=1.1), SEQUENCES),
    "Method(Band(KL(), 0.001, 1e6), aggregation='token-mean')": (
        partial(reference.trgppo, delta=0.001),
        TOKENS,
    ),
}
DRAWN = {
    "loss_type": ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"],
    "importance_sampling_level": ["token", "sequence"],
    "beta": [0.05],
    "use_bias_correction_kl": [False, True],
    "top_entropy_quantile": [0.5],
    "off_policy_mask_threshold": [0.002],
    "entropy_coef": [0.02],
    "delta": [1.08],
    "gradient_accumulation_steps": [2],
    "steps_per_generation": [4],
    "top_p": [0.9],
    "epsilon": [0.3],
    "epsilon_high": [0.3],
    "sapo_temperature_pos": [2.0],
    "sapo_temperature_neg": [2.0],
    "vespo_lambda_pos": [2.0],
    "anchor": ["rollout"],
    "importance weights": [True],
    "advantages per token": [True],
    "tool mask": [True],
}
"""Settings of a config, and of a batch, with their values."""
OF_BATCH = ("importance weights", "advantages per token", "tool mask")


def draw(number):
    """Return a random method and two or three settings."""
    generator = random.Random(number)
    method = generator.choice([*RULES] * 4 + [*WHOLE])
    names = generator.sample(list(DRAWN), generator.choice([2, 3]))
    if "anchor" in names:  # of whole methods the formulas know no other anchor
        method = generator.choice([*RULES])
    return method, {name: generator.choice(DRAWN[name]) for name in names}


def is_refused(method, settings):
    """Whether a setting cannot be had beside the method, by what docs/trl.md says."""
    replaced = ("epsilon", "epsilon_high", "sapo_", "vespo_")
    # Under its average SAPO is TRL's own loss, whose setting may say the same number.
    is_native = settings.get("loss_type", "grpo") == "grpo" and settings.get("anchor", "trainer") == "trainer"
    if method == "SAPO(1.0, 2.0)" and is_native and settings.get("sapo_temperature_neg") == 2.0:
        settings = {name: value for name, value in settings.items() if name != "sapo_temperature_neg"}
    if any(name.startswith(replaced) for name in settings) or settings.get("loss_type") in ("sapo", "vespo"):
        return True
    level = settings.get("importance_sampling_level")
    if method in WHOLE and method.startswith("Method("):
        level = None if level == "token" else level
    cispo = settings.get("loss_type") == "cispo"
    if method in RULES:
        return cispo and "delta" in settings
    own = "sequence" if method.startswith("GSPO") else "token"
    return cispo or "delta" in settings or level not in (None, own)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return byte_model.save(tmp_path_factory.mktemp("model"))


def trainer_of(method, settings, folder, tmp_path):
    of_config = {name: value for name, value in settings.items() if name not in OF_BATCH}
    quiet = {"certify": "off", "watched": "off", "steps_per_generation": 2, "per_device_train_batch_size": 8}
    rollout = method.startswith("IcePop") or settings.get("anchor") == "rollout"
    return BandGRPOTrainer(
        model=str(folder),
        reward_funcs=varied_reward,
        args=BandGRPOConfig(str(tmp_path), method=method, **SETTINGS | quiet | of_config),
        train_dataset=multiplication.dataset("train", 32),
        processing_class=AutoTokenizer.from_pretrained(folder),
        **({"rollout_func": half} if rollout else {}),
    )


def made_up(number, settings):
    """Return random inputs of a loss, log-probabilities and entropies, in float32 as in TRL."""
    generator = torch.Generator().manual_seed(number)
    rows, length = 8, 7

    def near(logp, spread):
        moved = logp + spread * torch.randn(rows, length, generator=generator)
        return moved.clamp(max=-1e-4)

    old = -4 * torch.rand(rows, length, generator=generator) - 0.01
    lengths = torch.randint(2, length + 1, (rows, 1), generator=generator)
    mask = (torch.arange(length) < lengths).long()
    advantages = torch.randn(rows, generator=generator)
    inputs = {
        "prompt_ids": torch.ones(rows, 2, dtype=torch.long),
        "prompt_mask": torch.ones(rows, 2, dtype=torch.long),
        "completion_ids": torch.ones(rows, length, dtype=torch.long),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": near(old, 0.3),
        "sampling_per_token_logps": near(old, 0.05),
    }
    if settings.get("advantages per token"):
        inputs["advantages"] = torch.randn(rows, length, generator=generator)
    if settings.get("tool mask"):
        inputs["tool_mask"] = (torch.rand(rows, length, generator=generator) < 0.7).long()
        inputs["tool_mask"][:, 0] = 1
    if settings.get("importance weights"):
        inputs["importance_sampling_ratio"] = 0.5 + torch.rand(rows, length, generator=generator)
    counted = mask * inputs.get("tool_mask", torch.ones_like(mask))
    inputs["num_items_in_batch"] = 3 * counted.sum()
    logp, entropy = near(old, 0.1), torch.rand(rows, length, generator=generator)
    return inputs, logp.requires_grad_(), entropy.requires_grad_()


def reference_loss(method, settings, inputs, logp, entropy):
    """Compute the loss that the method and the settings describe."""
    inputs = {name: x.double() for name, x in inputs.items()}
    mask = inputs["completion_mask"] * inputs.get("tool_mask", 1.0)
    advantages = inputs["advantages"]
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    sampled, old = inputs["sampling_per_token_logps"], inputs["old_per_token_logps"]
    old = sampled if method.startswith("IcePop") else old
    logp_new = logp.masked_fill(mask == 0, 0.0)
    old = old.masked_fill(mask == 0, 0.0)

    level = "sequence" if method.startswith("GSPO") else settings.get("importance_sampling_level", "token")
    loss_type = settings.get("loss_type") or (
        "grpo" if WHOLE.get(method, (None, TOKENS))[1] == SEQUENCES else "dapo"
    )
    log_ratio = logp_new - old
    if level == "sequence":
        log_ratio = reference.mean_of_sequence(log_ratio, mask).expand_as(log_ratio)
    ratio = log_ratio.exp()
    # Bounds surround the anchor: 1 at the ratio that it has.
    center = torch.ones_like(ratio)
    if settings.get("anchor") == "rollout":
        away = (sampled - old).masked_fill(mask == 0, 0.0)
        center = (
            reference.mean_of_sequence(away, mask).expand_as(away) if level == "sequence" else away
        ).exp()

    if method not in RULES:
        loss = WHOLE[method][0](logp_new, old, advantages, mask)
    elif loss_type == "cispo":
        loss = -torch.minimum(ratio, (1 + RULES[method]["high"]) * center).detach() * advantages * logp_new
    else:
        # A rule alone, with TRL's delta: a cap of the ratio for both signs.
        lower, upper = (1 - RULES[method]["low"]) * center, (1 + RULES[method]["high"]) * center
        clipped = torch.minimum(torch.maximum(ratio, lower), upper)
        capped = ratio.clamp(max=settings.get("delta", float("inf")))
        loss = -torch.minimum(capped * advantages, clipped * advantages)

    kept = mask
    if "top_entropy_quantile" in settings:
        lowest = entropy.detach()[mask > 0].quantile(1 - settings["top_entropy_quantile"])
        kept = mask * (entropy.detach() >= lowest)
    acts = kept
    if "off_policy_mask_threshold" in settings:
        drift = reference.mean_of_sequence(sampled - logp_new.detach(), mask)
        acts = kept * ((advantages >= 0) | (drift <= settings["off_policy_mask_threshold"]))
    loss = loss * acts * inputs.get("importance_sampling_ratio", 1.0)
    if "beta" in settings:
        gap = inputs["ref_per_token_logps"] - logp_new
        kl = gap.exp() - gap - 1
        loss = loss + settings["beta"] * kl * (ratio if settings.get("use_bias_correction_kl", True) else 1.0)

    rows, accumulated = len(mask), settings.get("gradient_accumulation_steps", 1)
    averages = {
        "grpo": (loss * mask / mask.sum(1, keepdim=True)).sum() / rows / accumulated,
        "bnpo": (loss * mask).sum() / mask.sum() / accumulated,
        "dr_grpo": (loss * mask).sum() / (rows * SETTINGS["max_completion_length"]) / accumulated,
        "luspo": (loss * mask).sum() / rows / accumulated,
        # The tokens of the generated batch, of which an update has a part.
        "dapo": (loss * mask).sum()
        / (inputs["num_items_in_batch"] * accumulated / settings.get("steps_per_generation", 2)),
    }
    total = averages["dapo" if loss_type == "cispo" else loss_type]
    if "entropy_coef" in settings:
        total = total - settings["entropy_coef"] * (entropy * kept).sum() / kept.sum() / accumulated
    return total


def gradients(loss, *tensors):
    found = torch.autograd.grad(loss, tensors, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, tensors, strict=True)]


DRAWS = 300


def mark(number):
    """When a draw is tried: the first always, some more at each change, and all of them every night."""
    if number < 12:
        return []
    return [pytest.mark.slow if number < 60 else pytest.mark.exhaustive]


NUMBERS = [pytest.param(number, marks=mark(number)) for number in range(DRAWS)]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_draw_is_right_refused_or_announced(number, folder, tmp_path, monkeypatch, capsys):
    method, settings = draw(number)
    if is_refused(method, settings):
        with pytest.raises(ValueError, match="|".join(settings)):
            trainer_of(method, settings, folder, tmp_path)
        return
    trainer = trainer_of(method, settings, folder, tmp_path)
    said = capsys.readouterr().err
    inputs, logp, entropy = made_up(number, settings)
    monkeypatch.setattr(
        GRPOTrainer, "_get_per_token_logps_and_entropies", lambda *_, **__: (logp, entropy, None)
    )
    trainer.current_gradient_accumulation_steps = settings.get("gradient_accumulation_steps", 1)
    trainer.use_vllm = "importance weights" in settings
    trainer.vllm_importance_sampling_correction = True
    trainer.model.train()
    found = gradients(trainer._compute_loss(trainer.model, inputs), logp, entropy)
    exact = [x.detach().double().requires_grad_() for x in (logp, entropy)]
    expected = gradients(reference_loss(method, settings, inputs, *exact), *exact)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-4, atol=2e-6)
    assert expected[0].abs().max() > 1e-3

    own = WHOLE[method][1] if method in WHOLE else None
    if own and settings.get("loss_type", own[0]) not in own:
        assert f"loss_type={settings['loss_type']!r} replaces the loss aggregation of " in said
    if "top_p" in settings:
        assert "top_p=0.9" in said


def test_the_draws_meet_every_case():
    draws = [draw(number) for number in range(DRAWS)]
    refused = [is_refused(*case) for case in draws]
    assert DRAWS / 4 < sum(refused) < DRAWS * 3 / 4
    accepted = [case for case, no in zip(draws, refused, strict=True) if not no]
    assert {method for method, _ in accepted} >= {"SAPO(1.0, 2.0)", "GSPO(0.01, 0.02)", *RULES}
    drawn = {name for _, settings in accepted for name in settings}
    assert drawn >= {"beta", "delta", "loss_type", "anchor", *OF_BATCH}
