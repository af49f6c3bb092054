"""Fixtures that several test folders share."""

import asyncio
import atexit
import gc
import itertools
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import pytest
import structlog
from hypothesis import settings
from jax._src.lru_cache import LRUCache

from diloco.common.process.nats_server import NatsServer

T = TypeVar("T")
_numbers = itertools.count()
# Devices for tests of learners that have several; whoever asks for none gets the first.
jax.config.update("jax_num_cpu_devices", 8)
# As every process but a learner.
jax.config.update("jax_platforms", "cpu")
# What an example takes tells how busy the machine is.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


def _share_compiled_programs() -> None:
    """Shares compiled programs between tests of all workers: compiling took half of their time."""
    folder = os.environ.get("TESTS_COMPILED")
    if folder is None:
        # Workers are started with it.
        folder = os.environ["TESTS_COMPILED"] = tempfile.mkdtemp(prefix="compiled-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # Processes that tests start have it in the user's cache.
    os.environ["XDG_CACHE_HOME"] = folder
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    put = LRUCache.put

    def put_whole(cache: LRUCache, key: str, value: bytes) -> None:
        """JAX writes in place, and warns where a worker reads what another is about to write."""
        with tempfile.TemporaryDirectory(dir=folder) as own:
            put(LRUCache(own, max_size=-1), key, value)
            for made in Path(own).iterdir():
                made.replace(Path(folder) / made.name)

    LRUCache.put = put_whole  # type: ignore[assignment]


_share_compiled_programs()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--share`, for a run that has no time for all long tests: the next one takes others."""
    parser.addoption(
        "--share", default="0/1", help="K/N: one share of the tests; with K from 0 to N - 1, all"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the share of the tests that was asked for; names decide, so that additions do not."""
    share, of = map(int, config.getoption("share").split("/"))
    if not 0 <= share < of:
        raise pytest.UsageError(f"--share {share}/{of}: expected K/N with K from 0 to N - 1")
    shares: list[list[pytest.Item]] = [[] for _ in range(of)]
    for item in items:
        shares[zlib.crc32(item.nodeid.encode()) % of].append(item)
    items[:] = shares.pop(share)
    config.hook.pytest_deselected(items=list(itertools.chain.from_iterable(shares)))


def pytest_collection_finish() -> None:
    """Freezes imported objects: no collection looks at them again (a third of many tests' time)."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown() -> None:
    """A command that ran in this process said where its logs go; later tests do not inherit it."""
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One nats-server with JetStream for the whole session; make streams of your own in it."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
def own_nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A nats-server for one test, which may kill and restart it."""
    with NatsServer(tmp_path / "own-nats") as server:
        yield server


@pytest.fixture
def unique() -> str:
    """A token no other test has, for names of streams and subjects."""
    return f"t{os.getpid()}n{next(_numbers)}"


@pytest.fixture
def run_async() -> Callable[[Coroutine[Any, Any, T]], T]:
    """Run a coroutine to its end in a loop of its own; what hangs meets the limit of a test."""

    def run(coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(coroutine)

    return run
