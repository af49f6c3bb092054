"""The options of `diloco data prepare`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

Place = Annotated[
    str, typer.Argument(metavar="FOLDER|URL", help="folder of prepared data, or its URL")
]


@dataclass(frozen=True, kw_only=True)
class PrepareArguments:
    """The command line, as given."""

    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCES",
            help="text files, JSON lines (.jsonl, .ndjson, .json) and Parquet; folders, with all "
            "visible files in them; globs in quotes. .gz, .bz2, .xz and .zst are unpacked",
        ),
    ]
    tokenizer: Annotated[
        Path,
        typer.Option(help="tokenizer.json, or a Hugging Face folder that has one", metavar="PATH"),
    ]
    out: Annotated[
        str,
        typer.Option(
            help="a new folder; or gs://bucket/prefix, s3://, az://", metavar="FOLDER|URL"
        ),
    ]
    field: Annotated[
        str,
        typer.Option(help="field of JSON lines, and column of Parquet, that has the documents"),
    ] = "text"
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
        int, typer.Option(help="bytes of sources that become a shard", min=1)
    ] = 64 << 20
    workers: Annotated[
        int | None,
        typer.Option(help="processes that encode [default: one per core]", min=1, max=1024),
    ] = None
