"""Cores that a process may use: what it is bound to, and what its control group grants."""

import os

import pytest

from diloco.common.process import cores


@pytest.fixture
def group(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    cores.available.cache_clear()
    yield tmp_path
    cores.available.cache_clear()


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 16), ("400000 100000", 4), ("150000 100000", 2), ("20000 100000", 1),
     ("9900000 100000", 16), ("nonsense", 16), ("", 16)],
)  # fmt: skip
def test_no_more_cores_than_the_control_group_grants(group, quota, expected):
    (group / "cpu.max").write_text(quota)
    assert cores.available() == expected


def test_without_a_control_group_all_that_the_process_is_bound_to(group):
    assert cores.available() == 16
