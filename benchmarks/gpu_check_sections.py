"""What `gpu_check.py` measures. Each section yields rows; what it cannot measure on a device is a row that says so."""

import time
import zlib
from functools import partial
from statistics import median

import torch

from measuring import compete, paired, peak_growth

ACCURACY = 1e-5  # the relative error of the margins that `ratio_bounds` promises in float32
# float32, each tensor once. Bounds: read logp_old, write two bounds. Loss: forward reads logp, logp_old, advantages and
# mask, and writes the slope; backward reads the slope and writes the gradient.
BYTES_PER_TOKEN = {"bounds": 4 * 3, "loss": 4 * 7}
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
    """The time of a section: another piece is begun while one as slow as the slowest so far would still fit."""

    def __init__(self, end):
        self.end, self._began, self._slowest = end, None, 0.0

    def another(self):
        moment = time.monotonic()
        if self._began is not None:
            self._slowest = max(self._slowest, moment - self._began)
        self._began = moment
        return moment + self._slowest < self.end


def accuracy(allowance, device, *, points, backend, eager=None, compiled=None):
    """The margins' worst relative error, by divergence; all of the oracle's unless names are given."""
    import oracle
    from accuracy import worst_error
    from bandpo import ratio_bounds

    worst = 0.0
    for mode, names in (("eager", eager), ("compiled", compiled)):
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


def speed(allowance, device, *, tokens, copied, rounds, backend):
    """Bounds and losses beside the time in which a copy moves the bytes that they must move."""
    from speed import race

    source = torch.empty(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = compete({"copy": partial(target.copy_, source)}, device, rounds)["copy"]
    bandwidth = 2 * copied / seconds  # each byte is read and written
    yield {"what": "copy", "bytes": copied, "seconds": seconds, "bytes_per_second": bandwidth}
    for what in BYTES_PER_TOKEN:
        for number in tokens:
            if not allowance.another():
                yield {"what": what, "tokens": number, "skipped": NO_TIME}
                continue
            floor = BYTES_PER_TOKEN[what] * number / bandwidth
            for row, seconds, ratio in race(what, number, device, rounds, backend):
                yield row | {"seconds": seconds, "ratio": ratio, "of_copy": floor / seconds}


def habits(allowance, device, *, tokens, backend):
    """What a loss must not do: wait for the device, compile anew, break a CUDA graph, take spare buffers."""
    import lean
    from speed import LOSSES, batch, compiled

    failed = []

    def outcome(check, needs_cuda, run):
        """``run`` returns None or what it found; it raises where the check fails."""
        if needs_cuda and device != "cuda":
            return check | {"found": NEEDS_CUDA}
        if not allowance.another():
            return check | {"found": NO_TIME}
        try:
            found = run()
        except Exception as error:
            failed.append(check)
            return check | {"failed": f"{type(error).__name__}: {error}"}
        return check | {"found": "holds" if found is None else found}

    def at_most_two_graphs(settings):
        graphs = lean.graphs_over_shapes(settings, device)
        if graphs > 2:
            raise AssertionError(f"{graphs} graphs for {len(lean.SHAPES)} shapes")
        return graphs

    named = {", ".join(f"{k}={v}" for k, v in settings.items()): settings for settings in lean.SETTINGS}
    for name, settings in named.items():
        check = {"check": "no synchronisation", "of": name}
        yield outcome(check, True, partial(lean.run_without_synchronisation, settings))
        yield outcome({"check": "graphs", "of": name}, False, partial(at_most_two_graphs, settings))
    tensors = batch(tokens, device)
    for name, loss in LOSSES.items():
        same = partial(equal_compiled, loss, compiled(loss, backend), tensors)
        yield outcome({"check": "compiled equals eager", "of": name}, False, same)
        for mode, run in ((name, loss), (f"{name}, compiled", compiled(loss, backend))):
            yield outcome({"check": "peak buffers", "of": mode}, True, partial(peak_buffers, run, tensors))
    # Last, because a capture that fails may leave the device unusable.
    for name, settings in named.items():
        check = {"check": "CUDA graph", "of": name}
        yield outcome(check, True, partial(lean.replay_as_a_cuda_graph, settings))
    if failed:
        raise AssertionError(f"{len(failed)} checks failed: {failed}")


def equal_compiled(loss, compiled, tensors):
    """Raises where the compiled loss or its gradient is another."""

    def both(run):
        logp = tensors[0].detach().requires_grad_()
        value = run(logp, *tensors[1:])[0]
        return value.detach(), *torch.autograd.grad(value, logp)

    (value, gradient), (expected, exact) = both(compiled), both(loss)
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)  # a mean in another order
    # A ratio that is a rounding away from its bound may fall on either side of it.
    torch.testing.assert_close(gradient, exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())


def peak_buffers(loss, tensors):
    """Peak memory of forward and backward, the gradient included, in tensors of the tokens' size."""
    logp = tensors[0].detach().requires_grad_()

    def run():
        loss(logp, *tensors[1:])[0].backward()

    run()  # compiles
    logp.grad = None
    return peak_growth(run) / (logp.numel() * logp.element_size())


def reward(completion_ids, **_):
    """Differs within every group, so that no advantage is 0; random weights write nothing worth reading."""
    return [zlib.crc32(str(ids).encode()) % 97 / 97 for ids in completion_ids]


def random_weights(model, device):
    """A model of one of the shapes, in bfloat16; its weights are drawn where they will be used."""
    import transformers

    config_class, shape = MODELS[model]
    shape = shape | {"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = getattr(transformers, config_class)(**shape)
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def whole(found):
    """Seconds of each batch."""
    return [sum(updates) for updates in found]


def later_updates(found):
    """Seconds of each update but the batches' first, which generate and score too."""
    return [seconds for updates in found for seconds in updates[1:]]


def peak_or_reason(run, device):
    return peak_growth(run) if device == "cuda" else NEEDS_CUDA


def trl_step(allowance, device, *, model, sequences, completion, rounds):
    """A batch of GRPO (generation, scoring, four updates) on random weights in bfloat16, by all trainers in turn."""

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
    for so_far in in_turn(rounds, 3, **arguments):
        found = so_far
        if not allowance.another():
            break
    stock = found["GRPOTrainer"]
    for arm, own in found.items():
        yield {
            "model": model,
            "parameters": random_weights(model, "meta").num_parameters(),
            "arm": arm,
            "seconds": median(whole(own)),
            "batch": paired(whole(own), whole(stock)),
            "update": paired(later_updates(own), later_updates(stock)),
            "peak": peaks[arm],
        }


def head(allowance, device, *, vocabulary, tokens, width, rounds, compiled):
    """Band's loss from hidden states: full logits, `linear_logp`, and what else is installed, in bfloat16."""
    from linear_logp import one_pass, variants

    for name, loss in variants(compiled, device).items():
        row = {"variant": name, "vocabulary": vocabulary, "tokens": tokens, "width": width}
        if not allowance.another():
            yield row | {"skipped": NO_TIME}
            continue
        run = one_pass(loss, vocabulary, tokens, width, device, torch.bfloat16)
        value, gradient = run()
        peak = peak_or_reason(run, device)
        yield row | {
            "seconds": compete({name: run}, device, rounds)[name],
            "peak": peak,
            "loss": value,
            "gradient": gradient,
        }
