"""The store gs:// against Google's client library used bare: `python -m bench.store_gcs`.

Both talk to the same server of the tests (`tests/gcs_server.py`), a process of its own on this
machine, with the same bytes, in turns. What counts is the ratio of their times: the server shares
the cores with the client, so that neither figure is a limit of anything.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Protocol

from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

from bench.harness import median, seconds, table
from diloco.common.storage.store.gcs import open_gcs

SERVER = Path(__file__).parents[1] / "tests" / "gcs_server.py"
FLOOR = 0.85
MIB = 1 << 20
BUCKET = "bench"


class Transfers(Protocol):
    """The transfers that are measured."""

    def put(self, name: str, data: bytes) -> None:
        """Upload."""

    def get(self, name: str) -> bytes:
        """Download."""

    def delete(self, name: str) -> None:
        """Remove."""


class Bare:
    """The library as its manual shows it, create-only."""

    def __init__(self, url: str) -> None:
        client = storage.Client(
            project="bench",
            credentials=AnonymousCredentials(),
            client_options={"api_endpoint": url},
        )
        self._bucket = client.bucket(BUCKET)

    def put(self, name: str, data: bytes) -> None:
        """Upload."""
        self._bucket.blob(name).upload_from_string(
            data, content_type="application/octet-stream", if_generation_match=0
        )

    def get(self, name: str) -> bytes:
        """Download."""
        return bytes(self._bucket.blob(name).download_as_bytes())

    def delete(self, name: str) -> None:
        """Remove."""
        self._bucket.blob(name).delete()


def main() -> None:
    """Print the table; with --check, fail below the floor."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 64], help="in MiB")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--check", action="store_true", help="fail below the floor")
    options = parser.parse_args()
    rows = [["MiB", "in parallel", "way", "ours, MB/s", "bare, MB/s", "ratio"]]
    ratios = []
    with _server() as url:
        ours, bare = open_gcs(f"gs://{BUCKET}/ours", url), Bare(url)
        for size in options.sizes:
            for parallel in (1, 8):
                found = _measure(ours, bare, size * MIB, parallel, options.repeats)
                for way, (mine, theirs) in found.items():
                    ratio = median([a / b for a, b in zip(mine, theirs, strict=True)])
                    ratios.append(ratio)
                    speeds = [f"{median(each) / 1e6:.0f}" for each in (mine, theirs)]
                    rows.append([str(size), str(parallel), way, *speeds, f"{ratio:.0%}"])
    held = min(ratios) >= FLOOR
    print(table(rows))
    print(f"\nfloor of every ratio, {FLOOR:.0%}: {'held' if held else 'MISSED'}")
    if options.check and not held:
        sys.exit(1)


@contextmanager
def _server() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, str(SERVER), folder, "--bucket", BUCKET],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            process.communicate()


def _measure(
    ours: Transfers, bare: Transfers, size: int, parallel: int, repeats: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Bytes per second of ours and of the library, up and down, in turns; the first is thrown away.

    Small objects go several in a row, so that a measurement is more than some milliseconds.
    """
    data, number = os.urandom(size), count()
    row = max(1, 16 * MIB // size // parallel)
    found: dict[str, tuple[list[float], list[float]]] = {"up": ([], []), "down": ([], [])}
    with ThreadPoolExecutor(parallel) as pool:

        def speed(work: Callable[[str], object], names: list[str]) -> float:
            return size * len(names) / seconds(lambda: list(pool.map(work, names)))

        for turn in range(repeats + 1):
            pair = [(0, ours), (1, bare)]
            for which, store in pair if turn % 2 else reversed(pair):
                names = [f"o{next(number)}" for _ in range(row * parallel)]
                up = speed(lambda name, store=store: store.put(name, data), names)  # type: ignore[misc]
                down = speed(lambda name, store=store: store.get(name), names)  # type: ignore[misc]
                if turn:
                    found["up"][which].append(up)
                    found["down"][which].append(down)
                for name in names:
                    store.delete(name)
    return found


if __name__ == "__main__":
    main()
