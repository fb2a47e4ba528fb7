"""Make the base policy of the multiplication task by supervised warm-up, in 150 s on one core.

    PYTHONPATH=research python -m studies.base_model --tail 0.02 --seed 0 --output_dir base

Direct answers and answers with a scratchpad are trained on equally often, so that the policy learns both, however
rare the scratchpad is to be. The scratchpad is made rare only through the token that opens it: at that position the
policy is trained towards a given probability, the *tail*, and not on the sampled token.

Until the last quarter of the steps, that probability is 2 % for any tail. So models of one seed have the same skills
and differ in little but the tail. (Seeds differ in the share of direct answers that are right: 2 to 6 %.)
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from bandpo_lab.errors import InvalidValue
from bandpo_lab.tasks.multiplication import (
    DIRECT,
    EOS,
    MAX_COMPLETION_LENGTH,
    PAD,
    SCRATCHPAD,
    Product,
    problems,
    reward,
    tokenizer,
)
from studies.rewards import OPENERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

CARD = "base_model.json"
"""The file beside the weights with the settings of the training and the measurements of the model."""

# Together these are all problems with three digits.
_TRAIN_PROBLEMS = 6480
_EVAL_PROBLEMS = 720
_EARLY_TAIL = 0.02
_BATCH = 64  # samples in a step, half of them with a scratchpad
_LEARNING_RATE = 2e-3  # peak of the one-cycle schedule
_ERROR = 2  # direct answers in the data are off by so much at most, uniformly
_SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": MAX_COMPLETION_LENGTH}


@dataclass(frozen=True)
class WarmUp:
    """Settings of the supervised warm-up.

    Raises:
        ValueError: if a value is out of range.
    """

    tail: float = field(
        default=0.02, metadata={"help": "probability of taking the scratchpad, between 0 and 1"}
    )
    seed: int = field(default=0, metadata={"help": "of the weights and of the data"})
    steps: int = field(default=1200, metadata={"help": "optimizer steps"})
    wrong: bool = field(
        default=False,
        metadata={"help": "five other tokens open a direct answer, each as rarely as the scratchpad"},
    )

    def __post_init__(self) -> None:
        if not 0 < self.tail < 1:
            raise InvalidValue(f"tail={self.tail}: choose a probability between 0 and 1, both excluded")
        if self.steps < 1:
            raise InvalidValue(f"steps={self.steps}: choose at least 1")


def fresh_model(seed: int) -> Qwen2ForCausalLM:
    """Return an untrained Qwen2 with 335,000 parameters and the task's vocabulary."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    ids = tokenizer().get_vocab()
    config = Qwen2Config(
        vocab_size=len(ids),
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=256,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=ids[PAD],
        bos_token_id=None,
        eos_token_id=ids[EOS],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config.update(**_SAMPLING)
    return model


def warm_up(settings: WarmUp, *, progress: bool = True) -> Qwen2ForCausalLM:
    """Train the base model from scratch. The same settings give the same bits on the same machine.

    The loss is the cross entropy of the tokens after the branch token, plus, at the branch token,

        -log(p_direct + p_scratchpad) + (log(p_scratchpad / p_direct) - log(tail / (1 - tail)))^2 / 2,

    whose curvature in the log-odds is 1 for any tail, where that of a cross entropy vanishes with the tail. With more
    rare openers each has a square of its own.
    """
    encoder = tokenizer()
    model = fresh_model(settings.seed)
    ids = encoder.get_vocab()
    other_openers = OPENERS if settings.wrong else ()
    branches = [ids[opener] for opener in (DIRECT, SCRATCHPAD, *other_openers)]
    rng = random.Random(settings.seed)
    pool = problems("train", _TRAIN_PROBLEMS, settings.seed)

    def losses(prompts: list[str], completions: list[str], tail: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of each token after the branch token, and the loss of each branch token."""
        texts = [prompt + text + EOS for prompt, text in zip(prompts, completions, strict=True)]
        batch = encoder(texts, return_tensors="pt", padding=True, padding_side="right")
        branch = len(prompts[0])  # every prompt has this length
        logp = model(**batch).logits[:, branch - 1 : -1].log_softmax(-1)
        is_completion = batch.attention_mask[:, branch + 1 :].bool()
        content = -logp[:, 1:].gather(-1, batch.input_ids[:, branch + 1 :, None])[..., 0][is_completion]
        direct, rare = logp[:, 0, branches].split([1, len(branches) - 1], -1)
        excess = rare - direct - math.log(tail / (1 - rare.shape[-1] * tail))
        branch_loss = -reduce(torch.logaddexp, logp[:, 0, branches].unbind(-1)) + excess.square().sum(-1) / 2
        return content, branch_loss

    optimizer = torch.optim.AdamW(model.parameters(), _LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, settings.steps)
    steps = tqdm(range(settings.steps), desc="warm-up", disable=not progress)
    for step in steps:
        tail = _EARLY_TAIL if step < 0.75 * settings.steps else settings.tail
        drawn = rng.choices(pool, k=_BATCH)
        prompts, half = [p.prompt for p in drawn], _BATCH // 2
        guesses = [max(0, p.a * p.b + rng.randint(-_ERROR, _ERROR)) for p in drawn[half:]]
        # One pass for each branch: padding the short one to the long one would cost half as much again.
        worked = losses(prompts[:half], [p.scratchpad for p in drawn[:half]], tail)
        openers = rng.choices([DIRECT, *other_openers], k=half) if other_openers else [DIRECT] * half
        guessed = losses(
            prompts[half:], [f"{o}{guess}" for o, guess in zip(openers, guesses, strict=True)], tail
        )
        content, choice = (torch.cat(pair).mean() for pair in zip(worked, guessed, strict=True))
        optimizer.zero_grad()
        (content + choice).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        steps.set_postfix(
            scratchpad=f"{worked[0].mean().item():.3f}", direct=f"{guessed[0].mean().item():.3f}"
        )
    return model.eval()


@torch.no_grad()
def scratchpad_probability(
    model: Qwen2ForCausalLM, encoder: PreTrainedTokenizerFast, asked: Sequence[Product]
) -> torch.Tensor:
    """Return the exact probability of the scratchpad at temperature 1 for each problem: float64, (problems,)."""
    batch = encoder([p.prompt for p in asked], return_tensors="pt", padding=True)
    logits = model(**batch).logits[:, -1]
    return logits.double().softmax(-1)[:, encoder.get_vocab()[SCRATCHPAD]]


def measure(
    model: Qwen2ForCausalLM, encoder: PreTrainedTokenizerFast, *, samples: int = 32, seed: int = 0
) -> dict[str, float]:
    """Measure the policy on 64 held-out problems with ``samples`` answers each at temperature 1.

    Returns:
        `tail`: mean probability of the scratchpad, exact, over all held-out problems of three digits;
        `mean@k`, `pass@k` for k = `samples`: mean reward, and share of problems with a right answer among k;
        `direct_accuracy`, `scratchpad_accuracy`: share of right answers once that branch is taken.
    """
    held_out = problems("eval", _EVAL_PROBLEMS)
    repeated = [p for p in held_out[:64] for _ in range(samples)]

    def rewards(branch: str) -> torch.Tensor:
        batch = encoder([p.prompt + branch for p in repeated], return_tensors="pt", padding=True)
        # For pyright, transformers' models do not satisfy the protocol that `generate` requires.
        tokens = model.generate(**batch, **_SAMPLING)  # pyright: ignore[reportAttributeAccessIssue]
        texts = encoder.batch_decode(tokens[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
        return torch.tensor(reward([branch + text for text in texts], [p.answer for p in repeated]))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        free = rewards("").view(-1, samples)
        figures = {
            "tail": scratchpad_probability(model, encoder, held_out).mean(),
            f"mean@{samples}": free.mean(),
            f"pass@{samples}": free.amax(1).mean(),
            "direct_accuracy": rewards(DIRECT).mean(),
            "scratchpad_accuracy": rewards(SCRATCHPAD).mean(),
        }
    return {name: round(figure.item(), 5) for name, figure in figures.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line: read the settings, train, measure, and save the model with its card."""
    import transformers

    kind: Any = WarmUp  # pyright does not accept a class for the type that transformers declares
    parser = transformers.HfArgumentParser(kind, prog="python -m studies.base_model")
    parser.add_argument(
        "--output_dir", required=True, help="folder for the model; must not exist or be empty"
    )
    try:
        settings, output = parser.parse_args_into_dataclasses(arguments)
        folder = Path(output.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InvalidValue(f"output_dir={output.output_dir}: the folder is not empty; name a new one")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    torch.set_num_threads(1)  # the order of sums, hence the bits, would depend on the number of threads
    model = warm_up(settings)
    encoder = tokenizer()
    measured = measure(model, encoder)
    model.save_pretrained(folder)
    encoder.save_pretrained(folder)
    card: dict[str, Any] = {
        "made_by": "studies.base_model",
        "settings": asdict(settings),
        "measured": measured,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    (folder / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    for name, figure in measured.items():
        print(f"{name:>20} {figure:.4f}")
    print(f"saved to {folder}")


if __name__ == "__main__":
    main()
