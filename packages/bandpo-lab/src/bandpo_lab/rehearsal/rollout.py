"""A rollout backend for verl that generates with `transformers`, for models small enough for a CPU."""

import json
import os
from collections import Counter
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import torch
from torch.distributed.tensor import DTensor
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from bandpo_lab.rehearsal.files import ANSWERS, FOLDER, RUN, SAMPLES, SYNCS, WEIGHTS
from bandpo_lab.rehearsal.samples import Sample, log_probs


class TransformersServer:
    """The inference server of one replica, which answers one request at a time.

    It starts from random weights, as vLLM does under `load_format=dummy`, so its probabilities equal the trainer's only
    if the weight sync works. Every second request for a prompt with a known answer returns that answer in place of a
    sample, so that each group has right and wrong responses.
    """

    def __init__(
        self, model: str, prompt_length: int, response_length: int, seed: int, logprobs_mode: str | None
    ):
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.prompt_length = prompt_length
        self.response_length = response_length
        self.logprobs_mode = logprobs_mode
        hf_config = AutoConfig.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.version = 0
        self.requests: Counter[str] = Counter()
        self.folder = Path(os.environ[FOLDER])
        self.answers: dict[str, str] = json.loads((self.folder / ANSWERS).read_text(encoding="utf-8"))

    def load_weights(self, weights: dict[str, torch.Tensor], version: int) -> None:
        """Load the trainer's weights, and write them to a file.

        Raises:
            KeyError: A parameter of the model is not among them.
        """
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or ())
        missing = set(dict(self.model.named_parameters())) - set(weights) - tied
        if missing:
            raise KeyError(f"weight sync sent no value for {sorted(missing)}")
        self.model.load_state_dict(weights, strict=False)
        self.version = version
        path = self.folder / WEIGHTS.format(version)
        unfinished = path.with_suffix(f".{os.getpid()}")
        torch.save(self.model.state_dict(), unfinished)
        unfinished.rename(path)
        with open(self.folder / SYNCS, "a", encoding="utf-8") as file:
            norms = [weight.double().abs().sum().item() for weight in weights.values()]
            checksum = sum(norms)
            print(json.dumps({"version": version, "checksum": checksum}), file=file)

    def _planted_answer(self, prompt: str) -> str | None:
        """Return the known answer for every second request of a prompt, else None."""
        question = next((q for q in self.answers if q in prompt), None)
        if question is None:
            return None
        self.requests[question] += 1
        return self.answers[question] if self.requests[question] % 2 else None

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> TokenOutput:
        """Return one response. verl's client sends further arguments, which text does not need."""
        with torch.inference_mode():
            return self._generate(list(prompt_ids), sampling_params)

    def _generate(self, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        """Return a planted answer or a sample, with its log-probabilities."""
        prompt = torch.tensor([prompt_ids])
        max_tokens = min(
            sampling_params.get("max_tokens", self.response_length),
            self.prompt_length + self.response_length - len(prompt_ids),
        )
        answer = self._planted_answer(self.tokenizer.decode(prompt[0]))
        if answer is None:
            response = self._sample(prompt, max_tokens, sampling_params)
        else:
            tokens = self.tokenizer.encode(answer, add_special_tokens=False)
            response = [*tokens, self.tokenizer.eos_token_id][:max_tokens]

        # One forward pass over prompt and response gives the log-probabilities of samples and planted answers alike.
        is_raw = self.logprobs_mode == "raw_logprobs"
        temperature = 1.0 if is_raw else sampling_params.get("temperature", 1.0) or 1.0
        logp = log_probs(self.model, prompt_ids, response, temperature).tolist()
        with open(self.folder / SAMPLES.format(os.environ[RUN]), "a", encoding="utf-8") as file:
            print(
                json.dumps(asdict(Sample(self.version, prompt_ids, response, temperature, logp))), file=file
            )
        return TokenOutput(
            token_ids=response,
            # None unless verl requests them by calculate_log_probs, as with vLLM.
            log_probs=logp if sampling_params.get("logprobs") else None,
            stop_reason="completed",
            extra_fields={"global_steps": self.version},
        )

    def _sample(self, prompt: torch.Tensor, max_tokens: int, sampling_params: dict[str, Any]) -> list[int]:
        """Generate the tokens of one response to a prompt of shape (1, tokens)."""
        temperature = sampling_params.get("temperature", 1.0)
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature:
            sampling = {
                "do_sample": True,
                "temperature": temperature,
                "top_p": sampling_params.get("top_p", 1.0),
                "top_k": max(sampling_params.get("top_k", 0), 0),
            }
        output = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            **sampling,
        )
        return output[0, prompt.shape[1] :].tolist()

    async def idle(self, **_: Any) -> None:
        """Do nothing: there is no cache to free and no engine to wake."""

    wake_up = sleep = abort_all_requests = resume_generation = idle
    clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = idle


def server_name(replica_rank: int) -> str:
    """Return the name of the Ray actor that serves replica `replica_rank`."""
    return f"transformers_server_{replica_rank}"


class TransformersReplica(RolloutReplica):
    """A replica whose server is a named Ray actor."""

    async def launch_servers(self) -> None:
        server = ray.remote(num_cpus=0)(TransformersServer)
        options = {"name": server_name(self.replica_rank), "max_concurrency": self.max_concurrency}
        self._server_handle: Any = server.options(**options).remote(
            self.model_config.path,
            self.config.prompt_length,
            self.config.response_length,
            self.config.seed,
            self.config.logprobs_mode,
        )
        self.servers = [self._server_handle]
        self._server_address = server_name(self.replica_rank)


class TransformersRollout(BaseRollout):
    """The side of the rollout that sends the weights to a server: in the trainer, or in a worker that receives them.

    Args:
        replica_rank: The rank of the server's replica; None in a trainer, which has one replica per rank.
    """

    is_leader_rank = True

    def __init__(self, *arguments: Any, replica_rank: int | None = None, **named: Any):
        super().__init__(*arguments, **named)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank is None else replica_rank

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        """Send all weights to the server."""
        # The generator gathers sharded parameters by collective calls, so every rank has to exhaust it.
        full_weights = {}
        async for name, weight in ensure_async_iterator(weights):
            full_weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
            full_weights[name] = full_weight.detach().float()
        server: Any = ray.get_actor(server_name(self.replica_rank))
        await server.load_weights.remote(full_weights, global_steps)
