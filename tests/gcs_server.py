"""Google Cloud Storage's JSON API over HTTP, as far as this project uses it, for tests and benches.

Follows the service's documented behaviour: uploads in one request, in two parts (metadata and
bytes) and resumable ones (308 with the range that has arrived; bytes already there are ignored),
preconditions on generations (412), ranges (206, 416), crc32c checked and given, listing in pages by
prefix, deletion, strong consistency. Objects and unfinished uploads are files in a folder, and
outlive the server. Faults happen on request: see `Fault`.

    python tests/gcs_server.py FOLDER --bucket NAME [--port 0] [--gbit 10]

prints its address on a line, and serves until it is ended.
"""

import argparse
import base64
import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import math
import secrets
import socket
import struct
import threading
import time
import urllib.parse
from collections import defaultdict
from collections.abc import Callable, Iterator
from email import message_from_bytes
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, Self

import google_crc32c

QUANTUM = 256 << 10  # of a resumable upload that goes on, and of what an interrupted one keeps
PIECE = 1 << 20


@dataclasses.dataclass
class Fault:
    """A fault of the server at matching requests.

    Attributes:
        kind: "status" answers with `status` and `message` after `after_bytes` of the request's body; "reset"
            breaks the connection after `after_bytes` of the request's body, or of the answer's if
            it has none; "lost" does what was asked and breaks the connection instead of answering;
            "stall" waits as long after as many bytes, for `stall_s` or until the server is closed,
            and breaks the connection; "truncate" ends the answer orderly after `after_bytes`;
            "trickle" sends a byte of the answer every `stall_s`; "flip" changes the byte at
            `after_bytes` of the body; "unfinished" takes all bytes of an upload session, and
            answers 308 without making the object; "without" leaves out the answer's header
            `message`; "empty" and "longer" send no byte of a range, and one more.
        method: of the requests, and `contains` a part of their target; "" matches all.
        times: requests that it happens to.
    """

    kind: Literal[
        "status",
        "reset",
        "lost",
        "stall",
        "truncate",
        "trickle",
        "flip",
        "unfinished",
        "without",
        "empty",
        "longer",
    ]
    method: str = ""
    contains: str = ""
    times: int = 1
    status: int = 503
    reason: str = "backendError"
    message: str = ""
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    after_bytes: int = 0
    stall_s: float = 3600.0


class BucketObject(NamedTuple):
    """An object's metadata; its bytes are in the file `path`."""

    bucket: str
    name: str
    size: int
    crc32c: str
    generation: int
    path: str
    encoding: str = ""


class Seen(NamedTuple):
    """A request that has come."""

    method: str
    target: str
    headers: dict[str, str]


class RefusedError(Exception):
    """A request is answered with an error."""

    def __init__(
        self, status: int, reason: str, message: str, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.headers = status, reason, message, headers


class BrokenError(Exception):
    """The connection ends here."""


class StalledError(BrokenError):
    """Nothing more happens for so long; then the connection ends."""

    def __init__(self, stall_s: float) -> None:
        super().__init__()
        self.stall_s = stall_s


def encode_crc32c(value: int) -> str:
    return base64.b64encode(value.to_bytes(4, "big")).decode()


class Link:
    """One way of a link that all requests share: bytes pass one after another.

    Attributes:
        carried: bytes that have passed.
    """

    def __init__(self, gbit: float) -> None:
        self.carried = 0
        self._s_per_byte = 8 / (gbit * 1e9)
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def carry(self, count: int) -> None:
        """Return once so many bytes have passed."""
        with self._lock:
            self.carried += count
            begins_s = max(self._free_at_s, time.monotonic())
            self._free_at_s = ends_s = begins_s + count * self._s_per_byte
        time.sleep(max(0.0, ends_s - time.monotonic()))


class GcsServer:
    """The server, on a thread of its own.

    Args:
        folder: keeps objects and unfinished uploads.
        buckets: that exist.
        host: address to listen on.
        gbit: what its link carries each way.
    """

    def __init__(
        self,
        folder: Path,
        *buckets: str,
        host: str = "127.0.0.1",
        port: int = 0,
        gbit: float = math.inf,
    ) -> None:
        self.up, self.down = Link(gbit), Link(gbit)
        self.buckets = set(buckets)
        self.requests: list[Seen] = []
        self.page_size = 1000
        self._folder = folder
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        # A client that gave up on a request and asks again speaks of the same bytes.
        self.sessions: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self.closing = threading.Event()
        # As Google's testbench: a session is complete before its condition is looked at, so that
        # it answers 200 although another object stands under the name.
        self.hasty = False
        # Called with the name before a session's object is made.
        self.before_finish: Callable[[str], object] = lambda _name: None
        (folder / "objects").mkdir(parents=True, exist_ok=True)
        (folder / "uploads").mkdir(exist_ok=True)
        self._objects: dict[tuple[str, str], BucketObject] = {}
        for path in (folder / "objects").glob("*.json"):
            stored = BucketObject(**json.loads(path.read_text()))
            self._objects[stored.bucket, stored.name] = stored
        self._last_generation = max((o.generation for o in self._objects.values()), default=0)
        self._http = _Http((host, port), _Handler)
        self._http.gcs = self
        self.port = self._http.server_address[1]
        self.url = f"http://{host}:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._http.shutdown()
        self._http.break_connections()
        self._http.server_close()

    def fail(self, kind: Any, **details: Any) -> Fault:
        """Make the next matching requests fail; see `Fault`."""
        fault = Fault(kind, **details)
        with self._lock:
            self._faults.append(fault)
        return fault

    def mend(self) -> None:
        """Forget all faults."""
        with self._lock:
            self._faults.clear()

    def count(self, method: str, contains: str = "") -> int:
        """Requests of a kind that have come."""
        return sum(seen.method == method and contains in seen.target for seen in self.requests)

    def note(self, method: str, target: str, headers: dict[str, str]) -> Fault | None:
        with self._lock:
            self.requests.append(Seen(method, target, headers))
            for fault in self._faults:
                if fault.times and fault.method in ("", method) and fault.contains in target:
                    fault.times -= 1
                    return fault
        return None

    # Objects.

    def check_bucket(self, bucket: str) -> None:
        if bucket not in self.buckets:
            raise RefusedError(404, "notFound", "The specified bucket does not exist.")

    def find(self, bucket: str, name: str, generation: str | None = None) -> BucketObject:
        self.check_bucket(bucket)
        with self._lock:
            stored = self._objects.get((bucket, name))
        if stored is None or generation not in (None, str(stored.generation)):
            raise RefusedError(404, "notFound", f"No such object: {bucket}/{name}")
        return stored

    def list(self, bucket: str, prefix: str) -> list[BucketObject]:
        self.check_bucket(bucket)
        with self._lock:
            found = [o for o in self._objects.values() if o.bucket == bucket]
        return sorted((o for o in found if o.name.startswith(prefix)), key=lambda o: o.name)

    def check_generation(self, bucket: str, name: str, query: dict[str, str]) -> None:
        """The condition ifGenerationMatch; call it with the lock held."""
        wanted = query.get("ifGenerationMatch")
        stored = self._objects.get((bucket, name))
        if wanted is not None and int(wanted) != (stored.generation if stored else 0):
            raise RefusedError(
                412,
                "conditionNotMet",
                "At least one of the pre-conditions you specified did not hold.",
            )

    def refuse_early(self, bucket: str, name: str, query: dict[str, str]) -> None:
        self.check_bucket(bucket)
        with self._lock:
            self.check_generation(bucket, name, query)

    def commit(
        self, bucket: str, metadata: dict[str, Any], query: dict[str, str], data: Path, crc: int
    ) -> BucketObject:
        """Make the file `data` an object."""
        actual, stated, name = encode_crc32c(crc), metadata.get("crc32c"), metadata["name"]
        if stated is not None and stated != actual:
            data.unlink()
            raise RefusedError(
                400,
                "invalid",
                f'Provided CRC32C "{stated}" doesn\'t match calculated CRC32C "{actual}".',
            )
        with self._lock:
            self.check_generation(bucket, name, query)
            self._last_generation = max(self._last_generation + 1, time.time_ns() // 1000)
            path = self._folder / "objects" / secrets.token_hex(16)
            data.rename(path)
            stored = BucketObject(
                bucket,
                name,
                path.stat().st_size,
                actual,
                self._last_generation,
                path.name,
                metadata.get("contentEncoding", ""),
            )
            before = self._objects.get((bucket, name))
            temp = path.with_suffix(".temp")
            temp.write_text(json.dumps(stored._asdict()))
            temp.rename(self._record(bucket, name))
            self._objects[bucket, name] = stored
        if before is not None:
            self.path(before).unlink()
        return stored

    def copy(self, stored: BucketObject, bucket: str, name: str) -> BucketObject:
        """The same bytes under another name."""
        self.check_bucket(bucket)
        with self._lock:
            self._last_generation = max(self._last_generation + 1, time.time_ns() // 1000)
            path = self._folder / "objects" / secrets.token_hex(16)
            path.hardlink_to(self.path(stored))
            copied = stored._replace(
                bucket=bucket, name=name, generation=self._last_generation, path=path.name
            )
            self._record(bucket, name).write_text(json.dumps(copied._asdict()))
            self._objects[bucket, name] = copied
        return copied

    def delete(self, bucket: str, name: str, query: dict[str, str]) -> None:
        stored = self.find(bucket, name, query.get("generation"))
        with self._lock:
            self.check_generation(bucket, name, query)
            if self._objects.pop((bucket, name), None) is not None:
                self._record(bucket, name).unlink()
                self.path(stored).unlink()

    def path(self, stored: BucketObject) -> Path:
        return self._folder / "objects" / stored.path

    def _record(self, bucket: str, name: str) -> Path:
        token = hashlib.sha256(f"{bucket}\n{name}".encode()).hexdigest()
        return self._folder / "objects" / f"{token}.json"

    # Resumable uploads: a record, and the bytes that have arrived.

    def temp(self) -> Path:
        return self._folder / "uploads" / secrets.token_hex(16)

    def open_upload(self, record: dict[str, Any]) -> str:
        path = self.temp()
        path.touch()
        path.with_suffix(".json").write_text(json.dumps(record))
        return path.name

    def find_upload(self, identity: str) -> tuple[Path, dict[str, Any]]:
        path = self._folder / "uploads" / identity
        if not identity.isalnum() or not path.with_suffix(".json").exists():
            raise RefusedError(404, "notFound", "Upload session not found.")
        return path, json.loads(path.with_suffix(".json").read_text())

    def close_upload(self, path: Path, record: dict[str, Any]) -> BucketObject:
        """Make an upload an object; the finished session goes on answering with it."""
        bucket, metadata, query = record["bucket"], record["metadata"], record["query"]
        session = path.with_suffix(".json")
        size, crc = path.stat().st_size, encode_crc32c(record["crc"])
        self.before_finish(metadata["name"])
        try:
            stored = self.commit(bucket, metadata, query, path, record["crc"])
        except RefusedError:
            path.unlink(missing_ok=True)
            if self.hasty:
                claimed = BucketObject(bucket, metadata["name"], size, crc, 1, "")
                session.write_text(json.dumps({**record, "stored": claimed._asdict()}))
            else:
                session.unlink()
            raise
        session.write_text(json.dumps({**record, "stored": stored._asdict()}))
        return stored


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    gcs: GcsServer

    def __init__(self, *arguments: Any) -> None:
        self._open: set[socket.socket] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def break_connections(self) -> None:
        for connection in [*self._open]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: object) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    rbufsize = PIECE
    server: _Http

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815 - the base class looks for these names

    def _serve(self) -> None:
        self.gcs = self.server.gcs
        url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        self.left = int(self.headers.get("Content-Length", 0))
        self.length = self.left
        self.fault = self.gcs.note(self.command, self.path, dict(self.headers))
        try:
            if self._failed_first():
                return
            try:
                self._route([urllib.parse.unquote(part) for part in url.path.split("/")[1:]])
            except RefusedError as error:
                self._drain()
                self._refuse(error.status, error.reason, error.message, error.headers)
        except (BrokenError, OSError) as error:
            if isinstance(error, StalledError):
                self.gcs.closing.wait(error.stall_s)
            self.close_connection = True
            self._break()

    def _route(self, path: list[str]) -> None:
        match [self.command, *path]:
            case ["POST", "upload", "storage", "v1", "b", bucket, "o"]:
                self._begin_upload(bucket)
            case ["PUT", "upload", "storage", "v1", "b", bucket, "o"]:
                self._continue_upload()
            case ["GET", "storage", "v1", "b", bucket]:
                self.gcs.check_bucket(bucket)
                self._answer(200, {"kind": "storage#bucket", "name": bucket, "location": "US"})
            case ["GET", "storage", "v1", "b", bucket, "o"]:
                self._list(bucket)
            case ["GET", *rest] if rest[-6:-3] == ["storage", "v1", "b"] and rest[-2] == "o":
                stored = self.gcs.find(rest[-3], rest[-1], self.query.get("generation"))
                if self.query.get("alt") == "media":
                    self._download(stored)
                else:
                    self._answer(200, _resource(stored))
            # The XML API, by which a cache reads.
            case ["GET", bucket, *name] if bucket in self.gcs.buckets:
                self._download(self.gcs.find(bucket, "/".join(name)))
            case ["DELETE", "storage", "v1", "b", bucket, "o", name]:
                self.gcs.delete(bucket, name, self.query)
                self._answer(204, None)
            case _:
                raise RefusedError(404, "notFound", f"no such method: {self.command} {self.path}")

    # Faults.

    def _failed_first(self) -> bool:
        """Whether a fault has answered for us."""
        fault = self.fault
        if fault is None or fault.after_bytes or fault.kind not in ("stall", "status"):
            return False
        if fault.kind == "stall":
            raise StalledError(fault.stall_s)
        self._drain()
        message = fault.message or f"fault {fault.status}"
        self._refuse(fault.status, fault.reason, message, fault.headers)
        return True

    def _fault_kind(self) -> str:
        return "" if self.fault is None else self.fault.kind

    def _is_fault(self, kind: str) -> bool:
        return self._fault_kind() == kind

    def _break(self) -> None:
        """End the connection with a reset, as a fallen link or server does."""
        with contextlib.suppress(OSError):
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            # The socket closes only with the files made from it.
            self.rfile.close()
            self.wfile.close()
            self.connection.close()

    # Bodies.

    def _pieces(self) -> Iterator[bytes]:
        """The request's body, with its faults."""
        fault, done = self.fault, 0
        while self.left:
            limit = min(self.left, PIECE)
            if fault is not None and fault.kind in ("reset", "stall", "status"):
                limit = min(limit, fault.after_bytes - done)
                if limit <= 0:
                    self._fail(fault)
            piece = self.rfile.read(limit)
            if len(piece) < limit:
                raise BrokenError
            self.left -= len(piece)
            self.gcs.up.carry(len(piece))
            if fault is not None and fault.kind == "flip":
                piece = _flipped(piece, fault.after_bytes - done)
            done += len(piece)
            yield piece

    def _fail(self, fault: Fault) -> NoReturn:
        """In the middle of a request's body."""
        if fault.kind == "stall":
            raise StalledError(fault.stall_s)
        if fault.kind == "status":
            raise RefusedError(fault.status, fault.reason, f"fault {fault.status}", fault.headers)
        raise BrokenError

    def _drain(self) -> None:
        while self.left:
            piece = self.rfile.read(min(self.left, PIECE))
            if not piece:
                raise BrokenError
            self.left -= len(piece)

    def _answer(self, status: int, document: Any, headers: dict[str, str] | None = None) -> None:
        if self._is_fault("lost"):
            raise BrokenError
        body = b"" if document is None else json.dumps(document).encode()
        self.send_response(status)
        self._send_headers(headers or {})
        if document is not None:
            self.send_header("Content-Type", "application/json; charset=UTF-8")
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_headers(self, headers: dict[str, str]) -> None:
        fault = self.fault
        left_out = fault.message if fault is not None and fault.kind == "without" else None
        for key in headers.keys() - {left_out}:
            self.send_header(key, headers[key])

    def _refuse(
        self, status: int, reason: str, message: str, headers: dict[str, str] | None = None
    ) -> None:
        detail = {"message": message, "domain": "global", "reason": reason}
        error = {"code": status, "message": message, "errors": [detail]}
        self._answer(status, {"error": error}, headers)

    # Uploads.

    def _begin_upload(self, bucket: str) -> None:
        self.gcs.check_bucket(bucket)
        match self.query.get("uploadType"):
            case "media":
                self._finish(bucket, {"name": self.query["name"]}, b"".join(self._pieces()))
            case "multipart":
                self._finish(bucket, *self._two_parts())
            case "resumable":
                self._begin_resumable(bucket)
            case other:
                raise RefusedError(400, "invalid", f"uploadType {other!r}")

    def _two_parts(self) -> tuple[dict[str, Any], bytes]:
        """Metadata and bytes of a multipart/related body."""
        body = b"".join(self._pieces())
        head = message_from_bytes(f"Content-Type: {self.headers['Content-Type']}\n\n".encode())
        boundary = b"--" + str(head.get_param("boundary")).strip("'\"").encode()
        first, _, rest = body.partition(boundary + b"\r\n")[2].partition(b"\r\n" + boundary)
        metadata = json.loads(first.partition(b"\r\n\r\n")[2])
        begin, end = rest.index(b"\r\n\r\n") + 4, rest.rindex(b"\r\n" + boundary + b"--")
        return {"name": self.query.get("name"), **metadata}, rest[begin:end]

    def _finish(self, bucket: str, metadata: dict[str, Any], data: bytes) -> None:
        path = self.gcs.temp()
        path.write_bytes(data)
        try:
            stored = self.gcs.commit(bucket, metadata, self.query, path, google_crc32c.value(data))
        finally:
            path.unlink(missing_ok=True)
        self._answer(200, _resource(stored))

    def _begin_resumable(self, bucket: str) -> None:
        metadata = json.loads(b"".join(self._pieces()) or b"{}")
        metadata = {"name": self.query.get("name"), **metadata}
        self.gcs.refuse_early(bucket, metadata["name"], self.query)
        record = {"bucket": bucket, "metadata": metadata, "query": self.query, "crc": 0}
        identity = self.gcs.open_upload(record)
        target = f"/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={identity}"
        self._answer(200, {}, {"Location": f"http://{self.headers['Host']}{target}"})

    def _continue_upload(self) -> None:
        identity = self.query["upload_id"]
        with self.gcs.sessions[identity]:
            self._continue_session(*self.gcs.find_upload(identity))

    def _continue_session(self, path: Path, record: dict[str, Any]) -> None:
        if "stored" in record:
            self._drain()
            self._answer(200, _resource(BucketObject(**record["stored"])))
            return
        span, _, total = self.headers["Content-Range"].removeprefix("bytes ").partition("/")
        have = path.stat().st_size
        if span != "*":
            have = self._append(path, record, int(span.partition("-")[0]), have, total)
        if total == str(have) and not self._is_fault("unfinished"):
            stored = self.gcs.close_upload(path, record)
            self._answer(200, _resource(stored))
            return
        self._answer(308, None, {"Range": f"bytes=0-{have - 1}"} if have else {})

    def _append(self, path: Path, record: dict[str, Any], start: int, have: int, total: str) -> int:
        """Take the body's bytes beyond those already there; the bytes that are there then."""
        if start > have:
            raise RefusedError(400, "invalid", f"bytes {have} to {start} are missing")
        if (total == "*" or start + self.length < int(total)) and self.length % QUANTUM:
            raise RefusedError(400, "invalid", "a part is no multiple of 256 KiB")
        position = start
        try:
            with path.open("ab") as file:
                for piece in self._pieces():
                    fresh = piece[max(0, have - position) :]
                    position += len(piece)
                    file.write(fresh)
                    if fresh:
                        record["crc"] = google_crc32c.extend(record["crc"], fresh)
                        have = position
        except (BrokenError, RefusedError):
            self._keep_whole_quanta(path, record, have)
            raise
        path.with_suffix(".json").write_text(json.dumps(record))
        return have

    @staticmethod
    def _keep_whole_quanta(path: Path, record: dict[str, Any], have: int) -> None:
        kept = path.read_bytes()[: have // QUANTUM * QUANTUM]
        path.write_bytes(kept)
        crc = google_crc32c.value(kept)
        path.with_suffix(".json").write_text(json.dumps({**record, "crc": crc}))

    # Downloads and lists.

    def _download(self, stored: BucketObject) -> None:
        start, stop, status = 0, stored.size, 200
        asked = self.headers.get("Range")
        headers = {
            "x-goog-hash": f"crc32c={stored.crc32c}",
            "x-goog-generation": str(stored.generation),
            "x-goog-stored-content-length": str(stored.size),
        }
        if stored.encoding:
            headers["x-goog-stored-content-encoding"] = stored.encoding
            if stored.encoding not in self.headers.get("Accept-Encoding", ""):
                # The service decodes for who does not, and then knows of no ranges.
                decoded = gzip.decompress(self.gcs.path(stored).read_bytes())
                self._send_file(io.BytesIO(decoded), 0, len(decoded), 200, headers)
                return
            headers["Content-Encoding"] = stored.encoding
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start = int(first) if first else max(0, stored.size - int(last))
            stop = min(stored.size, int(last) + 1) if first and last else stored.size
            if start >= stored.size:
                raise RefusedError(
                    416,
                    "requestedRangeNotSatisfiable",
                    "The requested range cannot be satisfied.",
                    {"Content-Range": f"bytes */{stored.size}"},
                )
            status = 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{stored.size}"
        with self.gcs.path(stored).open("rb") as file:
            self._send_file(file, start, stop, status, headers)

    def _trickle(self, data: bytes, every_s: float) -> None:
        for at in range(len(data)):
            if self.gcs.closing.wait(every_s):
                raise BrokenError
            self.wfile.write(data[at : at + 1])
            self.wfile.flush()

    def _send_file(
        self, file: Any, start: int, stop: int, status: int, headers: dict[str, str]
    ) -> None:
        if self._is_fault("lost"):
            raise BrokenError
        self.send_response(status)
        length = {"empty": 0, "longer": stop - start + 1}.get(self._fault_kind(), stop - start)
        headers |= {"Content-Type": "application/octet-stream", "Content-Length": str(length)}
        self._send_headers(headers)
        self.end_headers()
        self.wfile.flush()
        file.seek(start)
        fault = self.fault
        self.gcs.down.carry(stop - start)
        if fault is None:
            self.connection.sendfile(file, start, stop - start)
            return
        data = file.read(stop - start)
        if fault.kind in ("empty", "longer"):
            data = (data + b"x")[:length]
        if fault.kind == "flip":
            data = _flipped(data, fault.after_bytes)
        if fault.kind in ("reset", "truncate", "stall"):
            data = data[: fault.after_bytes]
        if fault.kind == "trickle":
            self._trickle(data, fault.stall_s)
            return
        self.wfile.write(data)
        if fault.kind == "stall":
            raise StalledError(fault.stall_s)
        if fault.kind == "truncate":
            self.connection.shutdown(socket.SHUT_WR)
            self.close_connection = True
        if fault.kind == "reset":
            time.sleep(0.05)  # What was sent may arrive before the reset does.
            raise BrokenError

    def _list(self, bucket: str) -> None:
        found = self.gcs.list(bucket, self.query.get("prefix", ""))
        after = self.query.get("pageToken")
        if after is not None:
            last = base64.urlsafe_b64decode(after).decode()
            found = [stored for stored in found if stored.name > last]
        count = min(int(self.query.get("maxResults", 1000)), self.gcs.page_size)
        page, more = found[:count], len(found) > count
        document: dict[str, Any] = {"kind": "storage#objects"}
        if page:
            document["items"] = [_resource(stored) for stored in page]
        if more:
            document["nextPageToken"] = base64.urlsafe_b64encode(page[-1].name.encode()).decode()
        self._answer(200, document)


def _flipped(piece: bytes, at: int) -> bytes:
    if not 0 <= at < len(piece):
        return piece
    return piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]


def _resource(stored: BucketObject) -> dict[str, Any]:
    """An object as the service describes it; servers that write protobuf leave out what is 0."""
    resource = {
        "kind": "storage#object",
        "id": f"{stored.bucket}/{stored.name}/{stored.generation}",
        "bucket": stored.bucket,
        "name": stored.name,
        "size": str(stored.size),
        "crc32c": stored.crc32c,
        "generation": str(stored.generation),
        "metageneration": "1",
    }
    if not stored.size:
        del resource["size"]
    return resource


def main() -> None:
    parser = argparse.ArgumentParser(description="Google Cloud Storage's JSON API, for tests")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--gbit", type=float, default=math.inf)
    arguments = parser.parse_args()
    place = {"host": arguments.host, "port": arguments.port}
    with GcsServer(arguments.folder, arguments.bucket, gbit=arguments.gbit, **place) as server:
        print(server.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
