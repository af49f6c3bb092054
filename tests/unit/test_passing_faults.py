"""Faults that pass are told as such, whatever they are called: a daemon waits and does not end."""

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest
from nats.js.errors import BadRequestError

from diloco.common.protocol.errors import (
    AccessDeniedError,
    BusUnavailableError,
    StoreUnavailableError,
)
from diloco.common.storage.bus.jetstream.link import Link, as_bus_error
from diloco.common.storage.store import DirectoryStore
from diloco.learner.hosts import supervisor


def test_a_message_for_which_the_account_has_no_room_is_tried_again():
    """Its limit is the tape's, if the tape has none of its own."""
    full = BadRequestError(
        code=400, err_code=10002, description="resource limits exceeded for account"
    )
    found = as_bus_error(full, "diloco.r.update.a.0")
    assert isinstance(found, BusUnavailableError)
    assert "disk-full" in str(found.hint)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("nats: 'Authentication Timeout'", BusUnavailableError),
        ("nats: 'Authorization Violation'", AccessDeniedError),
        ("nats: 'User Authentication Expired'", AccessDeniedError),
    ],
)
def test_a_server_that_had_no_time_to_look_at_credentials_has_not_refused_them(said, expected):
    link = object.__new__(Link)
    link._problem = None
    link._address = SimpleNamespace(shown=lambda: "nats://there", name="a")
    assert type(link._refusal(Exception(said))) is expected


@pytest.mark.parametrize("lost", [errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN])
def test_a_mount_whose_program_or_server_is_gone_comes_back(tmp_path, monkeypatch, lost):
    store = DirectoryStore(tmp_path)
    store.put("object", b"1")

    def gone(*_args, **_named):
        raise OSError(lost, "gone")

    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", gone)
        patched.setattr("os.open", gone)
        patched.setattr(Path, "open", gone)
        with pytest.raises(StoreUnavailableError):
            store.get("object")
    assert store.get("object") == b"1"


def test_a_disk_of_checkpoints_that_fails_does_not_end_the_supervisor(tmp_path, monkeypatch):
    def fails(*_args):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(Path, "glob", fails)
    assert supervisor.newest_part(tmp_path) is None
