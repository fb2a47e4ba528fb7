"""Completions from an OpenAI-compatible server."""

import os
import re
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bandpo.errors import InvalidValue
from bandpo_lab.evals.generate import REFUSED, Completion, GenerationError, Prompt, Sampling

if TYPE_CHECKING:
    import httpx

TIMEOUT = 1800.0
"""Seconds one request may take."""
UNKNOWN = (401, 403, 404, 405)
"""Statuses that say that the server does not know the key, the model or the address: no request would do better."""


class ServerSampler:
    """An OpenAI-compatible server: vLLM, SGLang, ``transformers serve``, llama.cpp, or a hosted one.

    Messages go to ``/chat/completions`` and text to ``/completions``. A request that fails to get through, or
    meets status 429 or 5xx, is tried again after 1, 2, 4 … seconds; then the stream ends with an error, after
    every completion that did arrive. One that the server refuses, such as a prompt that is too long, is a completion
    without text. A key, where one is needed, is read from ``OPENAI_API_KEY``.

    Args:
        url: Up to and including the version, such as ``http://localhost:8000/v1``.
        sampling: Each completion has its own seed, for servers that honour one.
        concurrency: Requests in flight.
    """

    def __init__(
        self, url: str, model: str, sampling: Sampling, *, concurrency: int = 32, attempts: int = 6
    ) -> None:
        try:
            valid = urlsplit(url).port != 0 and re.match(r"https?://[\w.\[]", url) and url.isprintable()
        except ValueError:  # the port, or a bracket
            valid = False
        if not valid:
            raise InvalidValue(f"server {url!r} must be an address such as http://localhost:8000/v1")
        self.url, self.model, self.sampling = url.rstrip("/"), model, sampling
        self.concurrency, self.attempts = concurrency, attempts

    def stream(self, prompts: Sequence[Prompt], missing: Collection[int]) -> Iterator[tuple[int, Completion]]:
        """See `Sampler.stream`."""
        import httpx

        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        failure: GenerationError | None = None
        stopped = threading.Event()
        executor = ThreadPoolExecutor(self.concurrency)
        with httpx.Client(timeout=TIMEOUT, headers=headers) as client:
            futures: dict[Future[Completion], int] = {
                executor.submit(self._ask, client, stopped, prompts[i], self.sampling.seed_of(i)): i
                for i in sorted(missing)
            }
            try:
                for future in as_completed(futures):
                    try:
                        completion = future.result()
                    except GenerationError as error:
                        # Requests in flight may still succeed; those not yet sent would fail the same way.
                        failure = failure or error
                        stopped.set()
                        continue
                    yield futures[future], completion
            finally:
                stopped.set()
                executor.shutdown(cancel_futures=True)
        if failure is not None:
            raise failure

    def _ask(self, client: "httpx.Client", stopped: threading.Event, prompt: Prompt, seed: int) -> Completion:
        import httpx

        chat = not isinstance(prompt, str)
        body = {
            "model": self.model,
            "messages" if chat else "prompt": [dict(m) for m in prompt] if chat else prompt,
            "max_tokens": self.sampling.max_new_tokens,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "seed": seed,
        }
        url = f"{self.url}/chat/completions" if chat else f"{self.url}/completions"
        problem = "not tried"
        for attempt in range(self.attempts):
            if stopped.wait(2 ** (attempt - 1) if attempt else 0):
                break
            try:
                response = client.post(url, json=body)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if response.status_code == 429 or response.status_code >= 500:
                problem = f"status {response.status_code}: {response.text[:500]}"
                continue
            if response.status_code >= 400 and response.status_code not in UNKNOWN:
                return Completion("", f"{REFUSED}, {response.status_code}: {response.text[:500]}", None)
            if response.status_code >= 400:
                raise GenerationError(
                    f"{url} refused the request, {response.status_code}: {response.text[:500]}"
                )
            return _parse(url, response, chat)
        raise GenerationError(f"{url} did not answer in {self.attempts} attempts; the last: {problem}")


def _parse(url: str, response: "httpx.Response", chat: bool) -> Completion:
    try:
        answer = response.json()
        choice = answer["choices"][0]
        text = choice["message"]["content"] if chat else choice["text"]
        tokens = (answer.get("usage") or {}).get("completion_tokens")
        return Completion(text or "", choice["finish_reason"] or "unknown", tokens)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise GenerationError(
            f"{url} answered in a form that is not OpenAI's: {response.text[:500]}"
        ) from error
