"""Train with TRL's GRPOTrainer under a method of bandpo, which replaces two classes of TRL.

What it shows: `BandGRPOConfig` and `BandGRPOTrainer` in place of `GRPOConfig` and `GRPOTrainer`, the settings that
every clip needs (several updates on each batch), and the metrics about the clip.

The task is to multiply a number of three digits by one of one digit. The model (a transformer over 20 characters) is
part of bandpo-lab, so nothing is downloaded. At first it answers directly, which is nearly always wrong. Only in 2 of
100 completions it writes the intermediate steps that lead to the right answer. The rare first token of these steps has
to become common.

What it needs: ``pip install ./packages/rlvet './packages/bandpo[trl]' ./packages/bandpo-lab`` in a clone.

How to run it (about 40 seconds on one core)::

    python examples/trl_grpo.py
    python examples/trl_grpo.py --method "DAPO()" --max_steps 320

What one should see (the numbers depend on the machine)::

    bandpo: the loss with trl 1.16.0 has the gradient of BandAbove(divergence=KL(), ...), 6e-17: compared on ...
    step   8  reward 0.172  entropy 0.435  on_policy 0.125  clip_high 0.038  clip_low 0.060
    step  16  reward 0.078  entropy 0.489  on_policy 0.125  clip_high 0.011  clip_low 0.038
    ...
    step 120  reward 0.766  entropy 0.036  on_policy 0.125  clip_high 0.006  clip_low 0.007
    step 128  reward 0.758  entropy 0.032  on_policy 0.125  clip_high 0.005  clip_low 0.007
"""

import argparse
import tempfile

from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging

from bandpo.integrations.trl import BandGRPOConfig, BandGRPOTrainer
from bandpo_lab.tasks.multiplication import MAX_COMPLETION_LENGTH, base_model_path, dataset, reward

METRICS = ("reward", "entropy", "audit/on_policy", "audit/clip_high", "audit/clip_low")
"""The metrics to print. ``audit/on_policy`` is the share of losses in which every ratio is 1, so that no clip acts."""


class PrintMetrics(TrainerCallback):
    """A callback that prints some metrics, in place of TRL's, which prints all of them."""

    def on_log(self, args, state, control, logs, **_):
        if "reward" in logs:
            values = "  ".join(f"{name.removeprefix('audit/')} {logs[name]:.3f}" for name in METRICS)
            print(f"step {state.global_step:3}  {values}", flush=True)


def main():
    """Train, and print a line every eight optimizer steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", default="BandAbove()", help="any clip rule or method of bandpo, as text")
    parser.add_argument("--max_steps", type=int, default=128, help="optimizer steps")
    parser.add_argument(
        "--output_dir", help="for the log and a checkpoint at the end; by default a temporary folder"
    )
    arguments = parser.parse_args()
    logging.disable_progress_bar()

    config = BandGRPOConfig(
        arguments.output_dir or tempfile.mkdtemp(prefix="bandpo-"),
        # The only setting that TRL does not have. It replaces TRL's ``epsilon``, which must not be set beside it.
        method=arguments.method,
        # A batch has 8 prompts with 16 completions each. It is split into four parts, and each part is used twice,
        # which makes eight optimizer steps. With a single step per batch every ratio would be 1, and no clip would
        # have any effect; the trainer warns of that.
        per_device_train_batch_size=32,
        steps_per_generation=4,
        num_iterations=2,
        num_generations=16,
        max_steps=arguments.max_steps,
        max_completion_length=MAX_COMPLETION_LENGTH,
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        logging_steps=8,
        # The log, trainer_state.json, is written with a checkpoint: `rlvet diagnose` reads it.
        save_strategy="steps" if arguments.output_dir else "no",
        save_steps=arguments.max_steps,
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
        callbacks=[PrintMetrics()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


if __name__ == "__main__":
    main()
