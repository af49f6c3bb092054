"""The training process of a supervisor, which starts it in a process without JAX."""

import signal
import subprocess
import sys

# JAX, which other tests have loaded, warns of forks: so this is a process of its own.
BEGIN = """
import asyncio, dataclasses, sys
from diloco.common.process.config import make_config
from diloco.learner.core.formation import Begin, Formation, TrainingProcess
from diloco.learner.hosts.supervisor import _Supervisor

folder, asked = sys.argv[1], int(sys.argv[2])
config = make_config({
    "run": {"name": "r", "steps": 1},
    "task": {"build": "a:b"},
    "bus": {"url": "nats://127.0.0.1:1"},
    "store": {"url": folder},
    "learner": {"slices": 2, "peers": ("127.0.0.1:1", "127.0.0.1:2"), "checkpoint_dir": folder},
}, source="test")
made = Formation(4096, (0, 1), ("one", "other"), "127.0.0.1:3")

async def begin():
    here = _Supervisor(config, "a", ())
    me = here._state.me._replace(process=TrainingProcess(made.number, "running"))
    here._state = dataclasses.replace(here._state, me=me, asked=asked)
    await here._begin(Begin(made, 0, ()))
    return here._state.me.process.status

status = asyncio.run(begin())
assert "jax" not in sys.modules
print("status", status)
"""


def status_of(folder, asked):
    command = [sys.executable, "-c", BEGIN, str(folder), str(asked)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return int(ran.stdout.rpartition("status ")[2])


def test_a_process_that_was_asked_to_leave_before_it_began_is_told_so(tmp_path):
    """As while its supervisor copied a checkpoint: else the formation would never end."""
    assert status_of(tmp_path, asked=0) == 2  # `diloco` has no such options without a command
    assert status_of(tmp_path, asked=4096) == -signal.SIGTERM
