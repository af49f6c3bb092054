"""Posts alerts to a webhook: in their order, each with retries until the receiver accepts it.

The URL is a secret, since whoever has the URL of a chat service's webhook can write to the chat.
Messages and logs show only the URL's host.
"""

import asyncio
import json
import urllib.parse
from typing import Any

import requests

from diloco.common.process import log
from diloco.common.process.retry import Runtime
from diloco.common.process.tasks import cancel
from diloco.common.protocol.errors import ConfigError, DilocoError
from diloco.show.alerts.fire_and_resolve import Notice

TIMEOUT_S = 10.0
# The most notices that wait for an unreachable receiver; beyond, the oldest are dropped.
MOST = 1000
# Statuses of a receiver that is overloaded, or still starting, and takes the message later.
PASSING = frozenset({408, 425, 429})


class WebhookError(DilocoError):
    """The receiver refuses a message, and a retry will not help."""


class WebhookAwayError(WebhookError):
    """The receiver does not answer, or cannot take messages now."""

    retry = True


class _Bearer(requests.auth.AuthBase):
    """Authenticates by a bearer token; without one, keeps `requests` from reading ~/.netrc."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request


class Webhook:
    """The address to which alerts are posted.

    Args:
        url: URL that takes POST; user and password in the URL are sent by basic authentication.
        token: a bearer token, which is sent instead of user and password; None: none.

    Attributes:
        host: the URL's host, which messages may show.

    Raises:
        ConfigError: `url` is not a URL of HTTP.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        parts = _parts(url)
        self.host = parts.hostname or ""
        user, password = parts.username, parts.password
        plain = parts._replace(netloc=parts.netloc.rpartition("@")[2])
        self._url = urllib.parse.urlunsplit(plain)
        self._auth: requests.auth.AuthBase = _Bearer(token)
        if user is not None and not token:
            secret = urllib.parse.unquote(password or "")
            self._auth = requests.auth.HTTPBasicAuth(urllib.parse.unquote(user), secret)

    def post(self, document: dict[str, Any]) -> None:
        """Posts a document as JSON; blocks for `TIMEOUT_S` at most.

        Raises:
            WebhookAwayError: the receiver does not answer, or cannot take messages now.
            WebhookError: the receiver refuses the message.
        """
        try:
            answer = requests.post(
                self._url,
                data=json.dumps(document).encode(),
                headers={"Content-Type": "application/json", "User-Agent": "diloco-watch"},
                auth=self._auth,
                timeout=TIMEOUT_S,
                # No redirects: a message and its secret go to the operator's URL and nowhere else.
                allow_redirects=False,
                stream=True,
            )
            answer.close()
        except requests.RequestException as error:
            # The exception's text contains the URL.
            raise WebhookAwayError(
                f"the webhook at {self.host} cannot be reached: {type(error).__name__}"
            ) from None
        if answer.ok and not answer.is_redirect:
            return
        said = f"the webhook at {self.host} answers with status {answer.status_code}"
        if answer.status_code >= 500 or answer.status_code in PASSING:
            raise WebhookAwayError(said)
        raise WebhookError(
            said, hint="check its URL, and that it accepts a POST of JSON: diloco watch RUN --test"
        )


def _parts(url: str) -> urllib.parse.SplitResult:
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
    except ValueError:
        good = False
    if not good:
        # The URL is not shown: it may be a secret with a typing error.
        raise ConfigError(
            "the webhook is not an HTTP URL",
            hint="such as https://hooks.example.org/diloco, by --webhook or DILOCO_WEBHOOK_URL",
        )
    return parts


class Outbox:
    """Posts notices to a webhook, one after the other; made within an event loop.

    Args:
        webhook: the webhook.
        run: name of the run that the notices are about.
        runtime: retries, and calls the webhook in a thread.
    """

    def __init__(self, webhook: Webhook, run: str, runtime: Runtime) -> None:
        self._webhook = webhook
        self._run = run
        self._runtime = runtime
        self._logger = log.get(run=run)
        self._waiting: asyncio.Queue[dict[str, Any]] = asyncio.Queue(MOST)
        self._work = asyncio.ensure_future(self._deliver())
        self._undelivered = 0

    def add(self, notice: Notice) -> None:
        """Queues a notice; if `MOST` wait already, the oldest is dropped and never delivered."""
        if self._waiting.full():
            self._waiting.get_nowait()
            self._waiting.task_done()
        self._waiting.put_nowait(notice.body(self._run))
        self._undelivered += 1

    async def close(self, within_s: float) -> int:
        """Waits at most `within_s` seconds for deliveries; returns the number not delivered."""
        idle = asyncio.ensure_future(self._waiting.join())
        await asyncio.wait([idle, self._work], timeout=within_s, return_when="FIRST_COMPLETED")
        await cancel(idle, self._work)
        return self._undelivered

    async def _deliver(self) -> None:
        while True:
            document = await self._waiting.get()
            try:
                await self._runtime.retry(
                    "posting to the webhook",
                    lambda document=document: self._runtime.call(self._webhook.post, document),  # type: ignore[misc]
                    logger=self._logger,
                )
                self._undelivered -= 1
            except WebhookError as error:
                self._logger.warning("alert_refused", why=error.message, hint=error.hint)
            self._waiting.task_done()
