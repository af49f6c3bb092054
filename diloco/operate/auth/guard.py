"""`diloco host guard`: cuts off clients that flood the tape, before it is full.

nats-server limits connections and sizes, but not messages in a second. The guard reads the tape
with the operator's credentials as it grows; a learner that publishes faster than any honest one
could, in messages or in bytes, is revoked, and the servers are told to reload. It runs where the
folder of credentials is.
"""

import asyncio
import math
import shlex
import subprocess
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

from diloco.common.process import log
from diloco.common.protocol import names
from diloco.common.protocol.errors import ConfigError
from diloco.common.storage.tape import RunContext
from diloco.operate.auth import files as auth
from diloco.run.cli.opening import open_run

# A rate is taken over so many seconds: a learner that comes back from an outage may send at once
# what it has.
SPAN_S = 10.0
COMMAND_S = 60.0


class Rates:
    """Messages and bytes a second of each sender, over the last `SPAN_S`. Pure: times come in."""

    def __init__(self, most_per_s: float, most_bytes_per_s: float = math.inf) -> None:
        self.most_per_s = most_per_s
        self.most_bytes_per_s = most_bytes_per_s
        self._sent: dict[str, deque[tuple[float, int]]] = {}

    def count(self, sender: str, at_s: float, size_bytes: int = 0) -> bool:
        """Whether a message is one too many of its sender's."""
        sent = self._sent.setdefault(sender, deque())
        sent.append((at_s, size_bytes))
        while sent[0][0] <= at_s - SPAN_S:
            sent.popleft()
        span_bytes = sum(size for _, size in sent)
        if len(sent) <= self.most_per_s * SPAN_S and span_bytes <= self.most_bytes_per_s * SPAN_S:
            return False
        sent.clear()
        return True


def reload_command(folder: Path, given: str | None) -> list[str]:
    """The command that makes the servers reload: one given, or a signal to the folder's server.

    Raises:
        ConfigError: there is neither.
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


async def guard(folder: Path, target: str, *, rates: Rates, reload: list[str]) -> None:
    """Read the tape from its end on, for ever, and revoke clients that flood it.

    Raises:
        ConfigError: RUN cannot be opened, or the folder is none of `diloco auth init`.
    """
    auth.identities(folder)
    async with open_run(target, name="guard") as opened:
        context = opened.context
        logger = log.get(run=context.run)
        logger.info(
            "guarding", most_per_s=rates.most_per_s, most_bytes_per_s=rates.most_bytes_per_s
        )

        async def revoke(learner: str) -> None:
            await asyncio.to_thread(auth.revoke, folder, learner)
            failure = await context.runtime.call(_run, reload)
            if failure:
                logger.error("reload_failed", error=failure)
            logger.warning(
                "revoked",
                learner=learner,
                most_per_s=rates.most_per_s,
                most_bytes_per_s=rates.most_bytes_per_s,
                runbook="runbooks/credentials.md",
            )

        await watch(context, rates, revoke)


async def watch(
    context: RunContext, rates: Rates, revoke: Callable[[str], Awaitable[None]]
) -> None:
    """Call `revoke` once for each learner that publishes more than it may."""
    run, revoked = context.run, set[str]()
    subjects = [
        names.join(run, "*"),
        names.leave(run, "*"),
        names.claim(run, "*"),
        names.update(run, "*", "*"),
    ]
    start = await context.bus.last_sequence(context.tape) + 1
    async for message in context.bus.read(context.tape, subjects, start):
        learner = names.subject_learner(message.subject)
        if learner is None:
            continue
        too_much = rates.count(learner, message.time_s, len(message.payload))
        if too_much and learner not in revoked:
            revoked.add(learner)
            await revoke(learner)


def _run(command: list[str]) -> str:
    """Run the command that has the servers reload; what went wrong, or nothing."""
    try:
        done = subprocess.run(  # noqa: S603 - the operator's own command
            command, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stderr or done.stdout or "it failed").strip()[:1000] if done.returncode else ""
