"""A tape in one file: what it holds, and that damage of any kind is known for what it is."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.common.bus import Message
from diloco.common.errors import ConfigError, IntegrityError
from diloco.common.tape.file import (
    MAGIC,
    is_tape_file,
    read_tape_file,
    tape_file_run,
    write_tape_file,
)

MESSAGES = [
    Message("diloco.r.spec", 1, 1e9 + 0.1, b"one", "id"),
    Message("diloco.r.join.a", 7, 1e9 + 1 / 3, b"", ""),
    Message("diloco.r.end", 8, 2e9, bytes(range(256)), "end"),
]


def write(path: Path, messages: Iterable[Message]) -> int:
    async def given_one_by_one():
        for message in messages:
            yield message

    return asyncio.run(write_tape_file(path, "r", given_one_by_one()))


@pytest.fixture
def tape(tmp_path: Path) -> Path:
    path = tmp_path / "run.tape"
    assert write(path, MESSAGES) == len(MESSAGES)
    return path


def test_it_holds_what_it_was_given(tape: Path, tmp_path: Path) -> None:
    assert is_tape_file(tape)
    assert tape_file_run(tape) == "r"
    assert list(read_tape_file(tape)) == MESSAGES
    write(tmp_path / "again.tape", read_tape_file(tape))
    assert (tmp_path / "again.tape").read_bytes() == tape.read_bytes()
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_a_file_that_is_there_is_not_written_over(tape: Path) -> None:
    before = tape.read_bytes()
    with pytest.raises(ConfigError, match="exists already"):
        write(tape, [])
    assert tape.read_bytes() == before
    with pytest.raises(ConfigError, match="cannot write"):
        write(tape.parent / "nowhere" / "x.tape", [])


def test_an_empty_tape_is_one(tmp_path: Path) -> None:
    write(tmp_path / "empty", [])
    assert list(read_tape_file(tmp_path / "empty")) == []


@given(st.data())
def test_a_turned_bit_or_a_cut_is_noticed(tmp_path_factory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("tape")
    write(folder / "whole", MESSAGES)
    whole = (folder / "whole").read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    cut = data.draw(st.booleans())
    damaged = bytearray(whole[:at]) if cut else bytearray(whole)
    if not cut:
        damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    (folder / "damaged").write_bytes(damaged)
    with pytest.raises(IntegrityError, match="tape file"):
        list(read_tape_file(folder / "damaged"))


def test_what_stands_behind_the_end_or_out_of_order_is_noticed(tape: Path, tmp_path: Path) -> None:
    (tmp_path / "longer").write_bytes(tape.read_bytes() + tape.read_bytes()[len(MAGIC) :])
    write(tmp_path / "disordered", MESSAGES[::-1])
    for name in ("longer", "disordered"):
        with pytest.raises(IntegrityError):
            list(read_tape_file(tmp_path / name))


def test_what_is_no_tape(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[run]\n")
    assert not is_tape_file(tmp_path / "run.toml")
    assert not is_tape_file(tmp_path)
    assert not is_tape_file(tmp_path / "nothing")
