"""Instructions to fail, as Google's storage testbench names them, and what the store makes of each.

The names and their meanings are those of the testbench's README (Retry Test API and the older
header), as far as they concern HTTP; `redirect-...` exist over gRPC only. `tests/gcs_server.py`
obeys them, and `tests/integration/test_testbench.py` holds `expected`.
"""

import re
from collections.abc import Iterator
from typing import Any

OPERATIONS = ("put", "resumable upload", "get", "range", "list", "delete")
UPLOADS, READS = OPERATIONS[:2], OPERATIONS[2:4]
STALL_S = 1.0  # a test's wait between two bytes

INSTRUCTIONS = {
    "return-408": "the answer is 408",
    "return-429": "the answer is 429",
    "return-500": "the answer is 500",
    "return-502": "the answer is 502",
    "return-503": "the answer is 503",
    "return-504": "the answer is 504",
    "return-401": "the answer is 401",
    "return-403": "the answer is 403",
    "return-503-after-256K": "503 after 256 KiB of an upload",
    "return-503-after-256K/retry-2": "the same, twice",
    "return-broken-stream": "the answer breaks off after some bytes",
    "return-broken-stream-after-256K": "the answer breaks off after 256 KiB",
    "return-broken-stream-final-chunk-after-1024B": "the last request of an upload breaks off",
    "return-corrupted-data": "a byte of the answer is another one",
    "return-reset-connection": "the connection is reset",
    "stall-always": "nothing comes, from the beginning",
    "stall-for-2s-after-256K": "nothing comes after 256 KiB",
}
WORDS = {
    "again": "the request is made again, and succeeds; a download continues after the last whole MiB",
    "goes on": "only the bytes that are missing are sent",
    "checked": "the bytes do not match their crc32c, and are fetched again",
    "caller": "a range has no checksum: it is given out, and whoever reads ranges checks it",
    "told": "an error at once, which names the missing permission or credentials",
    "": "the instruction does not concern this operation",
}


def fault(instruction: str) -> dict[str, Any]:
    """Returns the arguments for `GcsServer.fail`."""
    times = int(found[1]) if (found := re.search(r"/retry-(\d+)$", instruction)) else 1
    kilobytes = re.search(r"-after-(\d+)K", instruction)
    after_bytes = int(kilobytes[1]) << 10 if kilobytes else 0
    if status := re.match(r"return-(\d{3})", instruction):
        return {
            "kind": "status",
            "status": int(status[1]),
            "after_bytes": after_bytes,
            "times": times,
        }
    if instruction.startswith("stall-"):
        return {"kind": "stall", "after_bytes": after_bytes}
    if final := re.search(r"final-chunk-after-(\d+)B", instruction):
        return {"kind": "reset", "after_bytes": int(final[1])}
    if instruction == "return-corrupted-data":
        return {"kind": "flip", "after_bytes": 1000}
    some = 4 if instruction == "return-broken-stream" else after_bytes
    return {"kind": "reset", "after_bytes": some}


def expected(instruction: str, operation: str) -> str:
    """One of `WORDS`."""
    if instruction in ("return-401", "return-403"):
        return "told"
    if instruction == "return-corrupted-data":
        return {"get": "checked", "range": "caller"}.get(operation, "")
    if "final-chunk" in instruction:
        return "again" if operation == "resumable upload" else ""
    if "broken-stream" in instruction:
        # The client hands out whole MiB: what has come of the first one is fetched again.
        return "again" if operation in READS else ""
    if "-after-" not in instruction:
        return "again"
    if operation == "resumable upload":
        return "goes on"
    if operation == "put":
        return "again"
    return "again" if operation in READS and instruction.startswith("stall") else ""


def cases() -> Iterator[tuple[str, str]]:
    """Each instruction with each operation that it concerns."""
    for instruction in INSTRUCTIONS:
        for operation in OPERATIONS:
            if expected(instruction, operation):
                yield instruction, operation
