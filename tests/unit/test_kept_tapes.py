"""Tapes of earlier releases, kept with their objects, are still verified.

`tests/tapes` has one archive for each: a tape file and its store, of `spoiled.make_run`. A release
adds its own and removes none.
"""

import io
import tarfile
from pathlib import Path

import msgpack
import pytest
from rich.console import Console
from spoiled import Run
from test_verdicts import rewritten

from diloco.cli.opening import Place, use_place
from diloco.common import names
from diloco.common.errors import IntegrityError
from diloco.replay.coverage import STATUSES
from diloco.replay.options import Options
from diloco.replay.run import run_replay

TAPES = sorted((Path(__file__).parents[1] / "tapes").glob("*.tar.xz"))


@pytest.fixture
def unpacked(tmp_path, request):
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    use_place(Place(None, str(tmp_path / "store")))
    yield Run("honest", tmp_path / "run.tape", tmp_path / "store")
    use_place(Place())


def replay(tape: Path, **options) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=200)
    return run_replay(str(tape), Options(**options), console), console.file.getvalue()


def kept(tapes):
    return pytest.mark.parametrize("unpacked", tapes, indirect=True, ids=lambda path: path.name)


@kept(TAPES)
def test_a_kept_tape_is_verified_and_what_decided_it_is_told_apart(unpacked):
    status, text = replay(unpacked.tape)
    assert status == 0, text
    assert "bit for bit" in text
    # By other rules than today's: said in a sentence, and not judged.
    status, text = replay(unpacked.tape, decide=True)
    assert status == STATUSES["incomplete"], text
    assert "an earlier release decided it, by other rules" in text
    assert " 0 differ" in text


@kept(TAPES[:1])
def test_a_tape_that_this_release_cannot_read_is_told_in_a_sentence(unpacked, tmp_path):
    def later(message):
        if not message.subject.startswith(names.record(unpacked.name, "")):
            return message
        fields = msgpack.unpackb(message.payload) | {"schema": 7}
        return message._replace(payload=msgpack.packb(fields))

    tape = rewritten(unpacked, tmp_path / "later.tape", later)
    with pytest.raises(IntegrityError, match="no record of fragment 0 can be read by release"):
        replay(tape)
