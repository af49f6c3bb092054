"""Encodes documents by a tokenizer.json, deterministically; adds begin and end tokens."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from diloco.common.protocol.errors import ConfigError, DataError
from diloco.models.data.chats import Chat, ChatTemplate, read_template, template_words
from diloco.models.data.command import PrepareArguments
from diloco.models.data.documents import Content
from diloco.models.data.manifest import TokenizerFacts, rules_digest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"
# A document is encoded in parts of at most so many characters, cut after line ends: the library
# takes a hundred times the memory of the text.
PART_CHARACTERS = 1 << 20


class TextTokenizer:
    """A tokenizer that encodes whole documents, by the options of `diloco data prepare`.

    Args:
        wanted: the command's arguments, of which `tokenizer` (tokenizer.json, or the folder that
            has it), `begin`, `end`, `special`, `chats` and `template` are used.

    Attributes:
        path: path of the tokenizer.json.
        facts: the tokenizer's identity.
        begin: the tokens before each document.
        end: the token that ends each document.
        template: the chat template; None if documents are not chats.
        template_sha256: SHA-256 of the chat template; None without.

    Raises:
        ConfigError: there is no tokenizer, it lacks a named token, or there is no chat template.
        DataError: a file is invalid.
    """

    template_sha256: str | None = None

    def __init__(self, wanted: PrepareArguments) -> None:
        if wanted.template and not wanted.chats:
            raise ConfigError("--template is of chats alone", hint="add --chats, or leave it out")
        path = wanted.tokenizer
        self.path = path / FILE if path.is_dir() else path
        data = _read(self.path)
        self._tokenizer = _loaded(self.path, data)
        # A chat's template spells special tokens; its messages do not (`chats`).
        self._tokenizer.encode_special_tokens = not (wanted.special or wanted.chats)
        known = self._tokenizer.get_vocab(with_added_tokens=True)
        self.facts = TokenizerFacts(
            sha256=hashlib.sha256(data).hexdigest(),
            rules_sha256=rules_digest(json.loads(data)),
            vocabulary=max(known.values(), default=0) + 1,
        )
        self.begin = self._begin("none" if wanted.chats and not wanted.begin else wanted.begin)
        self.end = self._end(wanted.end)
        self.template = self._template(wanted) if wanted.chats else None

    def encode(self, documents: Sequence[Content]) -> list[npt.NDArray[np.integer]]:
        """Returns each document's tokens, with `begin` and `end`; uses all cores.

        A text, or the tokens of a token file, gives uint32. A chat gives int32, where ~t, below 0,
        is a token t that is not trained on.

        Raises:
            DataError: the token that ends documents occurs within a chat.
        """
        texts = iter(self._texts([one for one in documents if isinstance(one, str)]))
        chats = iter(self._chats([one for one in documents if isinstance(one, Chat)]))
        return [
            next(texts) if isinstance(one, str)
            else next(chats) if isinstance(one, Chat)
            else self._ended(one)
            for one in documents
        ]  # fmt: skip

    def _ended(self, tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
        """Returns a document of a token file with `end` added, and `begin` if it lacks that."""
        begins = tuple(tokens[: len(self.begin)].tolist()) == self.begin
        parts = () if begins else self.begin, tokens, (self.end,)
        return np.concatenate([np.asarray(one, np.uint32) for one in parts])

    def _chats(self, chats: Sequence[Chat]) -> Iterator[npt.NDArray[np.int32]]:
        encoded = self._tokenizer.encode_batch(
            [chat.text for chat in chats], add_special_tokens=False
        )
        for chat, found in zip(chats, encoded, strict=True):
            ids = np.asarray(found.ids, np.int32)
            if self.end in found.ids[:-1]:
                raise DataError(
                    f"the template writes {self._tokenizer.id_to_token(self.end)!r} within chats,"
                    " but behind a document stands that token here",
                    hint="name a token that no chat has: --end TOKEN; special tokens are "
                    f"{self._special()}",
                )
            begins, ends = np.asarray(found.offsets).reshape(-1, 2).T
            learned = np.zeros(len(ids), bool)
            for first, last in chat.answers:
                learned |= (begins < last) & (ends > first)
            ids = np.where(learned, ids, ~ids)
            yield ids if found.ids[-1:] == [self.end] else np.append(ids, np.int32(~self.end))

    def _texts(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        cut = [_parts(text) for text in texts]
        parts = [part for text in cut for part in text]
        encoded = iter(self._tokenizer.encode_batch_fast(parts, add_special_tokens=False))
        ids = ([self.begin, *(next(encoded).ids for _ in text), (self.end,)] for text in cut)
        return [np.concatenate([np.asarray(one, np.uint32) for one in own]) for own in ids]

    def _begin(self, asked: str | None) -> tuple[int, ...]:
        """Returns the tokens before each document.

        Args:
            asked: the option --begin: a token, or "none"; None: the special tokens that the
                tokenizer itself sets before a text.
        """
        if asked is not None:
            return () if asked == "none" else (self._token(asked, "--begin"),)
        with_ends = self._tokenizer.encode("a").ids
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        for count in range(len(with_ends)):
            if with_ends[count : count + len(bare)] == bare:
                return tuple(with_ends[:count])
        return ()

    def _end(self, asked: str | None) -> int:
        """Returns the token that ends each document.

        Args:
            asked: the option --end; None: the end of text that tokenizer_config.json or config.json
                beside the tokenizer names.

        Raises:
            ConfigError: no file names a token, or the tokenizer does not have the token.
        """
        if asked is not None:
            return self._token(asked, "--end")
        folder = self.path.parent
        if (named := _key(folder / "tokenizer_config.json", "eos_token")) is not None:
            named = named.get("content", "") if isinstance(named, dict) else named
            return self._token(str(named), "tokenizer_config.json")
        if (number := _key(folder / "config.json", "eos_token_id")) is not None:
            number = number[0] if isinstance(number, list) and number else number
            return self._token(str(number), "config.json")
        raise ConfigError(
            f"nothing beside {str(self.path)!r} says which token ends a document",
            hint=f"name it: --end TOKEN; special tokens are {self._special()}",
        )

    def _template(self, wanted: PrepareArguments) -> ChatTemplate:
        folder = self.path.parent
        source, place = read_template(wanted.template, folder)
        special = () if wanted.special else self._special_tokens()
        self.template_sha256 = hashlib.sha256(source.encode()).hexdigest()
        return ChatTemplate(source, place, template_words(folder), special)

    def _special_tokens(self) -> list[str]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return [str(token.content) for token in added if token.special]

    def _special(self) -> str:
        return ", ".join(self._special_tokens()[:8]) or "none"

    def _token(self, asked: str, where: str) -> int:
        """Returns the id of a token that is given as digits of the id, or as text.

        Raises:
            ConfigError: the tokenizer has no such token; `where` says where it was named.
        """
        if asked.isdecimal():
            known = self._tokenizer.id_to_token(int(asked)) is not None
            found = int(asked) if known else None
        else:
            found = self._tokenizer.token_to_id(asked)
        if found is not None:
            return found
        raise ConfigError(
            f"{where}: {str(self.path)!r} has no token {asked!r}",
            hint="give a token's text or number, as the tokenizer has it",
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the tokenizer {str(path)!r} cannot be read: {error.strerror}",
            hint="--tokenizer names a tokenizer.json, or a Hugging Face folder that has one",
        ) from error


def _loaded(path: Path, data: bytes) -> "Tokenizer":
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ConfigError(
            "to prepare data needs the package tokenizers, which is not installed",
            hint="pip install 'diloco[tokens]'",
        ) from error
    try:
        tokenizer = Tokenizer.from_str(data.decode())
    except Exception as error:
        raise DataError(
            f"{str(path)!r} is not a tokenizer: {error}",
            hint="give a tokenizer.json of the library tokenizers; a .model of sentencepiece is "
            "converted by transformers (AutoTokenizer, save_pretrained)",
        ) from error
    # A tokenizer.json may ask for truncation, padding and dropout; each would change the tokens.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    return tokenizer


def _key(path: Path, key: str) -> Any:
    """Returns the value of a key of a JSON file; None if the file or the key is missing.

    Raises:
        DataError: the file is not JSON.
    """
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataError(f"{str(path)!r} is not JSON: {error}", hint="copy it again") from error
    return found.get(key) if isinstance(found, dict) else None


def _parts(text: str) -> Sequence[str]:
    """Returns a text in parts of at most `PART_CHARACTERS`, cut after line ends if possible."""
    if len(text) <= PART_CHARACTERS:
        return (text,)
    parts, start = [], 0
    while start < len(text):
        stop = min(start + PART_CHARACTERS, len(text))
        line = text.rfind("\n", start, stop) + 1
        stop = line if stop < len(text) and line > start else stop
        parts.append(text[start:stop])
        start = stop
    return parts
