"""`python -m traced COMMAND ...`: a `diloco` command that notes the files whose functions it calls.

SIGUSR1 begins anew; SIGUSR2 writes the files to `traced-PID.txt` in the current folder.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

called: set[str] = set()


def note(frame: FrameType, event: str, _argument: object) -> None:
    if event == "call":
        called.add(frame.f_code.co_filename)


def write(_number: int, _frame: FrameType | None) -> None:
    path = Path(f"traced-{os.getpid()}.txt")
    path.with_suffix(".part").write_text("\n".join(sorted(called)))
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda _number, _frame: called.clear())
    signal.signal(signal.SIGUSR2, write)
    threading.setprofile(note)
    sys.setprofile(note)
    from diloco.program import main

    main()
