"""Train with TRL's GRPOTrainer under a method of bandpo: two names change, and nothing else.

What it shows: `BandGRPOConfig` and `BandGRPOTrainer` in the place of TRL's two classes, the setting without which no
clip acts (several updates on a batch), and the lines of the log that tell what the clip does.

The task is to multiply three digits by one. The model (a transformer of 20 characters) comes with bandpo-lab, so
nothing is downloaded. At the start it writes a bare answer, which is nearly always wrong, and only in 2 of 100
completions the intermediate steps that lead it to the right one. That rare first token has to become common.

What it needs: ``pip install '.[trl]' './lab'`` in a clone.

How to run it (about 30 seconds on one core; with ``--max_steps 64`` the reward reaches about 0.9)::

    python examples/trl_grpo.py
    python examples/trl_grpo.py --method "DAPO()" --max_steps 64

What one should see (the numbers depend on the machine)::

    OUTPUT
"""

import argparse
import tempfile

from transformers import logging

from bandpo.integrations.trl import BandGRPOConfig, BandGRPOTrainer
from bandpo_lab.tasks.multiplication import MAX_COMPLETION_LENGTH, base_model_path, dataset, reward

METRICS = ("reward", "audit/on_policy", "audit/blocked_high", "audit/blocked_low", "audit/blocked_mass_below_0.1")
"""The lines of the log that matter first. ``audit/on_policy`` at 1 would mean that no clip can act."""


def main():
    """Train for a few steps and print what was logged."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", default="BandAbove()", help="any clip rule or method of bandpo, as text")
    parser.add_argument("--max_steps", type=int, default=16, help="optimizer steps")
    parser.add_argument("--output_dir", help="for checkpoints and tokens; by default a temporary folder")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    output_dir = arguments.output_dir or tempfile.mkdtemp(prefix="bandpo-")

    config = BandGRPOConfig(
        output_dir,
        method=arguments.method,
        max_steps=arguments.max_steps,
        # One batch of 128 completions serves four optimizer steps. With one step for each batch every ratio would be
        # 1, and no clip of any kind would act; the trainer warns of that.
        per_device_train_batch_size=128,
        num_generations=8,
        num_iterations=4,
        max_completion_length=MAX_COMPLETION_LENGTH,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    trainer = BandGRPOTrainer(str(base_model_path()), reward, args=config, train_dataset=dataset("train", 512))
    trainer.train()

    # The last row of the history is a summary of the whole run.
    for row in trainer.state.log_history[:-1]:
        values = "  ".join(f"{name.removeprefix('audit/')} {row[name]:.3f}" for name in METRICS if name in row)
        print(f"step {row['step']:3}  {values}")


if __name__ == "__main__":
    main()
