"""What Band adds to a TRL step: BandGRPOTrainer against GRPOTrainer on the embedded task.

    python benchmarks/trainer_step.py [--rounds 20] [--model embedded|30M] [--batch-size 8] [--record]

The trainers do whole batches in turn (generation, scoring and 8 updates each), from the same weights and seed, so a
machine whose speed drifts slows all. Prints the median processor time of a batch and the ratio, pair by pair.
"""

import argparse
import gc
import statistics
import tempfile
import warnings
from itertools import pairwise

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from bandpo.integrations.trl import AuditedGRPOTrainer, BandGRPOConfig, BandGRPOTrainer
from bandpo_lab.tasks import multiplication
from measuring import now, paired

# The first is what the others are measured by.
ARMS = {
    "GRPOTrainer": (GRPOTrainer, GRPOConfig, {}),
    "BandGRPOTrainer": (BandGRPOTrainer, BandGRPOConfig, {"audit_steps": 1}),
    "BandGRPOTrainer, no audit": (BandGRPOTrainer, BandGRPOConfig, {"audit_steps": 0}),
}
SETTINGS = {
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "per_device_train_batch_size": 32,
    "steps_per_generation": 4,
    "num_iterations": 2,
    "num_generations": 16,
    "max_completion_length": 40,
    "learning_rate": 0.0,  # all stay at the same policy, so all generate the same completions
    "lr_scheduler_type": "constant",
}


class Recorded(AuditedGRPOTrainer):
    """Stock training with all that the doctor does: audit, tests, gradient check and record."""

    record = tempfile.mkdtemp()


def random_30m():
    """Random weights in the embedded model's vocabulary: 8 layers of width 512."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(multiplication.base_model_path())
    config.update(
        {"hidden_size": 512, "intermediate_size": 1792, "num_attention_heads": 8, "num_key_value_heads": 8}
    )
    config.num_hidden_layers, config.layer_types = 8, config.layer_types[:1] * 8
    config.head_dim = 64
    return AutoModelForCausalLM.from_config(config)


def varied(completions, **_):
    """A reward that differs within a group, so that there is a gradient."""
    return [len(text) % 7 + 0.1 * (k % 3) for k, text in enumerate(completions)]


class Clock(TrainerCallback):
    """Reads the clock when an optimiser step begins, and at the end of training."""

    def __init__(self, device):
        self.device, self.marks = device, []

    def on_step_begin(self, args, state, control, **_):
        self.marks.append(now(self.device))

    def on_train_end(self, args, state, control, **_):
        self.marks.append(now(self.device))


def batches(arm, batches, *, make_model, reward, device="cpu", **settings):
    """Seconds of each update, one list a batch; generation and scoring are part of a batch's first update."""
    trainer_class, config_class, own = ARMS[arm]
    settings = SETTINGS | settings
    per_batch = settings["steps_per_generation"] * settings["num_iterations"]
    clock = Clock(device)
    with tempfile.TemporaryDirectory() as folder:
        settings |= {"use_cpu": device == "cpu", "max_steps": batches * per_batch} | own
        trainer = trainer_class(
            model=make_model(),  # a new one, because trainers leave their hooks on it
            reward_funcs=reward,
            args=config_class(folder, **settings),
            train_dataset=multiplication.dataset("train", 256),
            processing_class=AutoTokenizer.from_pretrained(
                multiplication.base_model_path(), padding_side="left"
            ),
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    del trainer
    gc.collect()  # weights and optimiser, before the next arm needs the room
    updates = [after - before for before, after in pairwise(clock.marks)]
    return [updates[k : k + per_batch] for k in range(0, len(updates), per_batch)]


def in_turn(rounds, number, **arguments):
    """Yields, after each round, all batches of all rounds so far: a dictionary of lists by arm.

    The first batch of each run warms up and is left out. Who begins changes from round to round.
    """
    found = {arm: [] for arm in ARMS}
    for k in range(rounds):
        order = [*ARMS][k % len(ARMS) :] + [*ARMS][: k % len(ARMS)]
        for arm in order:
            found[arm] += batches(arm, number, **arguments)[1:]
        yield found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, help="of three timed batches by each trainer")
    parser.add_argument(
        "--model",
        choices=["embedded", "30M"],
        default="embedded",
        help="335 thousand parameters, or 30 million",
    )
    parser.add_argument(
        "--batch-size", type=int, help="answers in a loss; by default 32, of 30M parameters 8"
    )
    parser.add_argument("--record", action="store_true", help="a stock trainer, audited and recorded, alone")
    options = parser.parse_args()
    if options.record:
        for arm in [*ARMS][1:]:
            del ARMS[arm]
        ARMS["AuditedGRPOTrainer, recorded"] = (Recorded, GRPOConfig, {})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    make_model, settings = {
        "embedded": (lambda: str(multiplication.base_model_path()), {}),
        "30M": (
            random_30m,
            {"per_device_train_batch_size": 8, "max_completion_length": 64, "num_generations": 8},
        ),
    }[options.model]
    if options.batch_size is not None:
        settings = settings | {"per_device_train_batch_size": options.batch_size, "num_generations": 8}
    *_, found = in_turn(options.rounds, 4, make_model=make_model, reward=varied, **settings)
    stock, *_ = seconds = [[sum(updates) for updates in found[arm]] for arm in ARMS]
    for arm, own in zip(ARMS, seconds, strict=True):
        against = paired(own, stock)
        print(
            f"{arm:26} {statistics.median(own):.4f} s a batch, ratio {against['ratio']:.3f} "
            f"(quartiles {against['low']:.3f} to {against['high']:.3f}, {against['pairs']} pairs)"
        )


if __name__ == "__main__":
    main()
