"""Train with a tool in TRL: answers of several turns, in which only the sampled tokens count.

What it shows: a ``rollout_func`` that lets the model call a tool in the middle of its answer, the mask that it returns
(``env_mask``: 1 for tokens that the model sampled, 0 for those that the tool wrote), and that the loss, the gradient
check, the audit and the record of tokens all leave the tool's tokens out.

The task is that of ``trl_grpo.py``: to multiply three digits by one. Here the steps are a conversation with a
calculator. Whenever the model has written a step up to its ``=``, as in ``<7*6+0=``, the calculator writes the result,
``42``, and the model goes on with ``;``.

With a model whose chat template knows tools, pass ``tools=[multiply]`` to the trainer instead of a ``rollout_func``:
TRL then runs the turns by itself and sets the same mask. The embedded model has no such template.

What it needs: ``pip install '.[trl,records]' './lab'`` in a clone.

How to run it (about 40 seconds on one core)::

    python examples/trl_tools.py

What one should see (the numbers depend on the machine)::

    bandpo: gradient equals BandAbove(divergence=KL(), ...) on 836 tokens (79 beyond a bound), 5e-08
    step   4  reward 0.172  sampled   836  by the tool   22  audited   836
    ...
    step  80  reward 0.797  sampled  3460  by the tool  530  audited  3460
    an answer, with the tool's tokens in brackets: <9*7+0=[63];9*7+6=[69];5*7+6=[41]>4193
    losses in which exactly the sampled tokens counted: 80 of 80
"""

import argparse
import re
import tempfile
from pathlib import Path

import torch
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging

from bandpo.integrations.trl import BandGRPOConfig, BandGRPOTrainer
from bandpo.runs import open_run
from bandpo_lab.tasks.multiplication import MAX_COMPLETION_LENGTH, base_model_path, dataset, reward

UPDATES = 4
STEP = re.compile(r"<(?:.*;)?(\d)\*(\d)\+(\d+)=")
"""An answer that ends in a step without its result. ``fullmatch`` does not find it behind the closing ``>``."""


def calculator(text):
    """Return what the tool writes after ``text``: the result of the step that ends it, or nothing."""
    step = STEP.fullmatch(text)
    if step is None:
        return ""
    digit, factor, carry = map(int, step.groups())
    return str(digit * factor + carry)


class Rollout:
    """Samples answers with the calculator in them, and counts the tokens of each batch by who wrote them."""

    def __init__(self):
        self.sampled = []
        self.by_tool = []
        self.example = ""

    @torch.no_grad()
    def __call__(self, prompts, trainer):
        """Sample an answer for each prompt; this is the interface of TRL's ``rollout_func``."""
        tokenizer = trainer.processing_class
        model = trainer.accelerator.unwrap_model(trainer.model)
        prompt_ids = tokenizer(prompts)["input_ids"]
        # Every prompt of this task has six characters, so a batch needs no padding and its rows stay aligned.
        ids = torch.tensor(prompt_ids)
        cache = None
        texts = ["" for _ in prompts]
        pending = [[] for _ in prompts]  # what the tool has yet to write
        finished = [False for _ in prompts]
        completion_ids = [[] for _ in prompts]
        logprobs = [[] for _ in prompts]
        env_mask = [[] for _ in prompts]

        for _ in range(MAX_COMPLETION_LENGTH):
            outputs = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = outputs.past_key_values
            logp = (outputs.logits[:, -1] / trainer.temperature).log_softmax(-1)
            drawn = torch.multinomial(logp.exp(), 1).squeeze(1).tolist()
            written = []
            for row, sampled in enumerate(drawn):
                if finished[row]:
                    written.append(tokenizer.pad_token_id)
                    continue
                if pending[row]:
                    # The tool's token is in the context of what follows, but the policy did not choose it. It has
                    # therefore no log-probability to train on, and 0 in the mask.
                    token = pending[row].pop(0)
                    logprobs[row].append(0.0)
                    env_mask[row].append(0)
                else:
                    token = sampled
                    logprobs[row].append(logp[row, token].item())
                    env_mask[row].append(1)
                completion_ids[row].append(token)
                written.append(token)
                finished[row] = token == tokenizer.eos_token_id
                texts[row] += tokenizer.decode([token], skip_special_tokens=True)
                # The end of a sampled step calls the tool. The text after the tool's own tokens calls nothing.
                if not pending[row]:
                    pending[row] = tokenizer(calculator(texts[row]))["input_ids"]
            if all(finished):
                break
            ids = torch.tensor(written).unsqueeze(1)

        self.count(texts, env_mask)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": logprobs,
            "env_mask": env_mask,
        }

    def count(self, texts, env_mask):
        """Count the tokens of a batch, and keep its answer with most tool calls as an example."""
        self.sampled.append(sum(map(sum, env_mask)))
        self.by_tool.append(sum(len(mask) - sum(mask) for mask in env_mask))
        row = min(range(len(texts)), key=lambda i: sum(env_mask[i]) / len(env_mask[i]))
        characters = zip(texts[row], env_mask[row], strict=False)
        marked = "".join(character if sampled else f"[{character}]" for character, sampled in characters)
        self.example = marked.replace("][", "")


class PrintMetrics(TrainerCallback):
    """Print a line for each batch, in place of the dictionary that TRL prints."""

    def __init__(self, rollout):
        self.rollout = rollout

    def on_log(self, args, state, control, logs, **_):
        if "reward" in logs:
            # Each of the batch's losses is audited, and ``audit/tokens`` is their sum.
            audited = logs["audit/tokens"] / UPDATES
            print(
                f"step {state.global_step:3}  reward {logs['reward']:.3f}  sampled {self.rollout.sampled[-1]:5}  "
                f"by the tool {self.rollout.by_tool[-1]:4}  audited {audited:5.0f}",
                flush=True,
            )


def main():
    """Train, and compare the tokens that were sampled with those that counted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--max_steps", type=int, default=80, help=f"optimizer steps, {UPDATES} for each batch"
    )
    parser.add_argument("--output_dir", help="for the record of tokens; by default a temporary folder")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    output_dir = Path(arguments.output_dir or tempfile.mkdtemp(prefix="bandpo-"))
    record = output_dir / "tokens"

    rollout = Rollout()
    config = BandGRPOConfig(
        str(output_dir),
        method="BandAbove()",
        # One batch of 8 prompts with 16 completions each, all of it in each of the updates.
        per_device_train_batch_size=128,
        num_generations=16,
        num_iterations=UPDATES,
        logging_steps=UPDATES,
        max_steps=arguments.max_steps,
        max_completion_length=MAX_COMPLETION_LENGTH,
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        record=str(record),
        # With checkpointing, which is TRL's default, transformers ignores the cache that the rollout samples with.
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    trainer = BandGRPOTrainer(
        str(base_model_path()),
        reward,
        args=config,
        train_dataset=dataset("train", 1024),
        rollout_func=rollout,
        callbacks=[PrintMetrics(rollout)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()

    print(f"an answer, with the tool's tokens in brackets: {rollout.example}")
    # The record holds the tokens that counted in each loss, and nothing of the others.
    losses = list(open_run(record).batches())
    expected = [sampled for sampled in rollout.sampled for _ in range(UPDATES)][: len(losses)]
    counted = [int(loss.mask.sum()) for loss in losses]
    equal = sum(a == b for a, b in zip(counted, expected, strict=True))
    print(f"losses in which exactly the sampled tokens counted: {equal} of {len(losses)}")


if __name__ == "__main__":
    main()
