"""Measure the overhead of Band in a TRL step: BandGRPOTrainer against GRPOTrainer on the embedded task.

    python benchmarks/trainer_step.py [--batches 60] [--model embedded|30M] [--batch-size 8] [--record]

The trainers start from the same weights and seed and make one update each in turn, so that a drift of the machine's
speed affects all of them alike. A batch is one generation, its scoring and 8 updates. Prints the median processor
time of a batch, and the median ratio to that of the stock trainer with a 95 % interval over the batches.
"""

import argparse
import gc
import statistics
import tempfile
import threading
import warnings

import numpy as np
import scipy.stats
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from bandpo.integrations.trl import AuditedGRPOTrainer, BandGRPOConfig, BandGRPOTrainer
from bandpo_lab.tasks import multiplication
from measuring import now

# The first one is the baseline.
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
    """TRL's trainer with all checks of the doctor: audit, tests, gradient check and record."""

    record = tempfile.mkdtemp()


def random_30m():
    """Return a model of 8 layers of width 512 with random weights and the embedded model's vocabulary."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(multiplication.base_model_path())
    config.update(
        {"hidden_size": 512, "intermediate_size": 1792, "num_attention_heads": 8, "num_key_value_heads": 8}
    )
    config.num_hidden_layers = 8
    config.layer_types = config.layer_types[:1] * 8
    config.head_dim = 64
    return AutoModelForCausalLM.from_config(config)


def varied_reward(completions, **_):
    """Return rewards that differ within a group, so that there is a gradient."""
    return [len(text) % 7 + 0.1 * (k % 3) for k, text in enumerate(completions)]


class Clock(TrainerCallback):
    """A callback that measures the seconds of each optimizer step.

    Args:
        device: The device whose clock is read.
        pause: A function to call between two steps. Its time is not counted.
    """

    def __init__(self, device, pause=lambda: None):
        self.device = device
        self.pause = pause
        self.seconds = []
        self.began = None

    def _end_update(self):
        if self.began is not None:
            self.seconds.append(now(self.device) - self.began)

    def on_step_begin(self, args, state, control, **_):
        self._end_update()
        self.pause()
        self.began = now(self.device)

    def on_train_end(self, args, state, control, **_):
        self._end_update()


class Turns:
    """A lock with which threads run one at a time, in a fixed order, each with its own random state."""

    def __init__(self, threads):
        self.condition = threading.Condition()
        self.waiting = list(range(threads))

    def begin(self, thread):
        """Wait for the first turn of this thread."""
        with self.condition:
            self.condition.wait_for(lambda: self.waiting[0] == thread)

    def next(self, thread):
        """Let each other thread take its turn, and return when it is this thread's turn again."""
        random_state = torch.get_rng_state()
        with self.condition:
            self.waiting.append(self.waiting.pop(0))
            self.condition.notify_all()
            self.condition.wait_for(lambda: self.waiting[0] == thread)
        torch.set_rng_state(random_state)

    def end(self):
        """Leave all further turns to the other threads."""
        with self.condition:
            self.waiting.pop(0)
            self.condition.notify_all()


def batches(arm, batches, *, make_model, reward, device="cpu", pause=lambda: None, **settings):
    """Train with one arm, and return the seconds of each update, as one list per batch.

    The first update of a batch includes generation and scoring.
    """
    trainer_class, config_class, arm_settings = ARMS[arm]
    settings = SETTINGS | settings
    per_batch = settings["steps_per_generation"] * settings["num_iterations"]
    clock = Clock(device, pause)
    with tempfile.TemporaryDirectory() as folder:
        settings |= {"use_cpu": device == "cpu", "max_steps": batches * per_batch} | arm_settings
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
    return [clock.seconds[k : k + per_batch] for k in range(0, len(clock.seconds), per_batch)]


def interleaved(number, **arguments):
    """Return the seconds of each batch by arm. The arms make their updates in turn, and the first batch is dropped.

    Args:
        number: The number of batches.
        **arguments: Arguments of `batches`.
    """
    turns = Turns(len(ARMS))
    seconds = {}

    def train(thread, arm):
        turns.begin(thread)
        try:
            measured = batches(arm, number + 1, pause=lambda: turns.next(thread), **arguments)
            seconds[arm] = [sum(updates) for updates in measured[1:]]
        finally:
            turns.end()

    threads = [threading.Thread(target=train, args=pair) for pair in enumerate(ARMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seconds


def in_turn(rounds, number, **arguments):
    """Yield, after each round, the batches of all rounds so far: a dictionary of lists by arm.

    One trainer is in memory at a time. The first batch of each run is a warm-up and is dropped. The arm that starts
    changes from round to round.
    """
    updates = {arm: [] for arm in ARMS}
    for k in range(rounds):
        order = [*ARMS][k % len(ARMS) :] + [*ARMS][: k % len(ARMS)]
        for arm in order:
            updates[arm] += batches(arm, number, **arguments)[1:]
        yield updates


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=60, help="by each trainer")
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
    seconds = interleaved(options.batches, make_model=make_model, reward=varied_reward, **settings)
    stock, *other_arms = ARMS
    print(f"{stock}: {statistics.median(seconds[stock]):.4f} s a batch")
    for arm in other_arms:
        ratios = np.divide(seconds[arm], seconds[stock])
        interval = scipy.stats.bootstrap((ratios,), np.median, rng=0).confidence_interval
        print(
            f"{arm}: {statistics.median(seconds[arm]):.4f} s a batch, ratio {np.median(ratios):.3f} "
            f"({interval.low:.3f} to {interval.high:.3f}, {len(ratios)} batches)"
        )


if __name__ == "__main__":
    main()
