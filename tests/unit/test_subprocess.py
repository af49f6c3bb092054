"""Computing in a subprocess: the answer comes back, and loaded libraries do not."""

import subprocess
import sys

import pytest

from diloco.run.cli.subprocess import Isolated, call_isolated, call_isolated_heard

SCRIPT = """
import os, sys, time
from diloco.run.cli.subprocess import Isolated, call_isolated, call_isolated_heard
from diloco.common.protocol.errors import TaskError

def work(what):
    import jax
    return what, os.getpid()

def count(hear, total):
    import jax
    for done in range(total):
        hear(done + 1, total)
    return done + 1

def abort():
    os._exit(3)

class TwoWords(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} {other}")

def refuse():
    raise TwoWords("own", "trouble")

class Adder:
    def __init__(self, value):
        import jax
        self.value = value

    def add(self, value):
        self.value += value
        return self.value

    def refuse(self):
        raise TwoWords("own", "trouble")

    def rest(self):
        time.sleep(300)

if __name__ == "__main__":
    said, pid = call_isolated(work, "done")
    assert (said, pid != os.getpid()) == ("done", True)
    heard = []
    assert call_isolated_heard(lambda *word: heard.append(word), count, 3) == 3
    assert heard == [(1, 3), (2, 3), (3, 3)]
    assert "jax" not in sys.modules
    try:
        call_isolated(abort)
    except TaskError as error:
        print(error.message)
    try:
        call_isolated(refuse)
    except TaskError as error:
        print(error.message)
    kept = Isolated("program:Adder", 5)
    assert [kept.call("add", one) for one in (1, 2)] == [6, 8]
    for method, within_s in (("refuse", None), ("rest", 0.1), ("add", None)):
        try:
            kept.call(method, *(["never"] if method == "add" else []), within_s=within_s)
        except TaskError as error:
            print(error.message)
    kept.close()
    assert "jax" not in sys.modules
    sys.modules["jax"] = None
    assert call_isolated(os.getpid) == os.getpid()
"""


def test_it_loads_nothing_here_and_may_even_abort(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(program)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "the process that was to run the task ended by itself",
        "the task fails: TwoWords: own trouble",
        "the task fails: TwoWords: own trouble",
        "the task did not answer within 0.1 s",
        "the process that was to run the task ended by itself",
    ]


def test_where_jax_is_loaded_already_it_works_here():
    assert "jax" in sys.modules
    with pytest.raises(ZeroDivisionError):
        call_isolated(lambda: 1 // 0)
    heard = []
    call_isolated_heard(lambda *word: heard.append(word), lambda hear: hear(1, 2))
    assert heard == [(1, 2)]
    kept = Isolated("collections:Counter", "aab")
    assert kept.call("total") == 3
    kept.close()
