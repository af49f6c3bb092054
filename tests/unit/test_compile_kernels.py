"""The functions that a run's merge calls are compiled before its first update comes."""

import numpy as np
import pytest

from diloco.aggregator.arrays import merge, outer
from diloco.aggregator.arrays.fragment import FragmentArrays, Payload
from diloco.aggregator.arrays.merge import segment_norms
from diloco.aggregator.compile_kernels import main, prepare
from diloco.aggregator.core import round_and_weight_formulas as formulas
from diloco.aggregator.core.updates import Admitted, UpdateCredit
from diloco.common.process.config import make_config
from diloco.common.protocol import shards, slices, wire
from diloco.common.protocol.codecs import CODECS, Encoded
from diloco.common.protocol.layout import Tensor, make_layout
from diloco.learner.tensors.quantize_and_pack import encode

KERNELS = (merge.measure_update, merge.add_updates, outer.advance_blocks)
# No other test's, so that only `prepare` has compiled for it.
BLOCK = 32


def compiled():
    return [len(kernel.signatures) for kernel in KERNELS]


def settings(**sections):
    document = {"run": {"name": "r", "steps": 9}, "store": {"url": "/nowhere"}, **sections}
    return make_config(document, source="test").settings()


@pytest.mark.parametrize(
    ("codec", "delta_codec", "optimizer", "trust"),
    [
        ("int4", "int4", "nesterov", "own"),
        pytest.param("float32", "int8", "sgd", "others", marks=pytest.mark.long),
    ],
)
def test_a_round_compiles_nothing_more(codec, delta_codec, optimizer, trust):
    run = settings(
        sync={"codec": codec, "delta_codec": delta_codec, "block": BLOCK, "fragments": 1},
        outer={"optimizer": optimizer},
        run={"name": "r", "steps": 9, "trust": trust},
    )
    prepare(codec, delta_codec, BLOCK)
    before = compiled()
    layout = make_layout(
        [Tensor(name="x", shape=(40, 100), dtype="float32")], fragments=1, block=BLOCK
    )
    size = layout.fragments[0].size
    arrays = FragmentArrays.from_view(run, layout, 0, np.zeros(size, np.float32), threads=2)
    for _ in range(2):
        payload = received(arrays, codec, np.ones(size, np.float32))
        credit = UpdateCredit(6, 600, formulas.weight(600, 6))
        admitted = Admitted(manifest(codec, layout), 1, credit, 0, 1.0, 1.0, payload.norm)
        arrays.merge(payload, admitted)
        arrays.close_round([admitted], 1.0)
    assert compiled() == before


def manifest(codec, layout):
    shard = wire.Shard(name="x", size_bytes=1, crc32c=0, slices=slices.of_range(0, BLOCK, BLOCK))
    return wire.Manifest(
        run="r", learner="a", epoch=0, incarnation=1, seq=1, fragment=0, base_version=0,
        base_digest="0" * 32, layout=layout.digest, codec=codec, shards=(shard,), tokens=600,
        steps=6, position=6, local_step=6, loss=1.0, step_time_s=1.0, encode_s=0.1, upload_s=0.1,
        attempt=0, final=False,
    )  # fmt: skip


def received(arrays, codec, values):
    """An update as it is read from the store: views of its bytes, which nobody may change."""
    block = arrays.grid.block
    coded = Encoded(*map(np.asarray, encode(codec, values, block)))
    data = shards.pack(codec, coded, block)
    part = shards.unpack(data, codec=codec, count=values.size, block=block)
    norms = segment_norms(arrays.grid, codec, [part])
    return Payload((part,), norms, float(np.sqrt(np.square(norms).sum())))


def test_the_command_compiles_for_every_codec(capsys):
    main()
    assert capsys.readouterr().err.count("compiling the merge of") == len(CODECS)
