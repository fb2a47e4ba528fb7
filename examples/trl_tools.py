"""Train with a tool in TRL: in answers with tool calls, only tokens that the model sampled count.

What it shows: a ``rollout_func`` in which the model calls a tool within its answer, the mask that it returns
(``env_mask``: 1 for tokens that the model sampled, 0 for tokens of the tool), and that loss, gradient check, audit and
record of tokens ignore the tool's tokens.

The task is that of ``trl_grpo.py``, a multiplication. Here a calculator computes the intermediate steps: whenever the
model has written a step up to its ``=``, such as ``<7*6+0=``, the calculator writes the result, ``42``, and the model
continues with ``;``.

If the chat template of a model supports tools, pass ``tools=[multiply]`` to the trainer instead of a ``rollout_func``:
TRL then executes the tool calls and sets the same mask. The model of this program has no such template.

What it needs: ``pip install ./packages/rlvet './packages/bandpo[trl]' ./packages/bandpo-lab`` in a clone.

How to run it (about 40 seconds on one core)::

    python examples/trl_tools.py

What one should see (the numbers depend on the machine)::

    bandpo: the loss with trl 1.16.0 has the gradient of BandAbove(divergence=KL(), ...), 6e-17: compared on ...
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
from bandpo_lab.tasks.multiplication import MAX_COMPLETION_LENGTH, base_model_path, dataset, reward
from rlvet import open_run

UPDATES = 4
STEP = re.compile(r"<(?:.*;)?(\d)\*(\d)\+(\d+)=")
"""An answer that ends in a step without its result. ``fullmatch`` does not match an answer after the closing ``>``."""


def calculator(text):
    """Return the result of the step at the end of a text; empty if there is none."""
    step = STEP.fullmatch(text)
    if step is None:
        return ""
    digit, factor, carry = map(int, step.groups())
    return str(digit * factor + carry)


class Rollout:
    """A ``rollout_func`` that samples answers with calls of the calculator."""

    def __init__(self):
        self.sampled = []  # for each batch, the number of tokens that the model sampled
        self.by_tool = []  # for each batch, the number of tokens of the tool
        self.example = ""  # an answer of the last batch

    @torch.no_grad()
    def __call__(self, prompts, trainer):
        """Sample an answer for each prompt, with the arguments and results of TRL's ``rollout_func``."""
        tokenizer = trainer.processing_class
        model = trainer.accelerator.unwrap_model(trainer.model)
        prompt_ids = tokenizer(prompts)["input_ids"]
        # Every prompt of this task has six characters, so the batch needs no padding.
        ids = torch.tensor(prompt_ids)
        cache = None
        texts = ["" for _ in prompts]
        pending = [[] for _ in prompts]  # tokens of the tool that are not in the answer yet
        finished = [False for _ in prompts]
        completion_ids = [[] for _ in prompts]
        logprobs = [[] for _ in prompts]
        env_mask = [[] for _ in prompts]

        for _ in range(MAX_COMPLETION_LENGTH):
            outputs = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = outputs.past_key_values
            logp = (outputs.logits[:, -1] / trainer.temperature).log_softmax(-1)
            sampled_tokens = torch.multinomial(logp.exp(), 1).squeeze(1).tolist()
            next_tokens = []
            for row, sampled in enumerate(sampled_tokens):
                if finished[row]:
                    next_tokens.append(tokenizer.pad_token_id)
                    continue
                if pending[row]:
                    # The tool's token replaces the sampled one. The policy did not choose it, so it is 0 in the mask,
                    # and its log-probability is not used.
                    token = pending[row].pop(0)
                    logprobs[row].append(0.0)
                    env_mask[row].append(0)
                else:
                    token = sampled
                    logprobs[row].append(logp[row, token].item())
                    env_mask[row].append(1)
                completion_ids[row].append(token)
                next_tokens.append(token)
                finished[row] = token == tokenizer.eos_token_id
                texts[row] += tokenizer.decode([token], skip_special_tokens=True)
                # Call the tool if the text now ends in a step without its result.
                if not pending[row]:
                    pending[row] = tokenizer(calculator(texts[row]))["input_ids"]
            if all(finished):
                break
            ids = torch.tensor(next_tokens).unsqueeze(1)

        self.count_tokens(texts, env_mask)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": logprobs,
            "env_mask": env_mask,
        }

    def count_tokens(self, texts, env_mask):
        """Count the tokens of a batch, and save the answer with the largest share of the tool's tokens."""
        self.sampled.append(sum(map(sum, env_mask)))
        self.by_tool.append(sum(len(mask) - sum(mask) for mask in env_mask))
        row = min(range(len(texts)), key=lambda i: sum(env_mask[i]) / len(env_mask[i]))
        characters = zip(texts[row], env_mask[row], strict=False)  # a token is one character
        with_brackets = "".join(
            character if sampled else f"[{character}]" for character, sampled in characters
        )
        self.example = with_brackets.replace("][", "")


class PrintMetrics(TrainerCallback):
    """A callback that prints a line for each batch, in place of TRL's, which prints all metrics."""

    def __init__(self, rollout):
        self.rollout = rollout

    def on_log(self, args, state, control, logs, **_):
        if "reward" in logs:
            # ``audit/tokens`` is the sum over the losses of the batch.
            audited = logs["audit/tokens"] / UPDATES
            print(
                f"step {state.global_step:3}  reward {logs['reward']:.3f}  sampled {self.rollout.sampled[-1]:5}  "
                f"by the tool {self.rollout.by_tool[-1]:4}  audited {audited:5.0f}",
                flush=True,
            )


def main():
    """Train, and compare the numbers of sampled tokens with the tokens in the record."""
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
        # A batch has 8 prompts with 16 completions each, and each update uses all of it.
        per_device_train_batch_size=128,
        num_generations=16,
        num_iterations=UPDATES,
        logging_steps=UPDATES,
        max_steps=arguments.max_steps,
        max_completion_length=MAX_COMPLETION_LENGTH,
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        record=str(record),
        # With gradient checkpointing, TRL's default, transformers disables the cache, which the rollout needs.
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
    # The record only has the tokens that counted in each loss.
    losses = list(open_run(record).batches())
    expected = [sampled for sampled in rollout.sampled for _ in range(UPDATES)][: len(losses)]
    counted = [int(loss.mask.sum()) for loss in losses]
    equal_losses = sum(a == b for a, b in zip(counted, expected, strict=True))
    print(f"losses in which exactly the sampled tokens counted: {equal_losses} of {len(losses)}")


if __name__ == "__main__":
    main()
