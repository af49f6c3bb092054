"""What a daemon tells systemd: READY=1 once it works, STATUS with what it does, and WATCHDOG=1.

Until it is ready a thread tells the phase of its start, and asks for more time as it goes: who is
stopped asks no more, and is ended soon. Afterwards the watchdog hears from a daemon for as long as
its main loop turns; when it does not, systemd ends the daemon and starts it again. For a process
that systemd did not start, all of this does nothing.
"""

import asyncio
import contextlib
import socket
import threading

from diloco.common.config import ServiceManager
from diloco.common.health import Health

# Between two looks at the daemon, unless the watchdog wants more of them.
LOOK_S = 1.0
# A start asks for so much more time, often enough that a busy machine does not end it.
EXTEND_S = 60.0
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


class Starting:
    """The start of a daemon, as systemd hears of it; from a thread, since main threads compile."""

    def __init__(self, health: Health, manager: ServiceManager) -> None:
        self._health = health
        self._manager = manager
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="starting", daemon=True)

    def begin(self) -> None:
        """Begin to tell."""
        self._thread.start()

    def over(self) -> None:
        """It is ready, or has failed; nothing is told after this returns."""
        self._over.set()
        self._thread.join()

    def _tell(self) -> None:
        said = ""
        while not self._over.is_set():
            more = {"EXTEND_TIMEOUT_USEC": str(int(EXTEND_S * 1e6))}
            sentence = self._health.answer().sentence()
            status = {"STATUS": sentence} if sentence != said else {}
            if fields := {**status, **(more if self._health.progresses() else {})}:
                tell(self._manager, **fields)
            said = sentence
            self._over.wait(LOOK_S)


async def report(health: Health, manager: ServiceManager) -> None:
    """Tell systemd how the daemon fares, for ever; run it on the daemon's event loop."""
    said = ""
    while True:
        answer = health.answer()
        if answer.live and manager.watchdog_s:
            tell(manager, WATCHDOG="1")
        status = answer.sentence()
        if status != said:
            tell(manager, STATUS=status)
            said = status
        await asyncio.sleep(min(LOOK_S, manager.watchdog_s / 4 or LOOK_S))
