"""Alerts of what is found in a run: by wandb, by trackio, or by a web address that takes JSON, such as Slack's."""

from __future__ import annotations

import contextvars
import importlib
import importlib.util
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from bandpo.errors import InvalidValue, MissingPackage, did_you_mean

TRACKERS = ("wandb", "trackio")
"""Trackers that have alerts of their own."""

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
"""Hosts to which alerts may go without encryption."""

TIMEOUT = 10.0
"""Seconds after which an alert counts as failed and the run goes on."""

LONGEST_TITLE = 63
"""Characters that wandb takes as a title."""


class Alerts:
    """Ways to tell people of a finding.

    >>> Alerts([]).send("bandpo: nan", "the loss is NaN", is_grave=True)
    {}

    Args:
        names: ``wandb``, ``trackio``, or an address that begins with ``https://``. ``http://`` is for this machine.

    Raises:
        ValueError: if a name is another word, or an address is not encrypted.
        ImportError: if a tracker is not installed.
    """

    def __init__(self, names: Sequence[str] = ()):
        if isinstance(names, str):
            raise InvalidValue(
                f"alerts must be a list, got the text {_shown(names)!r}; write [{_shown(names)!r}]"
            )
        self._senders = [(_shown(name), _sender(name)) for name in names]

    def send(self, title: str, text: str, *, is_grave: bool) -> dict[str, str]:
        """Send an alert everywhere, and return what failed, by the name of the way.

        Args:
            title: A few words.
            text: What is wrong, and what to do.
            is_grave: Whether the run should be stopped.
        """
        failures: dict[str, str] = {}
        for name, send in self._senders:
            problem = _within_time(send, title[:LONGEST_TITLE], text, is_grave)
            if problem:
                failures[name] = problem
        return failures


def _shown(name: str) -> str:
    """Return a way without the part of an address that is secret."""
    address = urlsplit(name)
    return f"{address.scheme}://{address.hostname}" if "://" in name else name


def _sender(name: str) -> Callable[[str, str, bool], None]:
    """Return the function that sends by a way."""
    if name in TRACKERS:
        if importlib.util.find_spec(name) is None:
            raise MissingPackage(f"alerts={[name]} needs {name}: pip install {name}")
        return _send_by_wandb if name == "wandb" else _send_by_trackio
    if "://" not in name:
        raise InvalidValue(
            f"{name!r} is no way to send an alert{did_you_mean(name, TRACKERS)}; there are 'wandb', 'trackio' and an "
            "address such as 'https://hooks.slack.com/services/…'"
        )
    address = urlsplit(name)
    is_local = address.scheme == "http" and address.hostname in LOCAL_HOSTS
    if not address.hostname or not (address.scheme == "https" or is_local):
        raise InvalidValue(
            f"the address {_shown(name)} for alerts must begin with https://, so that nobody else reads them; http:// "
            "is for localhost alone"
        )

    def send(title: str, text: str, is_grave: bool) -> None:
        _post(name, f"{title}\n{text}")

    return send


def _send_by_wandb(title: str, text: str, is_grave: bool) -> None:
    wandb: Any = importlib.import_module("wandb")
    if wandb.run is None:
        raise InvalidValue("there is no run of wandb: set report_to='wandb', or call wandb.init()")
    level = wandb.AlertLevel.ERROR if is_grave else wandb.AlertLevel.WARN
    wandb.alert(title=title, text=text, level=level)


def _send_by_trackio(title: str, text: str, is_grave: bool) -> None:
    trackio: Any = importlib.import_module("trackio")
    level = trackio.AlertLevel.ERROR if is_grave else trackio.AlertLevel.WARN
    trackio.alert(title=title, text=text, level=level)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses to go on to another address, which may be unencrypted or of someone else."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _post(address: str, text: str) -> None:
    """Send a text as JSON.

    Names of the run's log stand in the text. Slack reads ``<…>`` as a link or a call to everyone.
    """
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, entity)
    body = json.dumps({"text": text}).encode()
    request = urllib.request.Request(  # noqa: S310  (the scheme was checked at construction)
        address, body, {"Content-Type": "application/json"}, method="POST"
    )
    opener = urllib.request.build_opener(_NoRedirect())
    with opener.open(request, timeout=TIMEOUT):
        pass


def _within_time(send: Callable[[str, str, bool], None], title: str, text: str, is_grave: bool) -> str:
    """Send an alert, and return why it failed; empty if it did not.

    A server that answers byte by byte never meets the time-out of a socket, so the whole is waited for in a thread.
    """
    outcome = [f"no answer within {TIMEOUT:g} seconds"]

    def attempt() -> None:
        try:
            send(title, text, is_grave)
            outcome[0] = ""
        except urllib.error.HTTPError as error:
            error.close()
            outcome[0] = f"the server answered {error.code} {error.reason}"
        except urllib.error.URLError as error:
            outcome[0] = str(error.reason)
        except Exception as error:  # whatever a tracker raises must not end the run
            outcome[0] = f"{type(error).__name__}: {error}"

    # trackio keeps its run in a context variable, which a new thread does not have.
    in_this_context = contextvars.copy_context().run
    thread = threading.Thread(target=in_this_context, args=(attempt,), daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    return outcome[0]
