"""Train with TRL's GRPOTrainer under a method of bandpo: two names change, and nothing else.

What it shows: `BandGRPOConfig` and `BandGRPOTrainer` in the place of TRL's two classes, the settings without which no
clip acts (several updates on a batch), and the metrics of the log that tell what the clip does.

The task is to multiply three digits by one. The model (a transformer over 20 characters) comes with bandpo-lab, so
nothing is downloaded. At the start it answers directly, which is nearly always wrong. In 2 of 100 completions only it
writes the intermediate steps that lead to the right answer. That rare first token has to become common.

What it needs: ``pip install '.[trl]' './lab'`` in a clone.

How to run it (about 40 seconds on one core)::

    python examples/trl_grpo.py
    python examples/trl_grpo.py --method "DAPO()" --max_steps 320

What one should see (the numbers depend on the machine)::

    bandpo: gradient equals BandAbove(divergence=KL(), ...) on 241 tokens (13 beyond a bound), 1e-07
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
"""What to look at first. ``audit/on_policy`` is the share of losses whose ratios are all 1: at 1 no clip can act."""


class PrintMetrics(TrainerCallback):
    """Print the metrics that matter, in place of the whole dictionary that TRL prints."""

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
    parser.add_argument("--output_dir", help="for checkpoints; by default a temporary folder")
    arguments = parser.parse_args()
    logging.disable_progress_bar()

    config = BandGRPOConfig(
        arguments.output_dir or tempfile.mkdtemp(prefix="bandpo-"),
        # The only setting that TRL does not have. TRL's own ``epsilon`` is refused beside it.
        method=arguments.method,
        # One batch is 8 prompts with 16 completions each. It is cut into four parts, and each part is used twice, so
        # that it serves eight optimizer steps. With a single step for each batch every ratio would be 1, and no clip
        # of any kind would act; the trainer warns of that.
        per_device_train_batch_size=32,
        steps_per_generation=4,
        num_iterations=2,
        num_generations=16,
        max_steps=arguments.max_steps,
        max_completion_length=MAX_COMPLETION_LENGTH,
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        logging_steps=8,
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
        callbacks=[PrintMetrics()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


if __name__ == "__main__":
    main()
