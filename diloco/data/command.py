"""`diloco data`."""

from typing import Annotated

import typer

from diloco.cli.command import command, group
from diloco.common import log
from diloco.common.exits import Exit
from diloco.data.options import Place, PrepareArguments

app = group()
data_app = group("Make tokens of documents, once, for all learners of all runs.")
app.add_typer(data_app, name="data")


@command(data_app)
def prepare(arguments: PrepareArguments) -> None:
    """Make token files of documents, for `diloco.learner.causal_lm:build`.

    The files depend on sources and options alone, not on the number of processes. What was ended
    midway, by a SIGKILL too, continues by the same command. See docs/data.md.
    """
    log.configure("error")
    from diloco.common import cores
    from diloco.common.token_manifest import PrepareOptions
    from diloco.data.prepare import Wanted, prepare
    from diloco.data.show import show
    from diloco.data.telling import progress_told
    from diloco.data.tokenizer import Ends

    wanted = Wanted(
        sources=arguments.sources,
        place=arguments.out,
        tokenizer=arguments.tokenizer,
        ends=Ends(begin=arguments.begin, end=arguments.end),
        options=PrepareOptions(
            documents=arguments.documents,
            field=arguments.field,
            held_out=arguments.held_out,
            shard_bytes=arguments.shard_bytes,
            special=arguments.special,
        ),
        workers=arguments.workers or cores.available(),
    )
    with progress_told("prepare") as hear:
        manifest = prepare(wanted, hear)
    show(arguments.out, manifest)


@command(data_app)
def check(place: Place) -> int:
    """Read prepared data, and compare every shard with its digest."""
    log.configure("error")
    from diloco.cli.screen import say_plainly
    from diloco.data.check import find_damage
    from diloco.data.show import show
    from diloco.data.telling import progress_told

    with progress_told("check") as hear:
        manifest, damage = find_damage(place, hear)
    for sentence in damage:
        say_plainly(f"damaged: {sentence}")
    if damage:
        return Exit.DAMAGED
    show(place, manifest)
    return 0


@command(data_app)
def copy(
    place: Place,
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="a new folder, or gs://bucket/prefix, s3://, az://")
    ],
) -> None:
    """Copy prepared data, such as from a bucket to a learner's disk; each shard is verified.

    What was ended midway continues by the same command.
    """
    log.configure("error")
    from diloco.data.copying import copy
    from diloco.data.show import show
    from diloco.data.telling import progress_told

    with progress_told("copy") as hear:
        manifest = copy(place, out, hear)
    show(out, manifest)
