"""`diloco data` as real processes: killed at any moment, on a disk that fills, into a bucket."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gcs_server import GcsServer
from small_disk import fill, small_disk
from token_lab import checked, command, contents, make_tokenizer, prepared

from diloco.common.protocol.errors import ConfigError, DataError, StoreUnavailableError
from diloco.models.decoders.tokens import TokenFolders

PIECES = 60


@pytest.fixture
def given(tmp_path):
    """Sources of so many pieces, a tokenizer, and options."""
    lines = [json.dumps({"text": f"{number} is a number " * 20}) + "\n" for number in range(6_000)]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(lines))
    size = source.stat().st_size // PIECES + 1
    tokenizer = make_tokenizer(tmp_path / "model")
    return [source, "--tokenizer", tokenizer, "--shard-bytes", size, "--held-out", 0.1]


def notes(out: Path) -> int:
    return len(list((out / ".prepare").glob("0*.json")))


def begun(given, out: Path) -> subprocess.Popen[bytes]:
    words = ["data", "prepare", *given, "--workers", 2, "--out", out]
    return subprocess.Popen(
        [sys.executable, "-m", "diloco", *map(str, words)], stdout=subprocess.DEVNULL
    )


def kill_after(process: subprocess.Popen[bytes], out: Path, more: int) -> bool:
    """SIGKILL what prepares, once it has done so much more; False if it was through before."""
    wanted = notes(out) + more
    while process.poll() is None and notes(out) < wanted:
        time.sleep(0.005)
    process.kill()
    return process.wait() == -9


@pytest.mark.long
def test_what_sigkill_ended_again_and_again_ends_with_the_same_bytes(given, tmp_path):
    prepared(*given, "--workers", 1, "--out", tmp_path / "whole")
    out = tmp_path / "out"
    kills = [kill_after(begun(given, out), out, more) for more in (1, 6)]
    # On a busy machine this process may look only when all is done.
    assert any(kills)
    if all(kills):
        assert not (out / "tokens.json").exists()
        assert 0 < notes(out) < PIECES
    assert begun(given, out).wait() == 0
    assert contents(out) == contents(tmp_path / "whole")


def test_what_is_no_document_is_told_when_others_are_stored(given, tmp_path):
    with given[0].open("a") as file:
        file.write('{"body": "no text"}\n')
    words = [*given, "--workers", 2, "--out", tmp_path / "out"]
    error = command("prepare", *words).exception
    assert isinstance(error, DataError)
    assert "line 6001" in error.message
    assert error.hint
    assert not (tmp_path / "out" / "tokens.json").exists()


def test_two_that_prepare_one_folder(given, tmp_path):
    out = tmp_path / "out"
    first = begun(given, out)
    while not notes(out):
        time.sleep(0.005)
    error = command("prepare", *given, "--workers", 1, "--out", out).exception
    # Unless the first was through before the second asked.
    assert first.poll() == 0 or isinstance(error, ConfigError)
    assert first.wait() == 0


def test_a_disk_that_fills_is_told_and_with_room_it_continues(given, tmp_path):
    prepared(*given, "--workers", 1, "--out", tmp_path / "whole")
    with small_disk(tmp_path / "disk", size="2m") as disk:
        (disk / "filler").write_bytes(bytes(1 << 20))
        error = command("prepare", *given, "--workers", 1, "--out", disk / "out").exception
        assert isinstance(error, StoreUnavailableError)
        assert str(disk / "out") in error.message
        assert "No space left" in error.message
        assert "free space" in error.hint
        assert "same command again" in error.hint
        fill(disk / "more")
        assert not (disk / "out" / "tokens.json").exists()
        before = notes(disk / "out")
        (disk / "filler").unlink()
        (disk / "more").unlink()
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        assert 0 < before < PIECES
        prepared(*given, "--workers", 1, "--out", disk / "out")
        assert contents(disk / "out") == contents(tmp_path / "whole")


def test_into_a_bucket_that_fails_and_from_there_to_a_learners_disk(given, tmp_path, monkeypatch):
    prepared(*given, "--workers", 1, "--out", tmp_path / "whole")
    with GcsServer(tmp_path / "gcs", "bucket") as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        monkeypatch.setenv("DILOCO_STORE_EMULATOR", "true")
        faults = [
            server.fail("status", method="POST", status=503, times=3),
            server.fail("lost", method="POST", times=2),
        ]
        url = "gs://bucket/tokens"
        prepared(*given, "--workers", 1, "--out", url)
        assert not any(fault.times for fault in faults)
        assert checked(url).exit_code == 0
        assert command("copy", url, tmp_path / "copy").exit_code == 0
        assert "no tokens.json" in checked("gs://bucket/other").exception.message
    assert contents(tmp_path / "copy") == contents(tmp_path / "whole")
    folders = TokenFolders(str(tmp_path / "copy"), length=64, vocab=320)
    assert len(folders.train(seed=0)) > 100
