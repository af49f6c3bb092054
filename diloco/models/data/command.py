"""The command line of `diloco data`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from diloco.run.cli.command import command, group
from diloco.run.cli.screen import progress

app = group()
data_app = group("Make tokens of documents, once, for all learners of all runs.")
app.add_typer(data_app, name="data")


@dataclass(frozen=True, kw_only=True)
class PrepareArguments:
    """The arguments of `diloco data prepare`, as given."""

    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCES",
            help="text files, JSON lines (.jsonl, .ndjson, .json), Parquet, Arrow, folders that "
            "datasets saved, tokens of nanoGPT and Megatron (.bin); folders, with all visible "
            "files in them; globs in quotes. .gz, .bz2, .xz and .zst are unpacked",
        ),
    ]
    tokenizer: Annotated[
        Path,
        typer.Option(help="tokenizer.json, or a Hugging Face folder that has one", metavar="PATH"),
    ]
    out: Annotated[
        str,
        typer.Option(
            help="a new folder, or a store's URL, such as gs://bucket/prefix",
            metavar="FOLDER|URL",
        ),
    ]
    field: Annotated[
        str | None,
        typer.Option(
            help="field of JSON lines, or column, that has the documents [default: text, or "
            "messages of chats]",
            metavar="NAME",
        ),
    ] = None
    chats: Annotated[
        bool,
        typer.Option(
            "--chats",
            help="documents are lists of messages with role and content, of which only what the "
            "assistant says is trained on",
        ),
    ] = False
    template: Annotated[
        Path | None,
        typer.Option(
            help="Jinja template that makes texts of chats [default: that of the tokenizer's "
            "folder]",
            metavar="FILE",
        ),
    ] = None
    documents: Annotated[
        Literal["file", "line"],
        typer.Option(help="what a document is in a text file: all of it, or each line"),
    ] = "file"
    end: Annotated[
        str | None,
        typer.Option(
            help="token behind each document, by text or number [default: what the tokenizer's "
            "folder says ends a text]",
            metavar="TOKEN",
        ),
    ] = None
    begin: Annotated[
        str | None,
        typer.Option(
            help="token before each document, or none [default: what the tokenizer itself sets "
            "before a text]",
            metavar="TOKEN",
        ),
    ] = None
    special: Annotated[
        bool,
        typer.Option(
            "--special",
            help="text that spells a special token becomes that token; without, it stays text",
        ),
    ] = False
    held_out: Annotated[
        float, typer.Option(help="share of the documents that is held out", min=0, max=0.99)
    ] = 0.01
    shard_bytes: Annotated[
        int, typer.Option(help="bytes of documents that become a shard", min=1)
    ] = 64 << 20
    workers: Annotated[
        int | None,
        typer.Option(help="threads that encode [default: one per core]", min=1, max=1024),
    ] = None


@command(data_app)
def prepare(arguments: PrepareArguments) -> None:
    """Make token files of documents, for `diloco.models.decoders:build`.

    The files depend on sources and options alone. After an interruption, even by SIGKILL, the same
    command continues the work. See docs/data.md.
    """
    from diloco.common.process import cores
    from diloco.common.process.config import encode_on_threads
    from diloco.models.data.folder import show
    from diloco.models.data.prepare import prepare

    encode_on_threads(arguments.workers or cores.available())
    with progress("prepare", in_bytes=True) as hear:
        manifest = prepare(arguments, hear)
    show(arguments.out, manifest)


@command(data_app)
def copy(
    place: Annotated[
        str, typer.Argument(metavar="FOLDER|URL", help="folder of prepared data, or its URL")
    ],
    out: Annotated[
        str,
        typer.Argument(
            metavar="OUT", help="a new folder, or a store's URL, such as gs://bucket/prefix"
        ),
    ],
) -> None:
    """Copy prepared data, such as from a bucket to a learner's disk; each shard is verified.

    After an interruption, the same command continues the copy.
    """
    from diloco.models.data.folder import copy, show

    with progress("copy", in_bytes=True) as hear:
        manifest = copy(place, out, hear)
    show(out, manifest)
