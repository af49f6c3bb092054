"""A liar beside three honest learners, all of them processes: what each attack does to the run.

    .venv/bin/python -m bench.attack_live [--span 40] [--only NAME] [--merges rda,centered_clipping]

A nats-server with credentials and permissions (`diloco auth`), one aggregator, three learners that
train `examples/digits.py` at a pace that leaves most of a core idle, and a fourth with a credential
of its own that lies. Each attack has a run of its own: the honest train for a while (`--warm`
seconds, in which the liar joins and is no longer waited for), then for `--span` seconds without it,
and as long with it. Shown are versions a second and honest updates merged a second in both, the
held-out loss at the end over that of a run that nobody attacked, and what all processes but the
liar used of a core.
"""

import argparse
import asyncio
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli_w

from bench.flood import cpu_s, filling
from diloco.auth import files as auth
from diloco.common import log, names, shards, slices, wire
from diloco.common.bus import Bus, jetstream
from diloco.common.config import Config, load_config
from diloco.common.layout import Layout
from diloco.common.nats_server import NatsServer, free_port
from diloco.common.quantize import encode
from diloco.common.shards import shard_ranges
from diloco.common.store import DirectoryStore
from diloco.model.load import load
from diloco.operate.create import create
from examples import digits

RUN = "live"
HONEST = ("a", "b", "c")
LIAR = "liar"
STEPS = 1 << 20
INTERVAL = 24
STEP_S = 0.05
