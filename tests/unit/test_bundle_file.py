"""A tape in a bundle: what it holds, and that damage of any kind is known for what it is."""

from pathlib import Path

import pytest
from forged import messages_in, write_tape
from hypothesis import given
from hypothesis import strategies as st

from diloco.common.protocol.errors import ConfigError, IntegrityError
from diloco.common.storage.bundle import BundleWriter, is_bundle, open_bundle, read_header
from diloco.common.storage.bundle.frames import EXPORTED, MAGIC
from diloco.common.storage.bus import Message
from diloco.replay.restore import run_restore

MESSAGES = [
    Message("diloco.r.spec", 1, 1e9 + 0.1, b"one", "id"),
    Message("diloco.r.join.a", 7, 1e9 + 1 / 3, b"", ""),
    Message("diloco.r.end", 8, 2e9, bytes(range(256)), "end"),
]


@pytest.fixture
def tape(tmp_path: Path) -> Path:
    return write_tape(tmp_path / "run.bundle", "r", MESSAGES)


def test_it_holds_what_it_was_given(tape: Path, tmp_path: Path) -> None:
    assert is_bundle(tape)
    assert read_header(tape)["run"] == "r"
    assert messages_in(tape) == MESSAGES
    write_tape(tmp_path / "again.bundle", "r", messages_in(tape))
    assert (tmp_path / "again.bundle").read_bytes() == tape.read_bytes()
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_a_file_that_is_there_is_not_written_over(tape: Path) -> None:
    before = tape.read_bytes()
    with pytest.raises(ConfigError, match="exists already"):
        write_tape(tape, "r", [])
    assert tape.read_bytes() == before
    with pytest.raises(ConfigError, match="cannot write"):
        write_tape(tape.parent / "nowhere" / "x.bundle", "r", [])


def test_an_empty_tape_is_one(tmp_path: Path) -> None:
    assert messages_in(write_tape(tmp_path / "empty", "r", [])) == []


@given(st.data())
def test_a_turned_bit_or_a_cut_is_noticed(tmp_path_factory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("tape")
    whole = write_tape(folder / "whole", "r", MESSAGES).read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    cut = data.draw(st.booleans())
    damaged = bytearray(whole[:at]) if cut else bytearray(whole)
    if not cut:
        damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    (folder / "damaged").write_bytes(damaged)
    with pytest.raises(IntegrityError, match="the bundle"):
        open_bundle(folder / "damaged")


def test_what_stands_behind_the_end_or_out_of_order_is_noticed(tape: Path, tmp_path: Path) -> None:
    (tmp_path / "longer").write_bytes(tape.read_bytes() + tape.read_bytes()[len(MAGIC) :])
    write_tape(tmp_path / "disordered", "r", MESSAGES[::-1])
    for name in ("longer", "disordered"):
        with pytest.raises(IntegrityError):
            open_bundle(tmp_path / name)


def test_what_is_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[run]\n")
    assert not is_bundle(tmp_path / "run.toml")
    assert not is_bundle(tmp_path)
    assert not is_bundle(tmp_path / "nothing")


@pytest.mark.parametrize("salvage", [False, True])
def test_a_tape_that_an_earlier_diloco_exported_is_told_in_a_sentence(
    tmp_path: Path, salvage: bool
) -> None:
    path = tmp_path / "run.tape"
    path.write_bytes(EXPORTED + b"anything")
    assert is_bundle(path)
    with pytest.raises(ConfigError, match="an exported tape of an earlier diloco"):
        open_bundle(path, salvage=salvage)


def test_what_another_stream_or_run_holds_is_none_of_it(tmp_path: Path) -> None:
    for name, subject in {
        "heartbeat": "diloco.r.heartbeat.a",
        "pattern": "diloco.r.update.*.0",
    }.items():
        write_tape(tmp_path / name, "r", [Message(subject, 1, 1e9, b"", "")])
        with pytest.raises(IntegrityError, match="has a message, 1"):
            open_bundle(tmp_path / name)
    header = {"run": "r", "made_s": 1e9, "objects": True}
    with BundleWriter(tmp_path / "objects", header) as writer:
        writer.object("other/global/checkpoint/best", b"mine")
    with pytest.raises(IntegrityError, match="of run 'r' and has an object 'other/"):
        open_bundle(tmp_path / "objects")


def test_a_tape_of_gaps_alone_is_put_on_no_server(tmp_path: Path) -> None:
    file = write_tape(tmp_path / "gaps", "r", [*MESSAGES, MESSAGES[-1]._replace(seq=1 << 60)])
    with pytest.raises(IntegrityError, match="has gaps of 1,152,921,504,606,846,9"):
        run_restore(file, None, objects=False)
