"""Alerts of findings in a run: by wandb, by trackio, or by a web address that accepts JSON, such as Slack's."""

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

from bandpo.core.errors import InvalidValue, MissingPackage, did_you_mean

TRACKERS = ("wandb", "trackio")
"""The trackers that can send alerts."""

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
"""Hosts to which alerts may be sent without encryption."""

TIMEOUT = 10.0
"""Seconds after which an alert counts as failed and the run continues."""

LONGEST_TITLE = 63
"""Largest number of characters that wandb accepts as a title."""


class Alerts:
    """The channels by which findings are sent to people.

    >>> Alerts([]).send("bandpo: nan", "the loss is NaN", is_grave=True)
    {}

    Args:
        names: The channels: ``wandb``, ``trackio``, or an address that begins with ``https://``, or with ``http://`` on
            this machine.

    Raises:
        ValueError: if a channel is unknown, or an address is not encrypted.
        ImportError: if a tracker is not installed.
    """

    def __init__(self, names: Sequence[str] = ()):
        if isinstance(names, str):
            raise InvalidValue(
                f"alerts must be a list, got the text {_display_name(names)!r}; write [{_display_name(names)!r}]"
            )
        self._senders = [(_display_name(name), _sender(name)) for name in names]

    def send(self, title: str, text: str, *, is_grave: bool) -> dict[str, str]:
        """Send an alert by all channels, and return the failures: for each failed channel the reason.

        Args:
            title: A few words.
            text: The fault and the advice.
            is_grave: True if the run should be stopped.
        """
        failures: dict[str, str] = {}
        for name, send in self._senders:
            problem = _within_time(send, title[:LONGEST_TITLE], text, is_grave)
            if problem:
                failures[name] = problem
        return failures


def _display_name(name: str) -> str:
    """Return the name of a channel for display: of an address, which may contain a secret, only scheme and host."""
    address = urlsplit(name)
    return f"{address.scheme}://{address.hostname}" if "://" in name else name


def _sender(name: str) -> Callable[[str, str, bool], None]:
    """Return the function that sends alerts by a channel."""
    if name in TRACKERS:
        if importlib.util.find_spec(name) is None:
            raise MissingPackage(f"alerts={[name]} needs {name}: pip install {name}")
        return _send_by_wandb if name == "wandb" else _send_by_trackio
    if "://" not in name:
        raise InvalidValue(
            f"alerts cannot be sent by {name!r}{did_you_mean(name, TRACKERS)}; pass 'wandb', 'trackio' or an address "
            "such as 'https://hooks.slack.com/services/…'"
        )
    address = urlsplit(name)
    is_local = address.scheme == "http" and address.hostname in LOCAL_HOSTS
    if not address.hostname or not (address.scheme == "https" or is_local):
        raise InvalidValue(
            f"the address {_display_name(name)} for alerts must begin with https://, so that nobody else reads them; "
            "http:// is allowed for localhost only"
        )

    def send(title: str, text: str, is_grave: bool) -> None:
        _post(name, f"{title}\n{text}")

    return send


def _send_by_wandb(title: str, text: str, is_grave: bool) -> None:
    wandb: Any = importlib.import_module("wandb")
    if wandb.run is None:
        raise InvalidValue("no wandb run is active: set report_to='wandb', or call wandb.init()")
    level = wandb.AlertLevel.ERROR if is_grave else wandb.AlertLevel.WARN
    wandb.alert(title=title, text=text, level=level)


def _send_by_trackio(title: str, text: str, is_grave: bool) -> None:
    trackio: Any = importlib.import_module("trackio")
    level = trackio.AlertLevel.ERROR if is_grave else trackio.AlertLevel.WARN
    trackio.alert(title=title, text=text, level=level)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A handler that follows no redirect, which may lead to an unencrypted address or to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _post(address: str, text: str) -> None:
    """Send a text as JSON."""
    # The text may contain names from the run's log. Slack reads ``<…>`` as a link or as a mention of everyone.
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
    """Send an alert, and return the reason of a failure; an empty text if there was none.

    The alert is sent in a thread, which limits the total time. A socket's time-out does not: it starts anew with each
    byte that a slow server sends.
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
        except Exception as error:  # no error of a tracker may end the run
            outcome[0] = f"{type(error).__name__}: {error}"

    # trackio stores its run in a context variable, which a new thread does not inherit.
    in_this_context = contextvars.copy_context().run
    thread = threading.Thread(target=in_this_context, args=(attempt,), daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    return outcome[0]
