"""`diloco watch` as a process: alerts go to the terminal, and to a webhook if there is one."""

import asyncio
import contextlib
import json as json_module
import time
from typing import TYPE_CHECKING

from rich.console import Console

from diloco.alerts import message
from diloco.alerts.ledger import Ledger, Notice
from diloco.alerts.watching import Watcher
from diloco.alerts.webhook import Outbox, Webhook
from diloco.cli.opening import run_config
from diloco.cli.screen import say_plainly
from diloco.common.config import webhook as webhook_of_environment
from diloco.common.errors import ConfigError
from diloco.common.exits import Exit
from diloco.common.service import Runtime, cancel, on_signals

if TYPE_CHECKING:
    from diloco.alerts.command import WatchOptions

# What waits for the webhook has so long, once the run has ended or somebody has asked.
DRAIN_S = 30.0
ASKED_S = 3.0


def find_webhook(url: str | None) -> Webhook | None:
    """The webhook that was given, or that the environment names.

    Raises:
        ConfigError: it is no URL of HTTP.
    """
    from_environment, token = webhook_of_environment()
    chosen = url or from_environment
    return Webhook(chosen, token) if chosen else None


def try_webhook(target: str, url: str | None) -> int:
    """Post an alert that says that it is a test, and its end; the exit status.

    Raises:
        ConfigError: there is no webhook.
        WebhookError: it does not take them.
    """
    found, run, now_s = find_webhook(url), run_config(target).run.name, time.time()
    if found is None:
        raise ConfigError(
            "there is no webhook to try", hint="give --webhook URL, or set DILOCO_WEBHOOK_URL"
        )
    alert = message.trial(now_s)
    for notice in (Notice(alert), Notice(alert, now_s)):
        found.post(message.body(run, notice))
    say_plainly(f"the webhook at {found.host} took a test alert and its end")
    return Exit.ENDED


def watch_run(target: str, options: "WatchOptions", url: str | None, *, json: bool) -> int:
    """Watch a run until it ends or a signal asks; the exit status: 1 if alerts were not delivered.

    Raises:
        DilocoError: there is no such run, or the webhook is none.
    """
    webhook = find_webhook(url)
    with contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(_watch(target, options, webhook, json=json))
    return Exit.ENDED


async def _watch(
    target: str, options: "WatchOptions", webhook: Webhook | None, *, json: bool
) -> int:
    run, runtime = run_config(target).run.name, Runtime()
    outbox = None if webhook is None else Outbox(webhook, run, runtime)

    def tell(notice: Notice) -> None:
        _print(run, notice, json=json)
        if outbox is not None:
            outbox.add(notice)

    watcher = Watcher(
        target=target,
        ledger=Ledger(options.hold_s, options.severity),
        tell=tell,
        runtime=runtime,
        every_s=options.every_s,
        doctor_s=options.doctor_s,
        kept=options.state,
    )
    if not json:
        to = f"alerts go to {webhook.host}" if webhook else "alerts are shown here alone"
        _note(f"watching run {run}, every {options.every_s:g} s; {to}; Ctrl-C ends it")
    ended = False
    try:
        ended = await _until_asked(watcher)
    finally:
        lost = 0 if outbox is None else await outbox.close(DRAIN_S if ended else ASKED_S)
    return _over(run, ended=ended, lost=lost, json=json)


async def _until_asked(watcher: Watcher) -> bool:
    """Watch until the run ends, or a signal asks; whether it has ended."""
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    on_signals(lambda: loop.call_soon_threadsafe(asked.set))
    work, stop = asyncio.ensure_future(watcher.run()), asyncio.ensure_future(asked.wait())
    try:
        await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return False
        work.result()
        return True
    finally:
        await cancel(work, stop)


def _over(run: str, *, ended: bool, lost: int, json: bool) -> int:
    if ended and not json:
        _note(f"run {run} has ended")
    if not lost:
        return Exit.ENDED
    _note(f"{lost} alerts were not delivered to the webhook")
    return Exit.FAILED


def _print(run: str, notice: Notice, *, json: bool) -> None:
    if json:
        print(json_module.dumps(message.body(run, notice)), flush=True)  # noqa: T201 - the result itself
        return
    say_plainly(f"{time.strftime('%H:%M:%S')} {message.line(run, notice)}")
    if notice.ended_s is None and notice.alert.advice:
        say_plainly(f"         {notice.alert.advice}")


def _note(text: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(text)
