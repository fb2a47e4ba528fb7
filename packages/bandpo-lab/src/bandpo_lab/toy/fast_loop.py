"""A small loop of reinforcement learning: one process trains a network of 335k parameters with one method in seconds.

It is plain torch, to be read from top to bottom: the settings, the tasks, the network, sampling, the update, and the
run with its log and its checkpoints. Runs with the same seed have the same problems and the same random numbers,
whatever their method.

>>> run = train(Settings("FixedClip(0.2)", lag=0, batches=2), None)
>>> len(run.log), sorted(run.scores)
(2, ['pass@1', 'pass@32', 'pass@8', 'seconds'])
"""

from __future__ import annotations

import json
import shlex
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch.nn import functional

import rlvet
from bandpo.audit.closing_lines import COMPARED, describe_rare_winners, short_name
from bandpo.audit.metrics import COUNTERFACTUALS, Audit, logged
from bandpo.core.aggregation import canonical_aggregation
from bandpo.core.batch import Batch as TokenBatch
from bandpo.core.methods import Method
from bandpo.core.rule_check import check
from bandpo.core.schedules import TrainingState
from bandpo.core.text import as_method, importable_current_folder
from bandpo_lab.errors import InvalidValue, RunProblem
from bandpo_lab.evals.metrics import pass_at_k
from bandpo_lab.files.writing import locked, replacing
from bandpo_lab.tasks import multiplication
from bandpo_lab.tasks.multiplication import DIRECT, EOS, MAX_COMPLETION_LENGTH, PAD, SCRATCHPAD, Product

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

BETAS = (0.9, 0.99)
"""The decay rates of Adam's moments."""
MAX_GRAD_NORM = 1.0
"""The norm to which the gradient of an update is clipped."""
STD_EPSILON = 1e-4
"""The constant that TRL adds to the standard deviation of a group's rewards."""
HELD_OUT_SAMPLES = 32
"""The number of answers to each held-out problem."""
PASS_AT = (1, 8, 32)
"""The numbers of answers k of the scores pass@k on held-out problems."""
SHORT = 6
"""The number of tokens up to which an answer is computed apart from longer ones."""
LOG = "metrics.jsonl"
"""The file of a run's folder with a line of metrics for each batch, which `rlvet diagnose` reads."""
SETTINGS = "settings.json"
"""The file of a run's folder with its settings."""
CHECKPOINT = "checkpoint.pt"
"""The file of a run's folder with the state from which it is resumed."""
SCORES = "scores.json"
"""The file of a run's folder with its scores, which is written when the run has ended."""


# The settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The settings of a run.

    A batch has ``prompts * samples`` answers and is trained on ``lag`` batches after it was sampled. It is then used
    ``epochs`` times, each time in ``minibatches`` updates of the optimizer. The last ``lag`` batches are not used.

    Raises:
        ValueError: A number is out of its range, or there is no task of that name.
    """

    method: str
    """The text of a method or a clip rule."""
    task: str = "multiplication"
    """The name of a task in `TASKS`."""
    lag: int = 4
    """The age of the data in batches, as in asynchronous training; 0 for fresh data."""
    epochs: int = 1
    """The number of times that each answer is used."""
    minibatches: int = 4
    """The number of updates in each epoch."""
    rate: float = 2e-4
    """Adam's learning rate, which is constant."""
    batches: int = 80
    """The number of batches that are sampled."""
    seed: int = 0
    """The seed of the problems, of the sampling and of the order of answers in an epoch."""
    prompts: int = 8
    """The number of problems of a batch."""
    samples: int = 16
    """The number of answers to each problem, which are a group."""
    held_out: int = 32
    """The number of held-out problems, each with `HELD_OUT_SAMPLES` answers."""
    eval_every: int = 0
    """The number of batches between two evaluations on held-out problems; 0 for one at the end only."""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise InvalidValue(f"task={self.task!r}: choose one of {', '.join(TASKS)}")
        for name in ("epochs", "minibatches", "batches", "prompts", "held_out"):
            if getattr(self, name) < 1:
                raise InvalidValue(f"{name}={getattr(self, name)}: choose at least 1")
        for name in ("lag", "eval_every", "seed"):
            if getattr(self, name) < 0:
                raise InvalidValue(f"{name}={getattr(self, name)}: choose at least 0")
        if self.lag >= self.batches:
            raise InvalidValue(
                f"lag={self.lag} with batches={self.batches}: no batch would be trained on; choose more batches"
            )
        if self.samples < 2:
            raise InvalidValue(f"samples={self.samples}: a group needs at least 2 answers")
        if self.minibatches > self.prompts * self.samples:
            raise InvalidValue(
                f"minibatches={self.minibatches}: choose at most {self.prompts * self.samples}, the answers of a batch"
            )
        if not 0 < self.rate < 1:
            raise InvalidValue(f"rate={self.rate:g}: choose a learning rate between 0 and 1")


# The tasks ------------------------------------------------------------------------------------------------------------

Reward = Callable[[Sequence[str], Sequence[Product], torch.Generator], "list[float]"]
"""A function from answers, their problems and a source of random numbers to rewards."""


def reward_product(answers: Sequence[str], problems: Sequence[Product], luck: torch.Generator) -> list[float]:
    """Return 1 for an answer with the right product, direct or after a scratchpad, and 0 for others."""
    return multiplication.reward(answers, [problem.answer for problem in problems])


def reward_direct_product(
    answers: Sequence[str], problems: Sequence[Product], luck: torch.Generator
) -> list[float]:
    """Return 1 for a direct answer with the right product, and 0 for others."""
    right_answers = [DIRECT + problem.answer for problem in problems]
    return [float(answer == right) for answer, right in zip(answers, right_answers, strict=True)]


def reward_at_random(
    answers: Sequence[str], problems: Sequence[Product], luck: torch.Generator
) -> list[float]:
    """Return 1 or 0 with probability one half each, whatever the answer is."""
    return torch.randint(2, (len(answers),), generator=luck).tolist()


TASKS: Mapping[str, Reward] = {
    "multiplication": reward_product,
    "mental": reward_direct_product,
    "random": reward_at_random,
}
"""The tasks by name. All begin with the model of `bandpo_lab.tasks.multiplication` and have its problems.

- ``multiplication``: the embedded task. A rare first token opens a scratchpad, after which the model is nearly always
  right.
- ``mental``: only direct answers count, of which 5 % are right at the start. Much stays unsolved after training.
- ``random``: the reward is a coin, so that nothing can be learned. What changes is what the method does by itself.
"""


# The network ----------------------------------------------------------------------------------------------------------

ALPHABET = (PAD, EOS, *"0123456789*+=;>", DIRECT, SCRATCHPAD, "\n")
"""The tokens by index; each is one character, except for the first two."""
PAD_ID = ALPHABET.index(PAD)
EOS_ID = ALPHABET.index(EOS)
SCRATCHPAD_ID = ALPHABET.index(SCRATCHPAD)


class Network:
    """The Qwen2 model of the task, in plain torch; it computes what transformers' class does.

    Args:
        folder: The folder with the weights and the configuration.
    """

    def __init__(self, folder: Path):
        self.weights = {
            name: weight.requires_grad_() for name, weight in load_file(folder / "model.safetensors").items()
        }
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.width: int = config["hidden_size"]
        self.epsilon: float = config["rms_norm_eps"]
        self.theta: float = config["rope_parameters"]["rope_theta"]

    def new_cache(self, rows: int, length: int) -> Float[Tensor, "layers 2 rows heads length size"]:
        """Return an empty cache of keys and values for ``rows`` sequences of at most ``length`` tokens."""
        return torch.empty(self.layers, 2, rows, self.heads, length, self.width // self.heads)

    def logits(
        self, ids: Int[Tensor, "rows time"], cache: Tensor | None = None, cached: int = 0
    ) -> Float[Tensor, "rows time vocabulary"]:
        """Compute the logits of the token after each token.

        Args:
            ids: The tokens. If there is a cache, they follow those that it holds.
            cache: Keys and values of earlier tokens, to which those of ``ids`` are added.
            cached: The number of tokens that the cache holds.
        """
        embedding = self.weights["model.embed_tokens.weight"]
        rotation = self._rotation(cached, ids.shape[1])
        x = functional.embedding(ids, embedding)
        for depth in range(self.layers):
            name = f"model.layers.{depth}"
            layer_cache = None if cache is None else cache[depth]
            y = self._norm(x, f"{name}.input_layernorm")
            x = x + self._attention(y, name, rotation, layer_cache, cached)
            y = self._norm(x, f"{name}.post_attention_layernorm")
            x = x + self._feed_forward(y, name)
        return functional.linear(self._norm(x, "model.norm"), embedding)

    def _rotation(self, start: int, time: int) -> Float[Tensor, "2 time size"]:
        """Return the cosine and the sine by which keys and queries at each position are rotated."""
        size = self.width // self.heads
        frequencies = self.theta ** -(torch.arange(0, size, 2) / size)
        angles = torch.arange(start, start + time)[:, None] * frequencies
        angles = torch.cat([angles, angles], -1)
        return torch.stack([angles.cos(), angles.sin()])

    def _attention(
        self, x: Tensor, name: str, rotation: Tensor, cache: Tensor | None, cached: int
    ) -> Float[Tensor, "rows time width"]:
        rows, time, _ = x.shape
        query, key, value = (
            self._linear(x, f"{name}.self_attn.{part}_proj").view(rows, time, self.heads, -1).transpose(1, 2)
            for part in "qkv"
        )
        query = _rotate(query, rotation)
        key = _rotate(key, rotation)
        if cache is not None:
            cache[0, :, :, cached : cached + time] = key
            cache[1, :, :, cached : cached + time] = value
            key, value = cache[:, :, :, : cached + time]
        # A single new token attends to all before it, so only several new tokens need the causal mask.
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=time > 1)
        return self._linear(mixed.transpose(1, 2).flatten(2), f"{name}.self_attn.o_proj")

    def _feed_forward(self, x: Tensor, name: str) -> Float[Tensor, "rows time width"]:
        gate = functional.silu(self._linear(x, f"{name}.mlp.gate_proj"))
        return self._linear(gate * self._linear(x, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, (self.width,), self.weights[f"{name}.weight"], self.epsilon)


def _rotate(x: Float[Tensor, "rows heads time size"], rotation: Float[Tensor, "2 time size"]) -> Tensor:
    """Rotate keys or queries by the angles of their positions."""
    cosine, sine = rotation
    left, right = x.chunk(2, -1)
    return x * cosine + torch.cat([-right, left], -1) * sine


# Sampling -------------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """The answers of a batch, or of a minibatch."""

    prompts: Int[Tensor, "answers prompt"]
    tokens: Int[Tensor, "answers time"]
    mask: Float[Tensor, "answers time"]
    """1 for a token of the answer, which ends with its end token; 0 for padding."""
    logp: Float[Tensor, "answers time"]
    """The log-probabilities (nats) of the tokens under the policy that sampled them."""
    entropy: Float[Tensor, "answers time"]
    """The entropy (nats) of that policy at each token."""
    rewards: Float[Tensor, " answers"]
    advantages: Float[Tensor, " answers"]
    group: Int[Tensor, " answers"]
    """The index of the answer's problem in the batch."""
    version: Int[Tensor, " answers"]
    """The number of updates that the policy had made when it sampled the answer."""

    def select(self, rows: Int[Tensor, " rows"]) -> Batch:
        """Return the answers of these rows."""
        return Batch(*(tensor[rows] for tensor in self))


@torch.no_grad()
def sample(
    network: Network,
    problems: Sequence[Product],
    samples: int,
    reward: Reward,
    numbers: torch.Generator,
    luck: torch.Generator,
    version: int = 0,
) -> Batch:
    """Sample answers at temperature 1, and compute their rewards and GRPO's advantages.

    Args:
        network: The policy.
        problems: The problems, with prompts of one length.
        samples: The number of answers to each problem.
        reward: The reward.
        numbers: The random numbers, of which the same are used for each policy: one for each token up to the maximal
            length.
        luck: The random numbers for the reward.
        version: The number of updates that the policy has made.
    """
    repeated = [problem for problem in problems for _ in range(samples)]
    prompts = torch.tensor([[ALPHABET.index(character) for character in p.prompt] for p in problems])
    rows = len(repeated)
    prompt_length = prompts.shape[1]
    chances = torch.rand(rows, MAX_COMPLETION_LENGTH, generator=numbers)
    tokens = torch.full(chances.shape, PAD_ID)
    mask = torch.zeros(chances.shape)
    logp = torch.zeros(chances.shape)
    entropy = torch.zeros(chances.shape)

    # A prompt is computed once for all of its answers.
    cache = network.new_cache(len(problems), prompt_length + MAX_COMPLETION_LENGTH)
    logits = network.logits(prompts, cache)[:, -1].repeat_interleave(samples, 0)
    cache = cache.repeat_interleave(samples, 2)
    prompts = prompts.repeat_interleave(samples, 0)
    # The rows whose answer has not ended. Only these are in the cache.
    unfinished = torch.arange(rows)
    for time_step in range(MAX_COMPLETION_LENGTH):
        logp_all = logits.log_softmax(-1)
        # Invert the cumulative distribution. The last token is beyond the last edge.
        edges = logp_all.exp().cumsum(-1)[:, :-1].contiguous()
        token = torch.searchsorted(edges, chances[unfinished, time_step, None])
        tokens[unfinished, time_step] = token[:, 0]
        mask[unfinished, time_step] = 1.0
        logp[unfinished, time_step] = logp_all.gather(-1, token)[:, 0]
        entropy[unfinished, time_step] = -(logp_all.exp() * logp_all).sum(-1)
        goes_on = token[:, 0] != EOS_ID
        if time_step + 1 == MAX_COMPLETION_LENGTH or not goes_on.any():
            break
        if not goes_on.all():
            unfinished = unfinished[goes_on]
            token = token[goes_on]
            cache = cache[:, :, goes_on]
        logits = network.logits(token, cache, prompt_length + time_step)[:, -1]

    answers = ["".join(ALPHABET[index] for index in row if index > EOS_ID) for row in tokens.tolist()]
    rewards = torch.tensor(reward(answers, repeated, luck), dtype=torch.float32)
    group = torch.arange(len(problems)).repeat_interleave(samples)
    versions = torch.full_like(group, version)
    return Batch(
        prompts, tokens, mask, logp, entropy, rewards, group_advantages(rewards, samples), group, versions
    )


def group_advantages(rewards: Float[Tensor, " answers"], samples: int) -> Float[Tensor, " answers"]:
    """Compute GRPO's advantages: in each group, reward minus mean, divided by the standard deviation."""
    groups = rewards.view(-1, samples)
    centered = groups - groups.mean(1, keepdim=True)
    return (centered / (groups.std(1, keepdim=True) + STD_EPSILON)).flatten()


# The update -----------------------------------------------------------------------------------------------------------


def log_probabilities(
    network: Network, batch: Batch
) -> tuple[Float[Tensor, "answers time"], Float[Tensor, "answers time"]]:
    """Compute the log-probabilities of the tokens of a batch, with a gradient, and the entropy of the policy there.

    Both are in nats, and 0 in the padding. The time ends with the longest answer of the batch. Short answers are
    computed apart from long ones, so that less is computed for padding.
    """
    lengths = batch.mask.sum(1).long()
    longest = int(lengths.max())
    start = batch.prompts.shape[1] - 1
    logp_parts: list[Tensor] = []
    entropy_parts: list[Tensor] = []
    rows_of_parts = [(lengths <= SHORT).nonzero()[:, 0], (lengths > SHORT).nonzero()[:, 0]]
    for rows in rows_of_parts:
        if not len(rows):
            continue
        time_steps = int(lengths[rows].max())
        tokens = batch.tokens[rows, :time_steps]
        logits = network.logits(torch.cat([batch.prompts[rows], tokens], 1))[:, start:-1]
        logp_all = logits.log_softmax(-1)
        mask = batch.mask[rows, :time_steps]
        padding = (0, longest - time_steps)
        logp = logp_all.gather(-1, tokens[..., None])[..., 0] * mask
        entropy = -(logp_all.detach().exp() * logp_all.detach()).sum(-1) * mask
        logp_parts.append(functional.pad(logp, padding))
        entropy_parts.append(functional.pad(entropy, padding))
    order = torch.cat(rows_of_parts).argsort()
    return torch.cat(logp_parts)[order], torch.cat(entropy_parts)[order]


class UpdateResult(NamedTuple):
    """The result of an update."""

    audit: Audit
    grad_norm: float
    """The norm of the gradient before it was clipped."""


def update(
    network: Network, optimizer: torch.optim.Optimizer, batch: Batch, method: Method, state: TrainingState
) -> UpdateResult:
    """Make one update of the optimizer with the loss of a method.

    If the gradient is not finite, the parameters are left as they are.

    Args:
        network: The policy.
        optimizer: The optimizer.
        batch: The minibatch.
        method: The method. If it has no average of its own, its loss is averaged over tokens, then over answers.
        state: The training state that the method may depend on.
    """
    optimizer.zero_grad()
    logp, entropy = log_probabilities(network, batch)
    longest = logp.shape[1]
    tokens = TokenBatch.read(
        logp,
        batch.logp[:, :longest],
        batch.advantages,
        batch.mask[:, :longest],
        entropy=entropy,
        state=state,
    )
    aggregation = method.aggregation or "grpo"
    is_normalized = canonical_aggregation(aggregation) == "seq-mean-token-sum-norm"
    normalizer = MAX_COMPLETION_LENGTH if is_normalized else None
    loss, _ = method.loss(tokens, aggregation=aggregation, normalizer=normalizer)
    loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(network.weights.values(), MAX_GRAD_NORM)
    if grad_norm.isfinite():
        optimizer.step()
    compared = {rule: COUNTERFACTUALS[rule] for rule in COMPARED}
    audit = Audit.from_batch(tokens, method=method, counterfactuals=compared)
    return UpdateResult(audit, float(grad_norm))


# The run --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    settings: Settings
    log: Sequence[Mapping[str, float]]
    """The metrics of each batch."""
    scores: Mapping[str, float]
    """The final policy's pass@k on held-out problems, and the seconds of processor time of the whole run."""

    def curve(self, name: str) -> list[float]:
        """Return a metric by batch; NaN where it is not logged."""
        return [line.get(name, float("nan")) for line in self.log]


def train(settings: Settings, folder: Path | None, say: Callable[[str], None] | None = None) -> Run:
    """Train one run, or go on with it.

    With a folder, a run that was interrupted goes on from its last checkpoint, and gets the bits that it would have got
    without the interruption. A run that has ended is only read.

    Args:
        settings: The settings.
        folder: The folder for the log, the checkpoint and the scores; None to write nothing.
        say: A function that is called with a line of progress after each tenth of the batches.

    Raises:
        ValueError: The method cannot be read, or the loop does not have a quantity that it depends on.
        RunProblem: The folder has a run with other settings or of other versions.
        FileProblem: Another process is writing to the folder.
    """
    # The order of sums, and so the bits, would depend on the number of threads.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if folder is None:
            return Training(settings, None).run(say)
        folder.mkdir(parents=True, exist_ok=True)
        with nullcontext() if (folder / SCORES).exists() else locked(folder):
            check_folder(settings, folder)
            _write_settings(settings, folder)
            if (folder / SCORES).exists():
                return read_run(folder)
            return Training(settings, folder).run(say)
    finally:
        torch.set_num_threads(threads)


def check_method(settings: Settings) -> None:
    """Check a method by one small update, before a run is begun.

    Raises:
        ValueError: The method does not pass `bandpo.check`, or depends on a quantity that the loop does not have.
    """
    sizes = {"lag": 0, "epochs": 1, "minibatches": 1, "batches": 1, "prompts": 1, "samples": 2}
    training = Training(replace(settings, **sizes), None)
    check(training.method)
    training.train_batch()


def read_run(folder: Path) -> Run:
    """Read a run that has ended from its folder."""
    content = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    names = {field.name for field in fields(Settings)}
    settings = Settings(**{name: value for name, value in content.items() if name in names})
    log = [json.loads(line) for line in (folder / LOG).read_text(encoding="utf-8").splitlines()]
    return Run(settings, log, json.loads((folder / SCORES).read_text(encoding="utf-8")))


def check_folder(settings: Settings, folder: Path) -> None:
    """Check that a folder has no run, or one with the same settings and versions.

    Raises:
        RunProblem: A setting or a version differs; the message names it.
    """
    file = folder / SETTINGS
    if not file.exists():
        return
    content = _identity(settings)
    earlier = json.loads(file.read_text(encoding="utf-8"))
    differing = [name for name in content if earlier.get(name) != content[name]]
    if differing:
        changes = ", ".join(f"{name} {earlier.get(name)!r}, now {content[name]!r}" for name in differing)
        raise RunProblem(f"{folder} has a run with other settings: {changes}; choose another folder")


def _identity(settings: Settings) -> dict[str, Any]:
    """Return the settings of a run and the versions that it depends on."""
    # The version of rlvet is that of bandpo-lab too, as `bandpo_lab.__version__` says.
    return {**asdict(settings), "torch": torch.__version__, "bandpo-lab": rlvet.__version__}


def _write_settings(settings: Settings, folder: Path) -> None:
    """Write the settings of a new run; keep those of an earlier one."""
    file = folder / SETTINGS
    if not file.exists():
        with replacing(file) as unfinished:
            unfinished.write_text(json.dumps(_identity(settings), indent=1) + "\n", encoding="utf-8")


class Training:
    """The state of a run in training.

    Args:
        settings: The settings.
        folder: The folder of the run; None to write nothing.
    """

    def __init__(self, settings: Settings, folder: Path | None):
        self.settings = settings
        self.folder = folder
        with importable_current_folder():
            self.method = as_method(settings.method)
        self.reward = TASKS[settings.task]
        self.pool = multiplication.problems("train", 6480)
        self.network = Network(multiplication.base_model_path())
        self.optimizer = torch.optim.Adam(
            self.network.weights.values(), settings.rate, betas=BETAS, fused=True
        )
        self.numbers = torch.Generator().manual_seed(settings.seed)
        # Rewards have random numbers of their own, so that a task without chance has the same samples as one with it.
        self.luck = torch.Generator().manual_seed(settings.seed)
        self.waiting: deque[Batch] = deque()
        self.controller_state: dict[str, float] = {}
        self.updates = 0
        self.seconds = 0.0
        # Only of the batches since the process began, if a run is resumed.
        self.audit: Audit | None = None
        self.log: list[dict[str, float]] = []

    def run(self, say: Callable[[str], None] | None) -> Run:
        """Train the batches that are left, and compute the scores."""
        self._load()
        settings = self.settings
        tenth = max(1, self.settings.batches // 10)
        while len(self.log) < self.settings.batches:
            began = time.process_time()
            line = self.train_batch()
            if self.settings.eval_every and line["step"] % self.settings.eval_every == 0:
                line |= {f"eval/{name}": score for name, score in self._scores().items()}
            self.log.append(line)
            self.seconds += time.process_time() - began
            if len(self.log) % tenth == 0:
                self._save()
                if say:
                    reward = sum(line["reward"] for line in self.log[-tenth:]) / tenth
                    say(f"batch {len(self.log)} of {self.settings.batches}  reward {reward:.3f}")
        began = time.process_time()
        scores = self._scores()
        self.seconds += time.process_time() - began
        run = Run(self.settings, self.log, {**scores, "seconds": round(self.seconds, 1)})
        if self.folder:
            self._save()
            with replacing(self.folder / SCORES) as unfinished:
                unfinished.write_text(json.dumps(run.scores) + "\n", encoding="utf-8")
            (self.folder / CHECKPOINT).unlink()
        if say and self.audit is not None:
            for line in describe_rare_winners(
                self.audit, self.method, short_name(settings.method), self._data_age
            ):
                say(line)
            if self.folder:
                say(f"more: bandpo audit {shlex.quote(str(self.folder))}")
        return run

    @property
    def _data_age(self) -> str:
        """How old the data of an update are, in words."""
        settings = self.settings
        updates = settings.epochs * settings.minibatches
        served = "one update" if updates == 1 else f"{updates} updates"
        batches = "1 batch" if settings.lag == 1 else f"{settings.lag} batches"
        return f"each batch served {served}" + (f", {batches} after it was sampled" if settings.lag else "")

    def train_batch(self) -> dict[str, float]:
        """Sample a batch, make the updates with the one whose turn it is, and return the metrics."""
        settings = self.settings
        chosen = torch.randint(len(self.pool), (settings.prompts,), generator=self.numbers)
        problems = [self.pool[index] for index in chosen]
        batch = sample(
            self.network, problems, settings.samples, self.reward, self.numbers, self.luck, self.updates
        )
        answers = len(batch.rewards)
        orders = [torch.randperm(answers, generator=self.numbers) for _ in range(settings.epochs)]
        metrics = {"step": len(self.log) + 1, **_sampling_metrics(batch, settings.samples)}
        self.waiting.append(batch)
        if len(self.waiting) <= settings.lag:
            return metrics

        old_batch = self.waiting.popleft()
        progress = len(self.log) / settings.batches
        # Schedules and controllers have one value during a batch.
        method = self.method.resolve(TrainingState(progress, self.controller_state), strict=False)
        results: list[UpdateResult] = []
        for order in orders:
            for rows in order.chunk(settings.minibatches):
                part = old_batch.select(rows)
                age = (self.updates - part.version).float()
                state = TrainingState(progress, group=part.group, age=age)
                results.append(self.update(part, method, state))
                self.updates += 1
        audit = results[0].audit
        for result in results[1:]:
            audit = audit + result.audit
        self.audit = audit if self.audit is None else self.audit + audit
        audit_metrics = audit.metrics()
        self.controller_state = self.method.update_controllers(self.controller_state, audit_metrics)
        norms = [result.grad_norm for result in results]
        return metrics | {"grad_norm": sum(norms) / len(norms)} | logged(audit_metrics)

    def update(self, batch: Batch, method: Method, state: TrainingState) -> UpdateResult:
        """Make one update on a minibatch; a study overrides it to look at each."""
        return update(self.network, self.optimizer, batch, method, state)

    def _scores(self) -> dict[str, float]:
        """Compute pass@k on held-out problems, with the same random numbers each time."""
        batch = sample(
            self.network,
            multiplication.problems("eval", self.settings.held_out),
            HELD_OUT_SAMPLES,
            # Where rewards are random in training, what is measured is whether answers are still right.
            reward_product if self.reward is reward_at_random else self.reward,
            torch.Generator().manual_seed(0),
            torch.Generator().manual_seed(0),
        )
        rewards = batch.rewards.view(-1, HELD_OUT_SAMPLES)
        return {f"pass@{k}": round(float(pass_at_k(rewards, k).mean()), 5) for k in PASS_AT}

    def _save(self) -> None:
        """Write the log and a checkpoint."""
        if not self.folder:
            return
        with replacing(self.folder / LOG) as unfinished:
            unfinished.write_text("".join(json.dumps(line) + "\n" for line in self.log), encoding="utf-8")
        state = {
            "weights": {name: weight.detach() for name, weight in self.network.weights.items()},
            "optimizer": self.optimizer.state_dict(),
            "numbers": self.numbers.get_state(),
            "luck": self.luck.get_state(),
            "waiting": [tuple(batch) for batch in self.waiting],
            "controller_state": self.controller_state,
            "updates": self.updates,
            "seconds": self.seconds,
            "log": self.log,
        }
        with replacing(self.folder / CHECKPOINT) as unfinished:
            torch.save(state, unfinished)

    def _load(self) -> None:
        """Read the last checkpoint, if there is one."""
        if not self.folder or not (self.folder / CHECKPOINT).exists():
            return
        state: dict[str, Any] = torch.load(self.folder / CHECKPOINT, weights_only=True)
        with torch.no_grad():
            for name, weight in state["weights"].items():
                self.network.weights[name].copy_(weight)
        self.optimizer.load_state_dict(state["optimizer"])
        self.numbers.set_state(state["numbers"])
        self.luck.set_state(state["luck"])
        self.waiting = deque(Batch(*tensors) for tensors in state["waiting"])
        self.controller_state = state["controller_state"]
        self.updates = state["updates"]
        self.seconds = state["seconds"]
        self.log = state["log"]


def _sampling_metrics(batch: Batch, samples: int) -> dict[str, float]:
    """Return the metrics of a batch that was sampled, under the names that TRL gives them where it has them."""
    groups = batch.rewards.view(-1, samples)
    deviations = groups.std(1)
    return {
        "reward": float(groups.mean()),
        "reward_std": float(deviations.mean()),
        "frac_reward_zero_std": float((deviations == 0).float().mean()),
        "entropy": float(batch.entropy.sum() / batch.mask.sum()),
        "completions/mean_length": float(batch.mask.sum(1).mean()),
        "completions/clipped_ratio": float((batch.tokens != EOS_ID).all(1).float().mean()),
        "scratchpad": float((batch.tokens[:, 0] == SCRATCHPAD_ID).float().mean()),
    }
