#!/usr/bin/python3
"""A learner's machine copies the run's data from a bucket before the learner starts, on any disk."""

import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, "/opt/src/tests/systemd")

from rig import (
    BIN,
    BUCKET,
    ORIGIN,
    A,
    active,
    check,
    drop_in,
    failed,
    follow_page,
    journal,
    lay_out_boot,
    run,
    scenario,
    serve_bucket,
    until,
)

DATA = Path("/var/lib/diloco-data/tokens")
UNIT = "diloco-data.service"
WRITE = """
from pathlib import Path
from diloco.infra.google_units import data_units

for path, text in data_units("gs://bucket/tokens").items():
    (Path("/") / path).parent.mkdir(exist_ok=True)
    (Path("/") / path).write_text(text)
"""
TOKENIZER = """
import sys
from pathlib import Path
sys.path.insert(0, "/opt/src/tests")
from token_lab import make_texts, make_tokenizer
make_tokenizer(Path("/srv/tokenizer"))
make_texts(Path("/srv/texts"))
"""
EMULATED = {"STORAGE_EMULATOR_HOST": ORIGIN, "DILOCO_STORE_EMULATOR": "true"}
# In place of a learner: whether the data are there when it starts.
LOOKS = f"""[Service]
Type=oneshot
RemainAfterExit=yes
Restart=no
ExecStart=
ExecStart=/usr/bin/test -f {DATA}/tokens.json
"""


def in_a_bucket():
    Path("/etc/ld.so.conf.d/python.conf").write_text("/opt/python/lib\n")
    run("ldconfig")
    follow_page("units")
    serve_bucket()
    os.environ |= EMULATED
    run("/opt/diloco/bin/python", "-c", TOKENIZER)
    run(
        BIN, "data", "prepare", "/srv/texts", "--tokenizer", "/srv/tokenizer", "--out",
        "gs://bucket/tokens", "--shard-bytes", "10000", "--held-out", "0.1",
    )  # fmt: skip
    run("systemctl", "stop", BUCKET)
    run("python3", "-c", WRITE, cwd=lay_out_boot())
    drop_in(UNIT, "[Service]\n" + "".join(f"Environment={k}={v}\n" for k, v in EMULATED.items()))
    drop_in("diloco-learner@.service", LOOKS)
    run("systemctl", "daemon-reload")
    assert run("bash", "-c", f"systemd-analyze verify --man=no {UNIT} 2>&1") == ""


def files():
    return {path.name for path in DATA.glob("**/*") if path.is_file()}


def the_learner_waits_for_it():
    run("systemctl", "start", "--no-block", A)
    until(lambda: "error" in journal(UNIT), "the bucket is away")
    assert not active(A)
    assert not failed(A)
    run("systemctl", "start", BUCKET)
    until(lambda: active(A), "the learner finds its data")
    run(BIN, "check", str(DATA))
    check("a learner starts once its data are there, though the bucket was away at first")


def the_machine_returns():
    whole = files()
    run("systemctl", "stop", A, UNIT)
    shutil.rmtree(DATA.parent.resolve())
    DATA.parent.unlink(missing_ok=True)
    run("systemctl", "start", A)
    assert files() == whole
    check("a machine that returns with an empty disk copies all again")


scenario(in_a_bucket, the_learner_waits_for_it, the_machine_returns)
