"""Generate completions with an OpenAI-compatible server."""

import os
import re
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bandpo_lab.errors import InvalidValue
from bandpo_lab.evals.generate import REFUSED, Completion, GenerationError, Prompt, Sampling

if TYPE_CHECKING:
    import httpx

TIMEOUT = 1800.0
"""The time limit of one request, in seconds."""
FATAL_STATUSES = (401, 403, 404, 405)
"""Statuses for an unknown key, model or address, with which every other request would fail as well."""


class ServerSampler:
    """A sampler that uses an OpenAI-compatible server: vLLM, SGLang, ``transformers serve``, llama.cpp or a hosted one.

    Messages are sent to ``/chat/completions`` and texts to ``/completions``. A request is repeated after 1, 2, 4 …
    seconds if the connection fails or the status is 429 or 5xx. If all attempts fail, the stream ends with an error,
    after all completions that arrived. If the server refuses a request, for example because the prompt is too long, the
    completion has no text. The API key, if needed, is read from ``OPENAI_API_KEY``.

    Args:
        url: The address up to and including the version, such as ``http://localhost:8000/v1``.
        model: The name of the model on the server.
        sampling: The settings of sampling. Each completion has its own seed, for servers that use seeds.
        concurrency: The number of simultaneous requests.
        attempts: The number of attempts for each request.

    Raises:
        ValueError: The address is not valid.
    """

    def __init__(
        self, url: str, model: str, sampling: Sampling, *, concurrency: int = 32, attempts: int = 6
    ) -> None:
        try:
            is_valid = urlsplit(url).port != 0 and re.match(r"https?://[\w.\[]", url) and url.isprintable()
        except ValueError:  # a wrong port or bracket
            is_valid = False
        if not is_valid:
            raise InvalidValue(f"server {url!r} must be an address such as http://localhost:8000/v1")
        self.url = url.rstrip("/")
        self.model = model
        self.sampling = sampling
        self.concurrency = concurrency
        self.attempts = attempts

    def stream(self, prompts: Sequence[Prompt], missing: Collection[int]) -> Iterator[tuple[int, Completion]]:
        """Yield ``(position, completion)`` for each missing position, as requests succeed.

        After a request has failed for good, no further requests are sent. The completions of requests that were sent
        already are yielded first, and then the error is raised.

        Args:
            prompts: All prompts of the job; a prompt that is sampled n times is in it n times.
            missing: The positions in `prompts` that have no completion yet.

        Raises:
            GenerationError: A request has failed.
        """
        import httpx

        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        failure: GenerationError | None = None
        stopped = threading.Event()
        executor = ThreadPoolExecutor(self.concurrency)
        with httpx.Client(timeout=TIMEOUT, headers=headers) as client:
            futures: dict[Future[Completion], int] = {
                executor.submit(self._request, client, stopped, prompts[i], self.sampling.seed_of(i)): i
                for i in sorted(missing)
            }
            try:
                for future in as_completed(futures):
                    try:
                        completion = future.result()
                    except GenerationError as error:
                        # Requests in flight may still succeed; requests not yet sent would fail in the same way.
                        failure = failure or error
                        stopped.set()
                        continue
                    yield futures[future], completion
            finally:
                stopped.set()
                executor.shutdown(cancel_futures=True)
        if failure is not None:
            raise failure

    def _request(
        self, client: "httpx.Client", stopped: threading.Event, prompt: Prompt, seed: int
    ) -> Completion:
        """Request one completion, with several attempts.

        Raises:
            GenerationError: All attempts failed, other requests failed meanwhile, or the server does not know the key,
                the model or the address.
        """
        import httpx

        body = {
            "model": self.model,
            "max_tokens": self.sampling.max_new_tokens,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "seed": seed,
        }
        is_chat = not isinstance(prompt, str)
        if is_chat:
            url = f"{self.url}/chat/completions"
            body["messages"] = [dict(message) for message in prompt]
        else:
            url = f"{self.url}/completions"
            body["prompt"] = prompt
        problem = "not tried"
        for attempt in range(self.attempts):
            delay = 2 ** (attempt - 1) if attempt else 0
            if stopped.wait(delay):
                break
            try:
                response = client.post(url, json=body)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            # Too many requests, or a problem of the server: try again.
            if response.status_code == 429 or response.status_code >= 500:
                problem = f"status {response.status_code}: {response.text[:500]}"
                continue
            if response.status_code in FATAL_STATUSES:
                raise GenerationError(
                    f"{url} refused the request, {response.status_code}: {response.text[:500]}"
                )
            if response.status_code >= 400:
                return Completion("", f"{REFUSED}, {response.status_code}: {response.text[:500]}", None)
            return _parse(url, response, is_chat)
        raise GenerationError(f"{url} did not answer in {self.attempts} attempts; the last: {problem}")


def _parse(url: str, response: "httpx.Response", is_chat: bool) -> Completion:
    """Return the completion in a response of ``/chat/completions`` or ``/completions``."""
    try:
        content = response.json()
        choice = content["choices"][0]
        text = choice["message"]["content"] if is_chat else choice["text"]
        tokens = (content.get("usage") or {}).get("completion_tokens")
        return Completion(text or "", choice["finish_reason"] or "unknown", tokens)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise GenerationError(
            f"{url} answered in a form that is not OpenAI's: {response.text[:500]}"
        ) from error
