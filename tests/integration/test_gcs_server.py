"""The tests' own server does what Google documents of its JSON API, asked over plain HTTP."""

import base64
import http.client
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from gcs_server import QUANTUM, GcsServer

UPLOAD = "/upload/storage/v1/b/bucket/o?uploadType="
OBJECTS = "/storage/v1/b/bucket/o"
DATA = os.urandom(3 * QUANTUM + 100)
SIZE = len(DATA)


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GcsServer]:
    with GcsServer(tmp_path, "bucket") as server:
        yield server


def ask(server: GcsServer, method: str, target: str, body: bytes = b"", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    try:
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        connection.request(method, target, body, named)
        response = connection.getresponse()
        return Answer(response.status, dict(response.headers), response.read())
    finally:
        connection.close()


def put(server: GcsServer, name: str, data: bytes, query: str = "") -> Answer:
    return ask(server, "POST", f"{UPLOAD}media&name={name}{query}", data)


def media(server: GcsServer, name: str, query: str = "", **headers: str) -> Answer:
    return ask(server, "GET", f"/download{OBJECTS}/{name}?alt=media{query}", **headers)


def crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


def two_parts(metadata: dict[str, str], data: bytes) -> bytes:
    head = f"--xyz\r\ncontent-type: application/json\r\n\r\n{json.dumps(metadata)}\r\n"
    return head.encode() + b"--xyz\r\ncontent-type: x/y\r\n\r\n" + data + b"\r\n--xyz--"


def begin(server: GcsServer, metadata: dict[str, str], query: str = "") -> str:
    answer = ask(server, "POST", f"{UPLOAD}resumable{query}", json.dumps(metadata).encode())
    assert answer.status == 200
    return answer.headers["Location"].removeprefix(server.url)


def test_a_simple_upload_and_its_resource(server: GcsServer) -> None:
    first = put(server, "a", DATA)
    assert first.status == 200
    resource = first.document
    assert (resource["name"], resource["size"]) == ("a", str(SIZE))
    assert resource["crc32c"] == crc32c(DATA)
    assert ask(server, "GET", f"{OBJECTS}/a").document == resource
    second = put(server, "a", b"2").document
    assert int(second["generation"]) > int(resource["generation"])
    assert media(server, "a").body == b"2"


def test_a_name_may_have_slashes(server: GcsServer) -> None:
    put(server, "x%2Fy", b"1")
    assert media(server, "x%2Fy").body == b"1"
    assert ask(server, "GET", f"{OBJECTS}/x%2Fy").document["name"] == "x/y"


@pytest.mark.parametrize("data", [b"", b"\r\n--xyz", b"\r\n\r\n", DATA])
def test_an_upload_in_two_parts(server: GcsServer, data: bytes) -> None:
    body = two_parts({"name": "a", "crc32c": crc32c(data)}, data)
    kind = "multipart/related; boundary=xyz"
    assert ask(server, "POST", f"{UPLOAD}multipart", body, Content_Type=kind).status == 200
    assert media(server, "a").body == data


def test_a_checksum_that_does_not_match_is_refused(server: GcsServer) -> None:
    body = two_parts({"name": "a", "crc32c": crc32c(b"other")}, DATA)
    kind = "multipart/related; boundary=xyz"
    answer = ask(server, "POST", f"{UPLOAD}multipart", body, Content_Type=kind)
    assert answer.status == 400
    assert "CRC32C" in answer.document["error"]["message"]
    assert media(server, "a").status == 404


def test_generations_as_conditions(server: GcsServer) -> None:
    one = put(server, "a", b"1", "&ifGenerationMatch=0").document
    refused = put(server, "a", b"2", "&ifGenerationMatch=0")
    assert refused.status == 412
    assert refused.document["error"]["errors"][0]["reason"] == "conditionNotMet"
    assert media(server, "a").body == b"1"
    two = put(server, "a", b"2", f"&ifGenerationMatch={one['generation']}")
    assert two.status == 200
    generation = two.document["generation"]
    assert media(server, "a", f"&generation={one['generation']}").status == 404
    assert media(server, "a", f"&generation={generation}").body == b"2"
    wrong = ask(server, "DELETE", f"{OBJECTS}/a?ifGenerationMatch={one['generation']}")
    assert wrong.status == 412
    assert ask(server, "DELETE", f"{OBJECTS}/a?ifGenerationMatch={generation}").status == 204
    assert put(server, "a", b"3", "&ifGenerationMatch=0").status == 200


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("bytes=0-9", 0, 10),
        ("bytes=10-10", 10, 11),
        ("bytes=100-", 100, SIZE),
        ("bytes=-7", SIZE - 7, SIZE),
        (f"bytes=5-{SIZE + 99}", 5, SIZE),
    ],
)
def test_ranges(server: GcsServer, asked: str, start: int, stop: int) -> None:
    put(server, "a", DATA)
    answer = media(server, "a", Range=asked)
    assert answer.status == 206
    assert answer.body == DATA[start:stop]
    assert answer.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{SIZE}"
    # Of the whole object, also with a range.
    assert answer.headers["x-goog-hash"] == f"crc32c={crc32c(DATA)}"
    assert answer.headers["x-goog-stored-content-length"] == str(SIZE)


def test_a_range_beyond_the_object(server: GcsServer) -> None:
    put(server, "empty", b"")
    assert media(server, "empty", Range="bytes=0-9").status == 416
    assert media(server, "empty").body == b""
    put(server, "a", DATA)
    assert media(server, "a", Range=f"bytes={SIZE}-").status == 416


def test_lists_in_order_by_prefix_and_in_pages(server: GcsServer) -> None:
    for name in ("b%2F2", "a", "b%2F10", "b"):
        put(server, name, b"1")
    assert [o["name"] for o in ask(server, "GET", OBJECTS).document["items"]] == [
        "a",
        "b",
        "b/10",
        "b/2",
    ]
    first = ask(server, "GET", f"{OBJECTS}?prefix=b&maxResults=2").document
    assert [o["name"] for o in first["items"]] == ["b", "b/10"]
    token = first["nextPageToken"]
    rest = ask(server, "GET", f"{OBJECTS}?prefix=b&maxResults=2&pageToken={token}").document
    assert [o["name"] for o in rest["items"]] == ["b/2"]
    assert "nextPageToken" not in rest
    assert "items" not in ask(server, "GET", f"{OBJECTS}?prefix=z").document


def test_what_is_missing(server: GcsServer) -> None:
    for method in ("GET", "DELETE"):
        answer = ask(server, method, f"{OBJECTS}/none")
        assert answer.status == 404
        assert answer.document["error"]["message"] == "No such object: bucket/none"
    elsewhere = ask(server, "GET", "/storage/v1/b/other/o")
    assert elsewhere.status == 404
    assert elsewhere.document["error"]["message"] == "The specified bucket does not exist."


def test_a_resumable_upload_tells_what_it_has_and_ignores_what_comes_twice(
    server: GcsServer,
) -> None:
    session = begin(server, {"name": "a", "crc32c": crc32c(DATA)})
    query = {"Content_Range": f"bytes */{SIZE}"}
    nothing = ask(server, "PUT", session, **query)
    assert nothing.status == 308
    assert "Range" not in nothing.headers
    part = ask(
        server, "PUT", session, DATA[:QUANTUM], Content_Range=f"bytes 0-{QUANTUM - 1}/{SIZE}"
    )
    assert (part.status, part.headers["Range"]) == (308, f"bytes=0-{QUANTUM - 1}")
    assert ask(server, "PUT", session, **query).headers["Range"] == f"bytes=0-{QUANTUM - 1}"
    assert media(server, "a").status == 404
    last = ask(server, "PUT", session, DATA, Content_Range=f"bytes 0-{SIZE - 1}/{SIZE}")
    assert last.status == 200
    assert media(server, "a").body == DATA
    # A finished session answers with its object.
    assert ask(server, "PUT", session, **query).document == last.document


def test_a_resumable_upload_refuses_gaps_and_odd_parts(server: GcsServer) -> None:
    session = begin(server, {"name": "a"})
    odd = ask(server, "PUT", session, DATA[:100], Content_Range=f"bytes 0-99/{SIZE}")
    assert odd.status == 400
    gap = ask(
        server,
        "PUT",
        session,
        DATA[QUANTUM : 2 * QUANTUM],
        Content_Range=f"bytes {QUANTUM}-{2 * QUANTUM - 1}/{SIZE}",
    )
    assert gap.status == 400
    assert ask(server, "PUT", session.replace("upload_id=", "upload_id=x")).status == 404


def test_a_resumable_upload_is_conditional_at_both_ends(server: GcsServer) -> None:
    session = begin(server, {"name": "a"}, "&ifGenerationMatch=0")
    put(server, "a", b"first")
    last = ask(server, "PUT", session, DATA, Content_Range=f"bytes 0-{SIZE - 1}/{SIZE}")
    assert last.status == 412
    assert media(server, "a").body == b"first"
    body = json.dumps({"name": "a"}).encode()
    assert ask(server, "POST", f"{UPLOAD}resumable&ifGenerationMatch=0", body).status == 412


def test_objects_and_uploads_outlive_the_server(tmp_path: Path) -> None:
    with GcsServer(tmp_path, "bucket") as first:
        resource = put(first, "kept", DATA).document
        put(first, "gone", DATA)
        ask(first, "DELETE", f"{OBJECTS}/gone")
        session = begin(first, {"name": "a", "crc32c": crc32c(DATA)})
        span = f"bytes 0-{QUANTUM - 1}/{SIZE}"
        ask(first, "PUT", session, DATA[:QUANTUM], Content_Range=span)
    with GcsServer(tmp_path, "bucket") as second:
        assert ask(second, "GET", OBJECTS).document["items"] == [resource]
        assert media(second, "kept").body == DATA
        span = f"bytes {QUANTUM}-{SIZE - 1}/{SIZE}"
        assert ask(second, "PUT", session, DATA[QUANTUM:], Content_Range=span).status == 200
        assert media(second, "a").body == DATA
        assert int(put(second, "kept", b"").document["generation"]) > int(resource["generation"])


def test_faults_hit_what_they_name_as_often_as_they_say(server: GcsServer) -> None:
    put(server, "a", DATA)
    server.fail("status", contains="/a?", status=429, headers={"Retry-After": "3"}, times=2)
    assert ask(server, "GET", OBJECTS).status == 200
    for _ in range(2):
        answer = media(server, "a")
        assert (answer.status, answer.headers["Retry-After"]) == (429, "3")
    assert media(server, "a").body == DATA


@pytest.mark.parametrize("kind", ["reset", "truncate"])
def test_an_answer_that_ends_early(server: GcsServer, kind: str) -> None:
    put(server, "a", DATA)
    server.fail(kind, method="GET", after_bytes=1000)
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        media(server, "a")
    assert media(server, "a").body == DATA


def test_damage_on_the_way(server: GcsServer) -> None:
    put(server, "a", DATA)
    server.fail("flip", method="GET", after_bytes=1000)
    body = media(server, "a").body
    assert [i for i in range(SIZE) if body[i] != DATA[i]] == [1000]
    server.fail("flip", method="POST", after_bytes=1000)
    assert put(server, "b", DATA).document["crc32c"] != crc32c(DATA)


@pytest.mark.parametrize("kind", ["lost", "reset", "stall"])
def test_a_request_without_an_answer(server: GcsServer, kind: str) -> None:
    server.fail(kind, method="POST", after_bytes=1000, stall_s=0.1)
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        put(server, "a", DATA)
    # Only the lost answer was to something done.
    assert media(server, "a").status == (200 if kind == "lost" else 404)


def test_an_interrupted_part_keeps_its_whole_pieces(server: GcsServer) -> None:
    session = begin(server, {"name": "a", "crc32c": crc32c(DATA)})
    server.fail("reset", method="PUT", after_bytes=2 * QUANTUM + 5)
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        ask(server, "PUT", session, DATA, Content_Range=f"bytes 0-{SIZE - 1}/{SIZE}")
    answer = ask(server, "PUT", session, Content_Range=f"bytes */{SIZE}")
    assert (answer.status, answer.headers["Range"]) == (308, f"bytes=0-{2 * QUANTUM - 1}")
    span = f"bytes {2 * QUANTUM}-{SIZE - 1}/{SIZE}"
    assert ask(server, "PUT", session, DATA[2 * QUANTUM :], Content_Range=span).status == 200
    assert media(server, "a").body == DATA
