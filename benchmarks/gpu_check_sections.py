"""The sections of `gpu_check.py`. Each yields rows. A case that cannot be measured yields a row with the reason."""

import time
import zlib
from functools import partial
from statistics import median

import torch

from measuring import compete, paired, peak_growth

ACCURACY = 1e-5  # the relative error of the margins that `ratio_bounds` promises in float32
NEEDS_CUDA, NO_TIME = "skipped: needs CUDA", "skipped: no time left"

# The shapes of SmolLM2-135M and of Qwen2.5-1.5B, and one for the tests.
MODELS = {
    "135M": (
        "LlamaConfig",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        },
    ),
    "1.5B": (
        "Qwen2Config",
        {
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
        },
    ),
    "tiny": (
        "Qwen2Config",
        {
            "vocab_size": 258,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
    ),
}


class Allowance:
    """The time limit of a section.

    Args:
        end: The end of the limit, by ``time.monotonic()``.
    """

    def __init__(self, end):
        self.end = end
        self._began = None
        self._slowest = 0.0

    def another(self):
        """Start another case; return False if one as slow as the slowest so far would exceed the limit."""
        moment = time.monotonic()
        if self._began is not None:
            self._slowest = max(self._slowest, moment - self._began)
        self._began = moment
        return moment + self._slowest < self.end


def accuracy(allowance, device, *, points, backend, mode, names=None):
    """Yield the worst relative errors of the margins, by divergence.

    Args:
        allowance: The time limit.
        device: The device of the solver.
        points: The number of points for each divergence and dtype.
        backend: The backend of torch.compile.
        mode: ``eager`` or ``compiled``.
        names: The divergences; all of the oracle's if not given.
    """
    import oracle
    from accuracy import worst_error
    from bandpo import ratio_bounds

    worst = 0.0
    for name in names or oracle.F:
        solve = ratio_bounds
        if mode == "compiled":
            torch._dynamo.reset()
            solve = torch.compile(ratio_bounds, backend=backend)
        for dtype in (torch.float32, torch.bfloat16):
            row = {"mode": mode, "divergence": name, "dtype": str(dtype)[6:]}
            if not allowance.another():
                yield row | {"skipped": NO_TIME}
                continue
            error, logp, radius = worst_error(name, dtype, points, device, solve)
            worst = max(worst, error)
            yield row | {"error": error, "logp": logp, "radius": radius}
    if not worst <= ACCURACY:
        raise AssertionError(f"a margin is off by {worst:.1e}, more than {ACCURACY:.0e}")


def bounds(allowance, device, *, shapes, backend):
    """Yield the device's and the host's times of bounds, and of a copy of the same number of bytes."""
    from device_time import bounds_contestants, rows

    yield from rows("bounds", bounds_contestants(backend), shapes, device, allowance.another)


def losses(allowance, device, *, shapes, backend):
    """Yield the device's and the host's times of losses, and of a copy of the same number of bytes."""
    from device_time import decision_rows, loss_contestants, rows

    yield from decision_rows(shapes[0], device, allowance.another)
    yield from rows("loss", loss_contestants(backend), shapes, device, allowance.another)


def habits(allowance, device, *, tokens, backend):
    """Check that losses do not synchronise, recompile, break CUDA graphs or allocate extra buffers."""
    import lean
    from speed import LOSSES, batch, compiled

    failed = []

    def outcome(check, needs_cuda, run):
        """Return the row of one check. ``run`` returns None or a measurement, and raises if the check fails."""
        if needs_cuda and device != "cuda":
            return check | {"found": NEEDS_CUDA}
        if not allowance.another():
            return check | {"found": NO_TIME}
        try:
            measurement = run()
        except Exception as error:
            failed.append(check)
            return check | {"failed": f"{type(error).__name__}: {error}"}
        return check | {"found": "holds" if measurement is None else measurement}

    def at_most_two_graphs(settings):
        graphs = lean.graphs_over_shapes(settings, device)
        if graphs > 2:
            raise AssertionError(f"{graphs} graphs for {len(lean.SHAPES)} shapes")
        return graphs

    settings_by_name = {
        ", ".join(f"{k}={v}" for k, v in settings.items()): settings for settings in lean.SETTINGS
    }
    for name, settings in settings_by_name.items():
        check = {"check": "no synchronisation", "of": name}
        yield outcome(check, True, partial(lean.run_without_synchronisation, settings))
        yield outcome({"check": "graphs", "of": name}, False, partial(at_most_two_graphs, settings))
    tensors = batch(tokens, device)
    for name, loss in LOSSES.items():
        check_equal = partial(check_compiled_equals_eager, loss, compiled(loss, backend), tensors)
        yield outcome({"check": "compiled equals eager", "of": name}, False, check_equal)
        for mode, run in ((name, loss), (f"{name}, compiled", compiled(loss, backend))):
            yield outcome({"check": "peak buffers", "of": mode}, True, partial(peak_buffers, run, tensors))
    # Last, because a capture that fails may leave the device unusable.
    for name, settings in settings_by_name.items():
        check = {"check": "CUDA graph", "of": name}
        yield outcome(check, True, partial(lean.replay_as_a_cuda_graph, settings))
    if failed:
        raise AssertionError(f"{len(failed)} checks failed: {failed}")


def check_compiled_equals_eager(loss, compiled, tensors):
    """Check that a compiled loss has the value and the gradient of the eager one.

    Raises:
        AssertionError: if they differ.
    """

    def value_and_gradient(run):
        logp = tensors[0].detach().requires_grad_()
        value = run(logp, *tensors[1:])[0]
        return value.detach(), *torch.autograd.grad(value, logp)

    value, gradient = value_and_gradient(compiled)
    expected, exact = value_and_gradient(loss)
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)  # the order of the sums differs
    # Rounding may put a ratio that is close to its bound on either side of it.
    torch.testing.assert_close(gradient, exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())


def peak_buffers(loss, tensors):
    """Return the peak memory of forward and backward, gradient included, in multiples of the size of ``logp``."""
    logp = tensors[0].detach().requires_grad_()

    def run():
        loss(logp, *tensors[1:])[0].backward()

    run()  # compiles
    logp.grad = None
    return peak_growth(run) / (logp.numel() * logp.element_size())


def reward(completion_ids, **_):
    """Return pseudo-random rewards that differ within each group, so that no advantage is 0."""
    return [zlib.crc32(str(ids).encode()) % 97 / 97 for ids in completion_ids]


def random_weights(model, device):
    """Return a model of one of the `MODELS` with random bfloat16 weights, created on the device."""
    import transformers

    config_class, shape = MODELS[model]
    shape = shape | {"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = getattr(transformers, config_class)(**shape)
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def batch_seconds(batches):
    """Return the seconds of each batch, from lists of the seconds of its updates."""
    return [sum(updates) for updates in batches]


def update_seconds(batches):
    """Return the seconds of each update but the first of a batch, which includes generation and scoring."""
    return [seconds for updates in batches for seconds in updates[1:]]


def peak_or_reason(run, device):
    return peak_growth(run) if device == "cuda" else NEEDS_CUDA


def trl_step(allowance, device, *, model, sequences, completion, rounds):
    """Yield the times of all trainers for batches of GRPO: generation, scoring and four updates in bfloat16."""
    from trainer_step import ARMS, batches, in_turn

    arguments = {
        "make_model": partial(random_weights, model, device),
        "reward": reward,
        "device": device,
        "per_device_train_batch_size": sequences,
        "num_generations": sequences,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "max_completion_length": completion,
        "generation_kwargs": {"min_new_tokens": completion},  # all batches are equally long
        # The audit is read once a batch.
        "logging_strategy": "steps",
        "logging_steps": 4,
    }
    peaks = {arm: peak_or_reason(partial(batches, arm, 1, **arguments), device) for arm in ARMS}
    allowance.another()
    for batches_so_far in in_turn(rounds, 3, **arguments):
        by_arm = batches_so_far
        if not allowance.another():
            break
    stock = by_arm["GRPOTrainer"]
    for arm, measured in by_arm.items():
        yield {
            "model": model,
            "parameters": random_weights(model, "meta").num_parameters(),
            "arm": arm,
            "seconds": median(batch_seconds(measured)),
            "batch": paired(batch_seconds(measured), batch_seconds(stock)),
            "update": paired(update_seconds(measured), update_seconds(stock)),
            "peak": peaks[arm],
        }


def head(allowance, device, *, vocabulary, tokens, width, rounds, compiled):
    """Yield time and memory of Band's loss from hidden states in bfloat16, by the variants of `linear_logp.py`."""
    from bandpo.core.errors import BandWarning
    from linear_logp import one_pass, variants

    for name, loss in variants(compiled, device).items():
        row = {"variant": name, "vocabulary": vocabulary, "tokens": tokens, "width": width}
        if not allowance.another():
            yield row | {"skipped": NO_TIME}
            continue
        run = one_pass(loss, vocabulary, tokens, width, device, torch.bfloat16)
        try:
            value, gradient = run()
        except BandWarning as warning:  # the kernels did not run, and the warning says why
            yield row | {"skipped": str(warning)}
            continue
        peak = peak_or_reason(run, device)
        yield row | {
            "seconds": compete({name: run}, device, rounds)[name],
            "peak": peak,
            "loss": value,
            "gradient": gradient,
        }
