"""Defines the manifest of a prepared folder of tokens: `tokens.json`. Pure.

A folder has shards, files of tokens, of two sides: for training (`train`) and held out
(`held_out`).

Rules:
  1. A folder is whole when it has `tokens.json`, which is written last. A folder that has no
     `tokens.json`, but files under `.prepare`, is unfinished.
  2. The manifest depends on the sources and options alone: not on the machine, the time, or the
     number of processes.
  3. Readers of a folder that has a manifest read the shards that it names, and no others.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diloco.common.protocol.errors import DataError

MANIFEST = "tokens.json"
# The folder of files that a resumed preparation needs; removed when the data is complete.
UNFINISHED = ".prepare"
PLAN = f"{UNFINISHED}/plan.json"

Side = Literal["train", "held_out"]
SIDES: tuple[Side, ...] = get_args(Side)
# In int32 (chats), t >= 0 is a token that is trained on, and ~t < 0 is a token t that is not.
Dtype = Literal["uint16", "uint32", "int32"]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]
# Names of files in the folder itself, so that a manifest of unknown origin cannot name others.
ShardName = Annotated[str, Field(pattern=r"^(train|held_out)-[0-9]{5,9}\.npy$")]
# The parts of a tokenizer.json that decide which tokens a text becomes.
_RULES = ("model", "normalizer", "pre_tokenizer")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TokenizerFacts(_Section):
    """The identity of a tokenizer.

    Attributes:
        sha256: SHA-256 of its tokenizer.json.
        rules_sha256: SHA-256 of the rules by which it encodes ordinary text (`rules_digest`).
        vocabulary: its largest token id, plus one.
    """

    sha256: Sha256
    rules_sha256: Sha256
    vocabulary: Annotated[int, Field(ge=1, le=1 << 32)]


class PrepareOptions(_Section):
    """The options of `diloco data prepare` that determine a folder's bytes.

    Attributes:
        documents: what a document is in a text file: the whole file, or each line.
        field: field of JSON lines, or column of a table, that has the documents.
        held_out: share of the documents that is held out.
        shard_bytes: bytes of documents that become a shard.
        special: whether text that spells a special token becomes that token.
    """

    documents: Literal["file", "line"]
    field: str
    held_out: Annotated[float, Field(ge=0, lt=1)]
    shard_bytes: Annotated[int, Field(ge=1)]
    special: bool


class FolderIdentity(_Section):
    """The inputs and options that determine a folder's bytes.

    Attributes:
        tokenizer: the tokenizer that made the tokens.
        dtype: dtype of the tokens in shards.
        begin: the tokens before each document.
        end: the token that ends each document.
        template_sha256: SHA-256 of the chat template; None if documents are not chats.
        options: further options.
        input_sha256: SHA-256 of the names and sizes of all source files.
    """

    tokenizer: TokenizerFacts
    dtype: Dtype
    begin: tuple[Count, ...]
    end: Count
    template_sha256: Sha256 | None = None
    options: PrepareOptions
    input_sha256: Sha256


class Counted(_Section):
    """The number of documents, and the number of their tokens."""

    documents: Count = 0
    tokens: Count = 0

    def __add__(self, other: "Counted") -> "Counted":
        """Returns the sums of the counts."""
        return Counted(
            documents=self.documents + other.documents, tokens=self.tokens + other.tokens
        )


class Given(_Section):
    """Counts of documents by side.

    Attributes:
        empty: the number of documents without tokens, which are on no side.
        train: counts of documents for training.
        held_out: counts of held-out documents.
    """

    empty: Count = 0
    train: Counted = Counted()
    held_out: Counted = Counted()

    def __add__(self, other: "Given") -> "Given":
        """Returns the sums of the counts."""
        return Given(
            empty=self.empty + other.empty,
            train=self.train + other.train,
            held_out=self.held_out + other.held_out,
        )


class TokenSource(Given):
    """One source of a folder's documents, with counts of its documents.

    Attributes:
        path: the source, as on the command line.
        files: the number of its files.
        size_bytes: bytes of its files.
    """

    path: str
    files: Count
    size_bytes: Count


class TokenShard(_Section):
    """The facts of one shard, a file of tokens.

    Attributes:
        name: the file's name.
        side: "train" or "held_out".
        size_bytes: size of the file.
        documents: the number of documents in it.
        tokens: the number of tokens in it.
        unlearned: the number of its tokens that are not trained on.
        largest: the largest token in it.
        sha256: SHA-256 of the file, in hexadecimal.
    """

    name: ShardName
    side: Side
    size_bytes: Count
    documents: Count
    tokens: Annotated[int, Field(ge=1)]
    unlearned: Count = 0
    largest: Count
    sha256: Sha256


class TokenManifest(FolderIdentity):
    """The manifest of a finished folder of tokens: its identity, sources and shards.

    Attributes:
        format: version of the manifest's format.
        sources: sources of the documents, in the order of the command line.
        shards: the shards, by name.
    """

    format: Literal[1] = 1
    sources: tuple[TokenSource, ...]
    shards: tuple[TokenShard, ...]

    def of(self, side: Side) -> tuple[TokenShard, ...]:
        """Returns the shards of a side, by name."""
        return tuple(shard for shard in self.shards if shard.side == side)

    def counted(self, side: Side) -> Counted:
        """Returns the counts of documents and tokens of a side."""
        shards = self.of(side)
        return Counted(
            documents=sum(shard.documents for shard in shards),
            tokens=sum(shard.tokens for shard in shards),
        )

    @property
    def largest(self) -> int:
        """The largest token in any shard; 0 without shards."""
        return max((shard.largest for shard in self.shards), default=0)

    @property
    def size_bytes(self) -> int:
        """The size of all shards together, in bytes."""
        return sum(shard.size_bytes for shard in self.shards)


def shard_name(side: Side, piece: int) -> str:
    """Returns the file name of the shard of one side that is made of piece number `piece`.

    A piece is a number of successive documents (`prepare`). Names sort by the pieces' numbers.
    """
    return f"{side}-{piece:05d}.npy"


def dtype_for(vocabulary: int) -> Dtype:
    """Returns the smaller dtype that holds every token of a vocabulary of this size."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def json_bytes(record: BaseModel) -> bytes:
    """Returns a record as indented JSON; equal records give equal bytes."""
    return (json.dumps(record.model_dump(mode="json"), indent=1, sort_keys=True) + "\n").encode()


def parse_manifest(data: bytes, source: str) -> TokenManifest:
    """Parses the bytes of a `tokens.json`; `source` is the name of the file in errors.

    Raises:
        DataError: the bytes are not a manifest, or are a manifest of a newer release.
    """
    try:
        return TokenManifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise DataError(
            f"{source} is not a manifest of tokens: {where}: {first['msg']}",
            hint="copy the folder again, or prepare it again with this release",
        ) from error


def rules_digest(document: Mapping[str, Any]) -> str:
    """Returns a SHA-256 of the parts of a tokenizer.json that decide the tokens of ordinary text.

    Files of one tokenizer may differ in the other parts: padding, truncation, chat tokens, and the
    decoding of ids.

    Args:
        document: the parsed tokenizer.json.
    """
    added = [token for token in document.get("added_tokens", ()) if not token.get("special", False)]
    rules = {key: document.get(key) for key in _RULES} | {"added_tokens": added}
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()
