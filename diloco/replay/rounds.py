"""Rounds made again with a part of what they were: inputs as the machine admitted them, arrays."""

from dataclasses import replace

from diloco.aggregator.arrays.fragment import FragmentArrays
from diloco.aggregator.core import policy
from diloco.aggregator.core.updates import Admitted, Credit
from diloco.common import cores, shards, wire
from diloco.common.config import RunSettings
from diloco.common.errors import IntegrityError
from diloco.common.tape import get_object
from diloco.projections.history import History


def load_arrays(history: History, record: wire.Record) -> FragmentArrays:
    """The arrays that a record has stored.

    Raises:
        IntegrityError, ObjectMissingError: they are damaged, not the record's, or gone.
    """
    arrays = FragmentArrays.from_objects(
        history.settings,
        history.layout,
        record.fragment,
        view=get_object(history.store, record.snapshot),
        outer_state=get_object(history.store, record.outer),
        threads=cores.available(),
    )
    found = (shards.digest(arrays.view), arrays.outer_digest())
    if found != (said := (record.view_digest, record.outer_digest)):
        raise IntegrityError(
            f"version {record.version} of fragment {record.fragment} has the digests {found} as "
            f"it is stored, and its record says {said}"
        )
    return arrays


def copy_arrays(arrays: FragmentArrays) -> FragmentArrays:
    """The same arrays, to be changed."""
    state = {name: slot.copy() for name, slot in arrays.state.items()}
    return replace(arrays, view=arrays.view.copy(), theta=arrays.theta.copy(), state=state)


def settings_at(history: History, seq: int) -> RunSettings:
    """The settings that a message of the tape put in force; 0: the specification's."""
    return history.changes[seq] if seq else history.settings


def admitted_again(record: wire.Record, taken: wire.Input, settings: RunSettings) -> Admitted:
    """A recorded input as the machine admitted it, with the discount of other settings."""
    discount = policy.discount(settings.staleness, taken.staleness)
    return Admitted(
        _manifest(record, taken),
        taken.stream_seq,
        Credit(taken.believed_steps, taken.believed_tokens, taken.weight),
        taken.staleness,
        discount,
        taken.clip,
        taken.norm,
    )


def _manifest(record: wire.Record, taken: wire.Input) -> wire.Manifest:
    """The manifest of a recorded input; the tape may have it no more.

    What no record keeps of it, and no merge reads, is 0.
    """
    return wire.Manifest(
        run=record.run,
        learner=taken.learner,
        epoch=record.epoch,
        incarnation=taken.incarnation,
        seq=taken.seq,
        fragment=record.fragment,
        base_version=max(0, record.version - 1 - taken.staleness),
        base_digest="0" * 32,
        layout=record.layout,
        codec=taken.codec,  # type: ignore[arg-type]
        shards=taken.shards,
        tokens=taken.tokens,
        steps=taken.steps,
        position=0,
        local_step=0,
        loss=taken.loss,
        step_time_s=0.0,
        encode_s=0.0,
        upload_s=0.0,
        attempt=0,
        final=taken.final,
    )
