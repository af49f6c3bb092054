"""Programs of a learner by the TPU's own compiler, which needs no chip: `make tpu`.

For each slice: the inner step, and each operation on the learner's largest fragment with each
codec. An operation is one program or several that follow each other. `accessed` is what the
compiler counts all operations of its programs to read and write, buffers that it keeps in the
chip's fast memory included; `must` is the least that has to be read and written once; `estimate`
is the compiler's own, where it gives one, and nothing was run. Figures are of one device.

    python -m bench.tpu [--topology v6e:1x1] [--mesh 1] [--preset 125m]
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from diloco.common.process.config import make_config
from diloco.common.protocol.codecs import CODECS
from diloco.learner.collectives import exchanges, received_by_kind
from diloco.learner.dry_run import (
    CompiledProgram,
    compile_step,
    device_bytes,
    fragment_shapes,
    programs,
)
from diloco.learner.island import Island
from diloco.learner.tensors.send_and_adopt_kernels import Kernels
from diloco.learner.topology import tpu_devices


class Row(NamedTuple):
    """One operation of a learner, compiled."""

    name: str
    accessed: float
    must: int
    temporary: int
    exchanged: int
    estimate_s: float


def island_of(arguments: argparse.Namespace, topology: str, codec: str) -> Island:
    """A learner of the slice."""
    config = make_config(
        {
            "run": {"name": "tpu", "steps": 100},
            "task": {
                "options": {
                    "preset": arguments.preset,
                    "length": arguments.length,
                    "batch": arguments.batch,
                    "dtype": "bfloat16",
                }
            },
            "sync": {"fragments": arguments.fragments, "codec": codec, "delta_codec": codec},
            "store": {"url": "unused"},
            "learner": {"mesh": arguments.mesh},
        },
        source="bench.tpu",
    )
    devices = tpu_devices(topology)
    return Island(config, "a", devices[:1] if arguments.mesh == "1" else devices)


def step_row(island: Island) -> Row:
    """The inner step, which must read and write parameters and optimizer's state."""
    state = device_bytes(island.sharded_params()) + device_bytes(island.sharded_state())
    with island.context():
        return row("inner step", [CompiledProgram(compile_step(island), 2 * state)], 2 * state)


def fragment_rows(island: Island) -> Iterator[Row]:
    """Each operation on the largest fragment."""
    with island.context():
        largest = max(fragment_shapes(island), key=lambda one: one.fragment.elements)
        rows = sum(largest.rows_bytes().values())
        view, codes = device_bytes(largest.view), device_bytes(largest.update)
        kernels: Kernels = largest.kernels
        calls: tuple[tuple[str, Callable[..., Any], tuple[Any, ...], int], ...] = (
            ("send", kernels.send, (largest.view,), rows + view + codes),
            ("settle", kernels.settle, (largest.update,), 2 * rows + codes),
            ("apply", kernels.apply, (largest.view, largest.delta), 2 * (rows + view) + codes),
            ("jump", kernels.jump, (largest.view, largest.view), 2 * (rows + view)),
        )
        for name, call, given, must in calls:
            touched = largest.rows_bytes()
            yield row(name, programs(call, largest.leaves, *given, touched=touched), must)


def row(name: str, started: list[CompiledProgram], must: int) -> Row:
    """The compiler's figures for programs that follow each other."""
    counts: list[Any] = [one.compiled.cost_analysis() or {} for one in started]
    memory: list[Any] = [one.compiled.memory_analysis() for one in started]
    return Row(
        name,
        sum(count.get("bytes accessed", 0) for count in counts),
        must,
        max(one.temp_size_in_bytes for one in memory),
        sum(
            received
            for one in started
            for received in received_by_kind(exchanges(one.compiled.as_text() or "")).values()
        ),
        sum(max(count.get("optimal_seconds", 0), 0) for count in counts),
    )


def say(topology: str, codec: str, one: Row) -> None:
    """A line of the table, in Markdown."""
    estimate = f"{1e3 * one.estimate_s:.3f}" if one.estimate_s else "-"
    print(
        f"| {topology} | {codec} | {one.name} | {one.accessed / 1e6:.1f} | {one.must / 1e6:.1f} "
        f"| {one.accessed / one.must:.2f} | {one.temporary / 1e6:.1f} | {one.exchanged / 1e6:.1f} "
        f"| {estimate} |",
        flush=True,
    )


def main() -> None:
    """Compile, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", nargs="+", default=["v5e:2x4", "v5p:2x2x1", "v6e:2x4"])
    parser.add_argument("--mesh", default="1", help="1 is one device of the slice")
    parser.add_argument("--preset", default="35m")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--fragments", type=int, default=2)
    parser.add_argument("--codec", nargs="+", default=list(CODECS))
    parser.add_argument("--no-step", action="store_true")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    print("| slice | codec | program | accessed MB | must MB | ratio | temporary MB "
          "| exchanged MB | estimate ms |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for topology in arguments.topology:
        if not arguments.no_step:
            say(topology, "-", step_row(island_of(arguments, topology, "int4")))
        for codec in arguments.codec:
            for one in fragment_rows(island_of(arguments, topology, codec)):
                say(topology, codec, one)


if __name__ == "__main__":
    main()
