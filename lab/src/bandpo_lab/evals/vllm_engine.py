"""Completions from vLLM in this process."""

from collections.abc import Collection, Iterator, Sequence

from bandpo.errors import MissingPackage
from bandpo_lab.evals.generate import Completion, Prompt, Sampling, all_ids


class VLLMSampler:
    """vLLM in this process. Each completion has its own seed.

    Results arrive in groups of the batch size. A chat template takes the place of the model's own.

    Raises:
        ImportError: vLLM is not installed.
    """

    def __init__(
        self, model: str, sampling: Sampling, *, batch_size: int = 1024, chat_template: str | None = None
    ) -> None:
        try:
            from vllm import LLM  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingPackage("the vLLM generator needs vLLM: pip install vllm") from error
        self.sampling, self.batch_size = sampling, batch_size
        # "vllm": its neutral settings rather than those of the model's generation_config.json.
        self._llm = LLM(model=model, seed=sampling.seed, generation_config="vllm")
        self._tokenizer = self._llm.get_tokenizer()
        if chat_template is not None:
            self._tokenizer.chat_template = chat_template

    def stream(self, prompts: Sequence[Prompt], missing: Collection[int]) -> Iterator[tuple[int, Completion]]:
        """See `Sampler.stream`."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        ids = all_ids(self._tokenizer, prompts)
        positions = sorted(missing)
        for start in range(0, len(positions), self.batch_size):
            batch = positions[start : start + self.batch_size]
            outputs = self._llm.generate(
                [{"prompt_token_ids": ids[i]} for i in batch],
                [
                    SamplingParams(
                        max_tokens=self.sampling.max_new_tokens,
                        temperature=self.sampling.temperature,
                        top_p=self.sampling.top_p,
                        seed=self.sampling.seed_of(i),
                    )
                    for i in batch
                ],
                use_tqdm=False,
            )
            for i, output in zip(batch, outputs, strict=True):
                written = output.outputs[0]
                yield i, Completion(written.text, written.finish_reason, len(written.token_ids))
