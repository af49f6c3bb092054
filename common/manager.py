"""What a daemon tells systemd: READY=1 once it works, STATUS with what it does, and WATCHDOG=1.

The watchdog hears from a daemon for as long as its main loop turns; when it does not, systemd ends
the daemon and starts it again. For a process that systemd did not start, all of this does nothing.
"""

import asyncio
import contextlib
import socket

from diloco.common.config import ServiceManager
from diloco.common.health import Health

# Between two looks at the daemon, unless the watchdog wants more of them.
LOOK_S = 1.0
# The last work of a daemon, and the end of its interpreter.
END_S = 600.0


def tell(manager: ServiceManager, **fields: str) -> None:
    """Send assignments such as READY="1"; that nobody listens is no fault of the daemon's."""
    if not manager.address:
        return
    # A name that begins with "@" is in the kernel's abstract namespace.
    abstract = manager.address.startswith("@")
    address = "\0" + manager.address[1:] if abstract else manager.address
    message = "\n".join(f"{name}={value}" for name, value in fields.items())
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
    ):
        sender.sendto(message.encode(), address)


def tell_stopping(manager: ServiceManager) -> None:
    """The daemon ends in order; from now on nobody turns a loop, and the watchdog waits longer."""
    watchdog = {"WATCHDOG_USEC": str(int(END_S * 1e6))} if manager.watchdog_s else {}
    tell(manager, STOPPING="1", **watchdog)


def tell_error(manager: ServiceManager, message: str, hint: str | None) -> None:
    """What ends the process, for `systemctl status`; one line, as all of systemd's statuses."""
    sentence = f"error: {message}; hint: {hint}" if hint else f"error: {message}"
    tell(manager, STATUS=" ".join(sentence.split()))


async def report(health: Health, manager: ServiceManager) -> None:
    """Tell systemd how the daemon fares, for ever; run it on the daemon's event loop."""
    said = ""
    while True:
        answer = health.answer()
        if answer.live and manager.watchdog_s:
            tell(manager, WATCHDOG="1")
        waits = (f"waits: {', '.join(answer.waiting)}",) if answer.waiting else ()
        status = "; ".join((answer.state, *answer.why, *waits))
        if status != said:
            tell(manager, STATUS=status)
            said = status
        await asyncio.sleep(min(LOOK_S, manager.watchdog_s / 4 or LOOK_S))
