"""The manifest of a prepared folder of tokens: `tokens.json`. Pure.

Rules:
  1. A folder is whole when it has `tokens.json`, which is written last. Without, and with anything
     under `.prepare`, it is one that somebody has begun.
  2. It depends on the sources and options alone: not on the machine, the time, or the number of
     processes.
  3. Whoever reads a folder that has one takes the shards that it names, and no others.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diloco.common.protocol.errors import DataError

MANIFEST = "tokens.json"
# What is needed to go on after a kill; it is gone when the folder is whole.
UNFINISHED = ".prepare"
PLAN = f"{UNFINISHED}/plan.json"

Side = Literal["train", "held_out"]
SIDES: tuple[Side, ...] = get_args(Side)
# Of int32 (chats), t is trained on, and ~t, which is below 0, is the token t that is not.
Dtype = Literal["uint16", "uint32", "int32"]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]
# A name is one of this folder: a manifest from elsewhere points nowhere else.
ShardName = Annotated[str, Field(pattern=r"^(train|held_out)-[0-9]{5,9}\.npy$")]
# What of a tokenizer decides which tokens a text becomes.
_RULES = ("model", "normalizer", "pre_tokenizer")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TokenizerFacts(_Section):
    """A tokenizer.

    Attributes:
        sha256: of its file.
        rules_sha256: of what decides how ordinary text becomes tokens (`rules_digest`).
        vocabulary: the largest id that it knows, and one.
    """

    sha256: Sha256
    rules_sha256: Sha256
    vocabulary: Annotated[int, Field(ge=1, le=1 << 32)]


class PrepareOptions(_Section):
    """The options that decide what a folder holds."""

    documents: Literal["file", "line"]
    field: str
    held_out: Annotated[float, Field(ge=0, lt=1)]
    shard_bytes: Annotated[int, Field(ge=1)]
    special: bool


class FolderIdentity(_Section):
    """The inputs and options that determine a folder's bytes.

    Attributes:
        tokenizer: that made the tokens.
        dtype: of them.
        begin: tokens before each document.
        end: the token behind each.
        template_sha256: of the template that made texts of chats; None: they are no chats.
        options: further ones.
        input_sha256: of the names and sizes of all source files.
    """

    tokenizer: TokenizerFacts
    dtype: Dtype
    begin: tuple[Count, ...]
    end: Count
    template_sha256: Sha256 | None = None
    options: PrepareOptions
    input_sha256: Sha256


class Counted(_Section):
    """Counts of documents and tokens."""

    documents: Count = 0
    tokens: Count = 0

    def __add__(self, other: "Counted") -> "Counted":
        """The sum of both."""
        return Counted(
            documents=self.documents + other.documents, tokens=self.tokens + other.tokens
        )


class Given(_Section):
    """Counts of what documents gave; `empty` ones gave nothing."""

    empty: Count = 0
    train: Counted = Counted()
    held_out: Counted = Counted()

    def __add__(self, other: "Given") -> "Given":
        """The sum of both."""
        return Given(
            empty=self.empty + other.empty,
            train=self.train + other.train,
            held_out=self.held_out + other.held_out,
        )


class TokenSource(Given):
    """Counts of one source, as the command line named it."""

    path: str
    files: Count
    size_bytes: Count


class TokenShard(_Section):
    """One file of tokens.

    Attributes:
        documents: that begin in it.
        tokens: of them.
        unlearned: the number of tokens that are not trained on.
        largest: the largest token.
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
    """A whole folder."""

    format: Literal[1] = 1
    sources: tuple[TokenSource, ...]
    shards: tuple[TokenShard, ...]

    def of(self, side: Side) -> tuple[TokenShard, ...]:
        """The shards of one side, in their order."""
        return tuple(shard for shard in self.shards if shard.side == side)

    def counted(self, side: Side) -> Counted:
        """Documents and tokens of a side."""
        shards = self.of(side)
        return Counted(
            documents=sum(shard.documents for shard in shards),
            tokens=sum(shard.tokens for shard in shards),
        )

    @property
    def largest(self) -> int:
        """The largest token that occurs."""
        return max((shard.largest for shard in self.shards), default=0)

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size_bytes for shard in self.shards)


def shard_name(side: Side, piece: int) -> str:
    """A shard's file: names in order are shards in order."""
    return f"{side}-{piece:05d}.npy"


def dtype_for(vocabulary: int) -> Dtype:
    """The smallest type that holds every token."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def json_bytes(record: BaseModel) -> bytes:
    """A record as a file that people may read; the same bytes for the same record."""
    return (json.dumps(record.model_dump(mode="json"), indent=1, sort_keys=True) + "\n").encode()


def parse_manifest(data: bytes, source: str) -> TokenManifest:
    """A manifest; `source` is named in errors.

    Raises:
        DataError: the bytes are not a manifest, or one of a newer release.
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
    """A digest of the parts of a tokenizer.json that decide the tokens of ordinary text.

    Files of one tokenizer differ in the rest: padding, truncation, chat tokens, and how ids become
    text.
    """
    added = [token for token in document.get("added_tokens", ()) if not token.get("special", False)]
    rules = {key: document.get(key) for key in _RULES} | {"added_tokens": added}
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()
