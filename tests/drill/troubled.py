"""`diloco` as a machine runs it on which something is wrong that no task can do.

Run as: python -m troubled KIND VALUE COMMAND ...: "release" decodes views VALUE percent off,
"link" stores each object VALUE seconds late, "clock" shows a time VALUE seconds ahead.
"""

import sys
import time

from diloco.common.storage.store import DirectoryStore


def release(percent: float) -> None:
    from diloco.learner.tensors import send_and_adopt_kernels

    honest = send_and_adopt_kernels.decode_blocks
    send_and_adopt_kernels.decode_blocks = lambda *args: honest(*args) * (1 + percent / 100)


def link(seconds: float) -> None:
    honest = DirectoryStore.put

    def put(self, name, data):
        time.sleep(seconds)
        honest(self, name, data)

    DirectoryStore.put = put


def clock(seconds: float) -> None:
    honest = time.time
    time.time = lambda: honest() + seconds
    from diloco.common.process import retry

    retry.Clock.__init__.__defaults__ = (time.time, time.monotonic)


if __name__ == "__main__":
    kind, value = sys.argv[1:3]
    del sys.argv[1:3]
    {"release": release, "link": link, "clock": clock}[kind](float(value))
    from diloco.program import main

    main()
