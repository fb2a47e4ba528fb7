"""What Band adds to a TRL step: BandGRPOTrainer against GRPOTrainer on the embedded task.

    python benchmarks/trainer_step.py [--batches 60] [--model embedded|30M] [--batch-size 8] [--record]

The trainers start from the same weights and seed and make their updates in turn, one update each, so that a machine
whose speed drifts slows all of them. A batch is one generation, its scoring and 8 updates. Prints the median processor
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
    """Reads the clock when an optimiser step begins, and at the end of training.

    Args:
        device: Whose clock.
        pause: Called between two readings; the time that it takes is not counted.
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
    """Lets several threads run one at a time, in a fixed order, each with a random state of its own."""

    def __init__(self, threads):
        self.condition = threading.Condition()
        self.waiting = list(range(threads))

    def begin(self, thread):
        """Wait for the first turn of this thread."""
        with self.condition:
            self.condition.wait_for(lambda: self.waiting[0] == thread)

    def next(self, thread):
        """Let the other threads have their turns, and return when it is this thread's again."""
        random_state = torch.get_rng_state()
        with self.condition:
            self.waiting.append(self.waiting.pop(0))
            self.condition.notify_all()
            self.condition.wait_for(lambda: self.waiting[0] == thread)
        torch.set_rng_state(random_state)

    def end(self):
        """Leave the turns to the other threads."""
        with self.condition:
            self.waiting.pop(0)
            self.condition.notify_all()


def batches(arm, batches, *, make_model, reward, device="cpu", pause=lambda: None, **settings):
    """Seconds of each update, one list a batch; generation and scoring are part of a batch's first update."""
    trainer_class, config_class, own = ARMS[arm]
    settings = SETTINGS | settings
    per_batch = settings["steps_per_generation"] * settings["num_iterations"]
    clock = Clock(device, pause)
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
    return [clock.seconds[k : k + per_batch] for k in range(0, len(clock.seconds), per_batch)]


def interleaved(number, **arguments):
    """Seconds of each batch by each arm, whose updates are made in turn; the first batch warms up and is left out.

    Args:
        number: Of batches.
        **arguments: Of `batches`.
    """
    turns = Turns(len(ARMS))
    seconds = {}

    def train(thread, arm):
        turns.begin(thread)
        try:
            made = batches(arm, number + 1, pause=lambda: turns.next(thread), **arguments)
            seconds[arm] = [sum(updates) for updates in made[1:]]
        finally:
            turns.end()

    threads = [threading.Thread(target=train, args=pair) for pair in enumerate(ARMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seconds


def in_turn(rounds, number, **arguments):
    """Yields, after each round, all batches of all rounds so far: a dictionary of lists by arm.

    One trainer is in memory at a time. The first batch of each run warms up and is left out. Who begins changes from
    round to round.
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
    seconds = interleaved(options.batches, make_model=make_model, reward=varied, **settings)
    stock, *others = ARMS
    print(f"{stock}: {statistics.median(seconds[stock]):.4f} s a batch")
    for arm in others:
        ratios = np.divide(seconds[arm], seconds[stock])
        interval = scipy.stats.bootstrap((ratios,), np.median, rng=0).confidence_interval
        print(
            f"{arm}: {statistics.median(seconds[arm]):.4f} s a batch, ratio {np.median(ratios):.3f} "
            f"({interval.low:.3f} to {interval.high:.3f}, {len(ratios)} batches)"
        )


if __name__ == "__main__":
    main()
