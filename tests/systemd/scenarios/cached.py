#!/usr/bin/python3
"""Learners read versions through their region's cache, whose machine dies, stays away, and returns."""

import os
import re
import shutil
import sys
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, "/opt/src/tests/systemd")
sys.path.insert(0, "/opt/src/tests/systemd/released")

from cloud import Cloud
from rig import (
    ORIGIN,
    UNITS,
    A,
    B,
    actions,
    active,
    check,
    follow_page,
    install_as_the_page_says,
    restarts,
    run,
    scenario,
    serve_bucket,
    until,
    versions,
    versions_go_on,
    write_run_file,
)

CACHE = "diloco-cache.service"
TEMPLATE = Path("/opt/src/infra/terraform/modules/cache/nginx.conf.tftpl")
HERE, DISK = Path("/srv/configuration"), Path("/var/cache/diloco-cache")
AT = "127.0.0.1:9800"


def bucket():
    install_as_the_page_says()
    serve_bucket()
    os.environ["STORAGE_EMULATOR_HOST"] = ORIGIN
    store = f'url = "gs://bucket/runs"\nemulator = true\ncache = "http://{AT}/runs"'
    write_run_file(**{'url = "/srv/diloco"': store})
    follow_page("ports")
    for path in Path("/etc/diloco").glob("*.env"):
        path.write_text(f"{path.read_text()}STORAGE_EMULATOR_HOST={ORIGIN}\n")


def the_caches_machine_boots():
    HERE.mkdir()
    text = TEMPLATE.read_text()
    for key, value in {
        "user": "www-data", "folder": str(DISK), "max_size": "1g", "listen": AT, "prefix": "runs/demo",
        "origin": ORIGIN, "bucket": "bucket", "token": "/run/diloco-cache/token.conf",
    }.items():  # fmt: skip
        text = text.replace(f"${{{key}}}", value)
    (HERE / "cache.conf").write_text(text)
    status, said = Cloud(HERE).boot(
        role="cache", name="cache-us-central1", release={},
        files={"/etc/diloco/cache.conf": "cache.conf"}, secrets={}, environment={}, units=[],
    )  # fmt: skip
    assert status == 0, said
    until(nginx_listens, "nginx serves")
    assert run("bash", "-c", f"systemd-analyze verify --man=no {UNITS / CACHE} 2>&1") == ""


def nginx_listens():
    try:
        urllib.request.urlopen(f"http://{AT}/", timeout=5)
    except urllib.error.HTTPError as error:
        return error.code == 404
    except OSError:
        return False


def reads(outcome):
    """How often each learner has had this of the cache."""
    found = []
    for port in (9465, 9466):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            page = answer.read().decode()
        mine = re.findall(
            rf'^diloco_learner_cache_reads_total{{.*"{outcome}".*}} (\S+)$', page, re.MULTILINE
        )
        found.append(sum(map(float, mine)))
    return found


def more(outcome):
    before = reads(outcome)
    until(
        lambda: all(now > then for now, then in zip(reads(outcome), before, strict=True)),
        f"both learners count {outcome}",
    )


def read_through_it():
    follow_page("create")
    follow_page("start")
    until(lambda: versions() >= 6, "versions are made")
    until(lambda: sum(reads("hit")) >= 10, "a learner reads what the other one has read")
    assert list(DISK.glob("objects/**/*")), "nginx keeps objects"
    check("learners read versions through the cache, as the machine's boot program sets it up")


def its_machine_dies():
    run("systemctl", "kill", "--signal=SIGKILL", CACHE)
    run("systemctl", "stop", CACHE)
    shutil.rmtree(DISK)
    more("away")
    assert "cache_failed" in actions(A) | actions(B)
    versions_go_on()
    assert restarts(A) == restarts(B) == 0
    check("without the cache's machine they read from the bucket, and versions go on")


def it_returns():
    before = reads("miss")
    run("systemctl", "start", CACHE)
    until(nginx_listens, "nginx serves again")
    more("hit")
    assert sum(reads("miss")) > sum(before)
    versions_go_on()
    assert active(A)
    assert active(B)
    check("its machine returns with an empty disk, and they read through it again")


scenario(bucket, the_caches_machine_boots, read_through_it, its_machine_dies, it_returns)
