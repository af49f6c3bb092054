"""`diloco local`."""

from diloco.cli.command import command, group
from diloco.common import log
from diloco.local.options import LocalOptions

app = group()


@command(app)
def local(options: LocalOptions) -> int:
    """Train with several learners, an aggregator and a NATS server on this machine.

    Every part is a process of its own and runs the same commands and protocol as on machines far
    apart. Learners may have different numbers of devices (`--mesh`) and consist of several
    processes (`--hosts`). Ctrl-C stops all of them cleanly; a second Ctrl-C kills them. What was
    stopped, or crashed, continues with `--resume`.
    """
    log.configure("error")
    from diloco.local.run import run_local

    return run_local(options)
