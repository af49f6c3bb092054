"""A dry run of a learner: its figures are those of the arrays that a learner has."""

import dataclasses
import io
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from diloco.common.process.config import make_config
from diloco.common.protocol import shards
from diloco.common.protocol.codecs import Encoded
from diloco.common.protocol.errors import ConfigError
from diloco.learner.collectives import exchanges, received_by_kind
from diloco.learner.dry_run import (
    checkpoint_copies,
    dry_run,
    fragment_shapes,
    measured,
    stand_in,
)
from diloco.learner.island import Island
from diloco.learner.tensors.quantize_and_pack import encode
from diloco.operate.daemons.command import LearnerOptions
from diloco.operate.daemons.dry_run import as_json, check_fits, run_dry, show


def config_of(mesh="fsdp=4,tensor=2", preset="1m", **sync):
    return make_config(
        {
            "run": {"name": "small", "steps": 100},
            "task": {"options": {"preset": preset, "length": 16, "batch": 8, "optimizer": "muon"}},
            "sync": {"fragments": 4, "interval_steps": 8, **sync},
            "store": {"url": "unused"},
            "learner": {"mesh": mesh},
        },
        source="test",
    )


def on_first(arrays) -> int:
    """Bytes of arrays on the first device."""
    first = jax.devices()[0]
    return sum(
        shard.data.nbytes
        for array in jax.tree.leaves(arrays)
        for shard in array.addressable_shards
        if shard.device == first
    )


@pytest.fixture(scope="module")
def found():
    return dry_run(config_of(anchor="host"), "l0", hosts=2)


@pytest.mark.long
def test_bytes_are_those_that_a_learner_allocates(found):
    config = config_of(anchor="host")
    island = Island(config, "l0")
    views = [np.zeros(fragment.size, np.float32) for fragment in island.layout.fragments]
    with island.context():
        replica = island.replica(iter(views))
        memory = found.memory
        assert memory.parameters == on_first(replica.trained)
        assert memory.optimizer == on_first(island.init_state(replica.trained))
        assert memory.anchor == 0
        assert memory.host_anchor == 4 * on_first(replica._views)
        assert memory.batch == on_first(next(island.feed(0))) + np.int32().nbytes
        learner, fragments = config.learner, fragment_shapes(island)
        assert checkpoint_copies(learner, memory.optimizer, fragments) == memory.checkpoint == 0
        saves = learner.model_copy(update={"checkpoint_dir": Path("here")})
        assert checkpoint_copies(saves, memory.optimizer, fragments) == memory.optimizer
        snaps = saves.model_copy(update={"snapshot_steps": 2})
        unsent = on_first(replica.unsent())
        assert unsent == 2 * memory.parameters
        most = unsent + max(memory.optimizer, unsent)
        assert checkpoint_copies(snaps, memory.optimizer, fragments) == most
        sent = [replica.send(fragment) for fragment in range(4)]
        assert memory.in_flight == on_first(sent)
        assert sum(host.bytes_up for host in found.traffic) == sum(
            shards.shard_bytes("int4", len(rows.scales) * 64, 64) + shards.HEADER.size
            for rows in (replica.collect(index, codes) for index, codes in enumerate(sent))
        )
    leaves = jax.tree.leaves(island.shapes)
    assert found.parameters == sum(math.prod(leaf.shape) for leaf in leaves)
    assert memory.activations > 0
    assert memory.training > memory.start - memory.parameters > 2 * memory.parameters


def test_a_fragment_is_moved_and_not_its_whole_tensors(found):
    """Work on a fragment's rows costs what the rows cost, however large the tensors are."""
    for one in found.fragments:
        rows_bytes = 4 * one.elements / 8
        assert 2 * rows_bytes < one.send.moved_bytes < 12 * rows_bytes
        assert 6 * rows_bytes < one.adopt.moved_bytes < 24 * rows_bytes
        assert one.send.largest_bytes < 1.2 * rows_bytes
        assert one.adopt.largest_bytes < 1.2 * rows_bytes
        assert one.adopt.extra_bytes < 8 * rows_bytes


@pytest.mark.parametrize("adopt", ["rebase", "blend", "overwrite"])
def test_nothing_is_exchanged_where_blocks_lie_as_tensors_do(adopt):
    island = Island(config_of("fsdp=2,data=4", block=16, adopt=adopt, fragments=2), "l0")
    with island.context():
        for one in measured(fragment_shapes(island)):
            assert (one.send.exchanged_bytes, one.adopt.exchanged_bytes) == (0, 0)


def test_nothing_is_exchanged_where_another_cut_leaves_blocks_whole():
    """An eighth of a row of 320 numbers is no whole number of blocks of 64; rows are."""
    config = config_of("fsdp=8", preset="10m", fragments=8)
    island = Island(config, "l0")
    with island.context():
        for one in measured(fragment_shapes(island)):
            assert (one.send.exchanged_bytes, one.adopt.exchanged_bytes) == (0, 0)


def test_collectives_of_a_program():
    text = """
      %a = f32[2,8]{1,0} all-gather(%b), channel_id=1
      ROOT %c = (s8[4]{0}, bf16[2,2]{1,0}) all-to-all(%d, %e), channel_id=2
      %f = (f32[], f32[16]{0}) all-reduce-start(%g), to_apply=%all-reduce(%h)
      %i = pred[3]{0} add(%j, %k)
    """
    assert [one.received for one in exchanges(text)] == [64, 4 + 8, 4 + 64]


def test_an_exchange_in_a_loop_counts_as_often_as_the_loop_turns():
    text = """
%inner (a: f32[4]) -> f32[4] {
  %b = f32[4]{0} parameter(0)
  ROOT %c = f32[9,4]{1,0} ragged-all-to-all(%b, %d, %e), channel_id=1
}

%limit (f: (s32[])) -> pred[] {
  %g = s32[]{:T(128)} constant(3)
  ROOT %h = pred[] compare(%f, %g), direction=LT
}

%body (i: (s32[])) -> (s32[]) {
  %j = bf16[8] conditional(%k), branch_computations={%inner}
  ROOT %l = s8[5]{0} all-gather(%j), channel_id=2
}

ENTRY %main (m: f32[2]) -> f32[2] {
  %n = (s32[]) while(%m), condition=%limit, body=%body
  ROOT %o = f32[2]{0} all-gather(%n), channel_id=3
}
"""
    found = received_by_kind(exchanges(text))
    assert found == {"ragged-all-to-all": 3 * 16, "all-gather": 3 * 5 + 8}
    known = 'body=%body, backend_config={"known_trip_count":{"n":"7"}}'
    assert received_by_kind(exchanges(text.replace("body=%body", known)))["all-gather"] == 43


def test_bytes_of_ranges_are_those_that_are_read():
    size, block = 4096 * 16 * 16, 16
    encoded = encode("int4", np.ones(size, np.float32), block)
    data = shards.pack_delta("int4", Encoded(*map(np.asarray, encoded)), block)
    for blocks in (np.arange(5), np.arange(0, 60000, 30000), np.arange(size // block)):
        read: list[int] = []

        def ranged(start: int, stop: int, read: list[int] = read) -> bytes:
            read.append(stop - start)
            return data[start:stop]

        shards.read_blocks(ranged, codec="int4", count=size, block=block, blocks=blocks)
        assert shards.range_bytes("int4", size, block, blocks) == sum(read)


def test_errors_are_the_learners():
    with pytest.raises(ConfigError, match="does not fit the 8 devices"):
        dry_run(config_of("fsdp=3,tensor=2"), "l0")
    with pytest.raises(ConfigError, match="among 3 hosts"):
        dry_run(config_of(), "l0", hosts=3)
    with pytest.raises(ConfigError, match="is not a valid learner name"):
        run_dry(config_of(), LearnerOptions(config=Path("run.toml"), name="No Name"))


def test_options_of_a_compiler_that_is_not_here_are_left_out():
    section = make_config(
        {
            **config_of().model_dump(),
            "learner": {
                "compiler_options": {"xla_tpu_x": 1},
                "islands": {"l0": {"compiler_options": {"xla_tpu_y": 2}, "mesh": "fsdp=8"}},
            },
        },
        source="test",
    ).learner
    island = stand_in(section).island("l0")
    assert island.compiler_options == {}
    assert island.mesh == section.islands["l0"].mesh


def test_what_is_printed_and_what_programs_read(found):
    console = Console(width=120, file=io.StringIO())
    show(console, found, 100.0)
    text = console.file.getvalue()
    for word in ("994,400 parameters in 4 fragments", "2 host(s)", "activations", "host, at most"):
        assert word in text
    document = json.loads(json.dumps(as_json(found, 100.0)))
    memory = document["memory"]
    assert memory["training"] == found.memory.training
    send = document["fragments"][1]["send"]
    assert send["seconds"] == pytest.approx(send["moved_bytes"] / 100e9)
    assert document["bytes_up"] == sum(host["bytes_up"] for host in document["traffic"])


def test_a_learner_that_no_device_holds_is_refused_with_both_figures(found):
    check_fits(found)
    needed = max(found.memory.training, found.memory.start)
    check_fits(dataclasses.replace(found, device_bytes=needed))
    with pytest.raises(ConfigError, match=r"needs [\d.]+ .?B of each device, which has") as refused:
        check_fits(dataclasses.replace(found, device_bytes=needed - 1))
    assert "fsdp" in refused.value.hint
    assert "expert" not in refused.value.hint


def test_a_mixture_is_told_its_active_parameters_and_the_axis_that_it_lacks(found):
    mixture = dataclasses.replace(found, active_parameters=123_456, device_bytes=1)
    console = Console(width=120, file=io.StringIO())
    show(console, mixture, 100.0)
    assert "a token passes 123,456 parameters" in console.file.getvalue()
    with pytest.raises(ConfigError) as refused:
        check_fits(mixture)
    assert "a mesh with an axis `expert`" in refused.value.hint
    with pytest.raises(ConfigError) as refused:
        check_fits(dataclasses.replace(mixture, mesh=mixture.mesh | {"expert": 2}))
    assert "expert" not in refused.value.hint
