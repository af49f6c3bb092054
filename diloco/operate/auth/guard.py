"""`diloco host guard`: disconnects clients that flood the tape or the servers.

nats-server limits connections and sizes, but not messages per second. The guard reads the tape's
new messages with the operator's credentials, is notified of each new consumer, and polls the
servers for each account's traffic. For a party that exceeds a limit, the guard revokes the
credentials, has the servers reload, and removes the party's consumers. It runs on the machine with
the folder of credentials.
"""

import asyncio
import json
import math
import shlex
import subprocess
import urllib.request
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from diloco.common.process import log
from diloco.common.process.credentials import consumers_prefix
from diloco.common.process.tasks import all_of
from diloco.common.protocol import names
from diloco.common.protocol.errors import ConfigError
from diloco.common.storage.bus.jetstream import NatsBus
from diloco.common.storage.tape import RunContext
from diloco.operate.auth import nats_config_and_credentials as auth
from diloco.operate.auth.permissions import run_account
from diloco.run.cli.opening import open_run

# A rate is the mean over this many seconds: a learner that returns from an outage may send all its
# updates at once.
SPAN_S = 10.0
COMMAND_S = 60.0
# Seconds between two polls of the servers' counts.
LOOK_S = 2.0
# Seconds until a revoked party's consumers are removed again: its server may reload late.
AGAIN_S = 1.0
# Roles that are limited: an aggregator sends as much as its run needs.
_REVOKED = ("learner", "reader")
_CREATED = "$JS.EVENT.ADVISORY.CONSUMER.CREATED"


class Rates:
    """Counts messages and bytes of each sender in the last `SPAN_S` seconds.

    Args:
        most_per_s: the most messages per second, as a mean over that time.
        most_bytes_per_s: the most bytes per second, likewise.
    """

    def __init__(self, most_per_s: float, most_bytes_per_s: float = math.inf) -> None:
        self.most_per_s = most_per_s
        self.most_bytes_per_s = most_bytes_per_s
        self._sent: dict[str, deque[tuple[float, int, int]]] = {}

    def anew(self) -> "Rates":
        """Returns an empty counter with the same limits."""
        return Rates(self.most_per_s, self.most_bytes_per_s)

    def count(self, sender: str, at_s: float, size_bytes: int = 0, messages: int = 1) -> bool:
        """Counts messages; returns whether their sender now exceeds a limit, and then starts anew.

        Args:
            sender: name of the party.
            at_s: the time in seconds, not less than at the last call.
            size_bytes: bytes of all the messages.
            messages: their number.
        """
        sent = self._sent.setdefault(sender, deque())
        sent.append((at_s, messages, size_bytes))
        while sent[0][0] <= at_s - SPAN_S:
            sent.popleft()
        span, span_bytes = (sum(one[part] for one in sent) for part in (1, 2))
        if span <= self.most_per_s * SPAN_S and span_bytes <= self.most_bytes_per_s * SPAN_S:
            return False
        sent.clear()
        return True


def reload_command(folder: Path, given: str | None) -> list[str]:
    """Returns the command that makes servers reload: `given`, else a signal to the local server.

    Raises:
        ConfigError: nothing is given, and no server runs from `folder`.
    """
    if given is not None:
        return shlex.split(given)
    pid_file = folder / "nats-server.pid"
    if not pid_file.exists():
        raise ConfigError(
            f"no nats-server runs from {folder}: there is no {pid_file.name} in it",
            hint="pass --reload with a command that copies accounts.conf to every server and "
            "reloads it",
        )
    return ["nats-server", "--signal", f"reload={pid_file}"]


async def guard(
    folder: Path, target: str, *, rates: Rates, reload: list[str], monitors: tuple[str, ...]
) -> None:
    """Watches tape, consumers and connections, and revokes parties that flood; never returns.

    Args:
        folder: the folder of credentials.
        target: RUN, with the operator's credentials.
        rates: the limits.
        reload: the command that makes the servers reload.
        monitors: URLs of servers' monitoring; without any, accounts' traffic is not watched.

    Raises:
        ConfigError: RUN cannot be opened, or `diloco auth init` did not make the folder.
    """
    auth.identities(folder)
    async with open_run(target, name="guard") as opened:
        context = opened.context
        logger = log.get(run=context.run)
        logger.info(
            "guarding", most_per_s=rates.most_per_s, most_bytes_per_s=rates.most_bytes_per_s
        )

        async def revoke(name: str) -> None:
            failure = await cut_off(context, folder, name, reload)
            if failure is None:
                return
            if failure:
                logger.error("reload_failed", error=failure)
            logger.warning(
                "revoked",
                learner=name,
                most_per_s=rates.most_per_s,
                most_bytes_per_s=rates.most_bytes_per_s,
                runbook="runbooks/credentials.md",
            )

        await watch(context, rates, revoke, monitors)


async def revoke(folder: Path, target: str, name: str, reload: list[str]) -> None:
    """Revokes one identity, has the servers reload, and removes its consumers.

    Raises:
        ConfigError: no identity has that name, RUN cannot be opened, or no server reloads.
    """
    async with open_run(target, name="operator") as opened:
        failure = await cut_off(opened.context, folder, name, reload)
    if failure is None:
        auth.revoke(folder, name)  # raises unless `init` made the folder
    if failure:
        raise ConfigError(
            f"{name} is revoked in {folder}, but the servers have not reloaded: {failure}",
            hint="reload them by hand: runbooks/credentials.md",
        )


async def cut_off(context: RunContext, folder: Path, name: str, reload: list[str]) -> str | None:
    """Revokes an identity, has the servers reload, and removes its consumers.

    Returns:
        The reload's error, "" for none; None if the identity no longer exists.
    """
    known = [one for one in auth.identities(folder) if one.name == name]
    if not known:
        return None
    await asyncio.to_thread(auth.revoke, folder, name)
    failure = await context.runtime.call(_run, reload)
    bus, prefix, clean = context.bus, consumers_prefix(known[0].role, name), 0
    assert isinstance(bus, NatsBus)
    while clean < 2:
        await asyncio.sleep(AGAIN_S)
        removed = [await bus.remove_readers(one, prefix) for one in names.streams(context.run)]
        clean = 0 if any(removed) and not failure else clean + 1
    return failure


async def watch(
    context: RunContext,
    rates: Rates,
    revoke: Callable[[str], Awaitable[None]],
    monitors: Iterable[str] = (),
) -> None:
    """Calls `revoke` with the name of each party that exceeds the limits; never returns."""
    await all_of(
        _watch_tape(context, rates.anew(), revoke),
        _watch_consumers(context, rates.anew(), revoke),
        *(_watch_accounts(context, rates.anew(), revoke, url) for url in monitors),
    )


async def _watch_tape(
    context: RunContext, rates: Rates, revoke: Callable[[str], Awaitable[None]]
) -> None:
    run = context.run
    subjects = [
        names.join(run, "*"),
        names.leave(run, "*"),
        names.claim(run, "*"),
        names.update(run, "*", "*"),
    ]
    start = await context.bus.last_sequence(context.tape) + 1
    async for message in context.bus.read(context.tape, subjects, start):
        learner = names.subject_learner(message.subject)
        if learner and rates.count(learner, message.time_s, len(message.payload)):
            await revoke(learner)


async def _watch_consumers(
    context: RunContext, rates: Rates, revoke: Callable[[str], Awaitable[None]]
) -> None:
    """Counts the consumers that each party makes; a consumer's name begins with role and party."""
    async for subject, _ in context.bus.listen(f"{_CREATED}.*.*"):
        role, *rest = subject.rpartition(".")[2].split("_")
        if role in _REVOKED and rest and rates.count(rest[0], context.runtime.clock()):
            await revoke(rest[0])


class AccountTraffic(NamedTuple):
    """The messages and bytes that a server has received from an account since it started."""

    messages: int
    size_bytes: int


async def _watch_accounts(
    context: RunContext, rates: Rates, revoke: Callable[[str], Awaitable[None]], url: str
) -> None:
    """Counts the messages and bytes that each account sends over its connections to a server."""
    before, told = dict[str, AccountTraffic](), False
    while True:
        now = dict[str, AccountTraffic]()
        try:
            now = await context.runtime.call(accounts, url, context.run)
            told = False
        except (OSError, ValueError, KeyError) as error:
            if not told:
                context.logger.warning("unwatched", url=url, error=str(error))
            told = True
        for name, sent in now.items():
            last = before.get(name, sent)
            messages, size = sent.messages - last.messages, sent.size_bytes - last.size_bytes
            # A restarted server counts from zero.
            if messages > 0 and rates.count(name, context.runtime.clock(), size, messages):
                await revoke(name)
        before = now
        await asyncio.sleep(LOOK_S)


def accounts(url: str, run: str) -> dict[str, AccountTraffic]:
    """Returns the traffic of a run's learners and readers, by name, from a server's monitoring.

    Raises:
        OSError, ValueError, KeyError: no answer, or not one of nats-server.
    """
    with urllib.request.urlopen(f"{url}/accstatz?unused=1", timeout=COMMAND_S) as answer:  # noqa: S310 - the operator's own
        found = json.load(answer)["account_statz"]
    sent = {}
    for one in found:
        account, role, name = [*one["acc"].split("_"), "", ""][:3]
        if account == run_account(run) and role in _REVOKED:
            sent[name] = AccountTraffic(one["received"]["msgs"], one["received"]["bytes"])
    return sent


def _run(command: list[str]) -> str:
    """Runs the command that makes the servers reload; returns its error, "" for none."""
    try:
        done = subprocess.run(  # noqa: S603 - the operator's own command
            command, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stderr or done.stdout or "it failed").strip()[:1000] if done.returncode else ""
