"""Whole records for tests that care about a few of their fields."""

from typing import Any

from diloco.aggregator.core import memory
from diloco.aggregator.owner.committer import NOTHING
from diloco.common.protocol import wire

DIGEST = "0" * 32


def make_ref(name: str = "o") -> wire.ObjectRef:
    return wire.ObjectRef(name=name, size_bytes=1, crc32c=0)


def make_input(**changes: Any) -> wire.Input:
    fields: dict[str, Any] = {
        "learner": "a",
        "incarnation": 1,
        "seq": 1,
        "stream_seq": 1,
        "codec": "int4",
        "shards": (),
        "weight": 1.0,
        "staleness": 0,
        "discount": 1.0,
        "clip": 1.0,
        "norm": 1.0,
        "tokens": 1,
        "steps": 1,
        "loss": 1.0,
        "final": False,
        "coefficients": b"",
        "weight_unit": 0,
        "steps_credited": 1,
        "tokens_credited": 1,
        "announced_at_s": 0.0,
    }
    return wire.Input(**(fields | changes))


def make_record(**changes: Any) -> wire.Record:
    """The first version of a fragment, with `changes`; a field that no record has is refused."""
    fields: dict[str, Any] = {
        "what": "version",
        "run": "lab",
        "epoch": 0,
        "fragment": 0,
        "version": 0,
        "restored_version": None,
        "base_seq": 0,
        "base_digest": "",
        "layout": DIGEST,
        "global_step": 0,
        "inputs": (),
        "rejected": (),
        "reason": "created",
        "factors": b"",
        "learning_rate": 1.0,
        "momentum": 0.0,
        "delta": None,
        "snapshot": make_ref(),
        "snapshot_version": 0,
        "deltas": (),
        "outer": make_ref(),
        "outer_version": 0,
        "outer_seq": 0,
        "view_digest": DIGEST,
        "outer_digest": DIGEST,
        "position": 1,
        "totals": NOTHING,
        "observations": (),
        "policy": memory.beginning(),
        "final": False,
        "opened_at_s": 0.0,
        "quorum_at_s": 0.0,
        "closed_at_s": 0.0,
        "merged_at_s": 0.0,
        "aggregator": "lab",
        "attempt_id": "0",
        "previous": "",
        "release": "",
        "lock": "",
        "kept": b"",
        "radii": b"",
    }
    return wire.Record(**(fields | changes))


def make_member(name: str, steps_per_s: float) -> wire.MemberState:
    """A learner that takes part at a speed."""
    return wire.MemberState(
        learner=name, incarnation=1, live=True, left=False, final=False, step_time_s=0.1,
        weight=1.0, heard_at_s=0.0, offences=0, tokens_per_step=1.0, read_at_s=0.0,
        speed=steps_per_s, unused_s=0.0, norm=1.0, missed=0, not_holding=(),
    )  # fmt: skip
