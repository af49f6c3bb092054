"""A store folder that goes away and comes back: a transient fault, never a missing object."""

from pathlib import Path

import pytest

from diloco.common.protocol.errors import ObjectMissingError, StoreUnavailableError
from diloco.common.storage.store import DirectoryStore


@pytest.mark.parametrize("mount_point_stays", [False, True])
def test_everything_waits_and_nothing_is_missing(tmp_path: Path, mount_point_stays: bool):
    root, away = tmp_path / "store", tmp_path / "away"
    store = DirectoryStore(root)
    store.put("run/object", b"data")
    root.rename(away)
    if mount_point_stays:
        root.mkdir()
    for call in (
        lambda: store.get("run/object"),
        lambda: store.get("run/other"),
        lambda: store.put("run/new", b"new"),
        lambda: store.put("other/new", b"new"),
        lambda: store.list(""),
        lambda: store.delete("run/object"),
    ):
        with pytest.raises(StoreUnavailableError):
            call()
    if mount_point_stays:
        root.rmdir()  # still empty
    assert not root.exists()
    away.rename(root)
    assert store.get("run/object") == b"data"
    with pytest.raises(ObjectMissingError):
        store.get("run/new")
    store.put("run/new", b"new")
    assert [info.name for info in store.list("run/")] == ["run/new", "run/object"]
