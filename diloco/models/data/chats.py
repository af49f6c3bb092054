"""Renders chats as text by a tokenizer's chat template, and finds the assistant's answers in it.

Rules:
  1. If a template marks what the assistant generates (`{% generation %}`), the marked text is an
     answer. Without such marks, the template renders the chat up to each of the assistant's
     messages, without and with that message; the answer is the difference. So the text of the chat
     up to each message must be a prefix of the whole chat's text.
  2. Messages that a template would drop or garble silently are refused: unknown roles, messages
     without content, text that spells a special token.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.common.protocol.errors import ConfigError, DataError

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

FILE = "chat_template.jinja"
ASSISTANT = "assistant"
# The roles of instructions to the model, which come first.
_FIRST_ROLES = ("system", "developer")
ROLES = (*_FIRST_ROLES, "user", ASSISTANT, "tool", "function", "ipython")
# The character that marks the beginning and the end of an answer; no message contains it.
_MARK = "\0"


class ChatError(ValueError):
    """Raised for a chat that cannot be rendered; the reader of the file adds file and line.

    Attributes:
        hint: advice on what to do.
    """

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.hint = hint


@dataclass(frozen=True)
class Chat:
    """A chat that was rendered by the template.

    Attributes:
        text: the text of the whole chat.
        answers: the assistant's answers, as ranges (first, end) of characters of `text`; `end` is
            excluded.
    """

    text: str
    answers: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.text)


class ChatTemplate:
    """A Jinja template that renders chats.

    Args:
        source: the template's text.
        place: name of the template's file, for errors.
        words: values of variables that the template may use, such as `bos_token`.
        special: texts of the tokenizer's special tokens, which no message may contain.

    Raises:
        ConfigError: jinja2 is not installed.
        DataError: the source is not a template.
    """

    def __init__(
        self, source: str, place: str, words: Mapping[str, str], special: Iterable[str] = ()
    ) -> None:
        environment = _environment()
        from jinja2 import TemplateSyntaxError

        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise DataError(
                f"the chat template of {place} is not one: line {error.lineno}: {error.message}",
                hint="copy it again, or give another: --template FILE",
            ) from error
        self._words = dict(words)
        self._marked = re.search(r"\{%-?\s*generation\b", source) is not None
        spelled = "|".join(map(re.escape, special))
        self._forbidden = re.compile(f"{spelled}|{_MARK}" if spelled else _MARK)

    def chat(self, messages: Any, tools: Any = None) -> Chat:
        """Renders a chat.

        Args:
            messages: a list of mappings with `role`, and `content` or `tool_calls`.
            tools: tools that the assistant may call, in the form that the template takes; None:
                none.

        Raises:
            ChatError: a message is invalid, the template fails, or there is no answer.
        """
        checked = [self._checked(i, message) for i, message in enumerate(_listed(messages), 1)]
        text = self._rendered(checked, tools)
        if self._marked:
            answers, whole = _unmarked(text)
        else:
            answers, whole = tuple(self._answers(checked, tools, text)), text
        if not any(begin < end for begin, end in answers):
            raise ChatError(
                "no message of it is the assistant's: nothing of it would be trained on",
                "leave it out",
            )
        return Chat(whole, answers)

    def _answers(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, text: str
    ) -> Iterator[tuple[int, int]]:
        for number, message in enumerate(messages, 1):
            if message["role"] != ASSISTANT:
                continue
            before = self._rendered(messages[: number - 1], tools, prompt=True)
            until = self._rendered(messages[:number], tools) if number < len(messages) else text
            if not (text.startswith(before) and text.startswith(until)) or len(before) >= len(
                until
            ):
                raise ChatError(
                    f"where the answer of message {number} stands cannot be told: the template"
                    " writes what comes before otherwise when more follows",
                    "give a template that has {% generation %} around answers: --template FILE",
                )
            yield len(before), len(until)

    def _rendered(self, messages: Any, tools: Any, *, prompt: bool = False) -> str:
        from jinja2 import TemplateError

        given = {"messages": messages, "tools": tools, "documents": None}
        try:
            return self._template.render(**self._words, **given, add_generation_prompt=prompt)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ChatError(
                f"the chat template does not take it: {error}",
                "repair it, leave it out, or give another template: --template FILE",
            ) from error

    def _checked(self, number: int, message: Any) -> dict[str, Any]:
        """Checks a message, number `number` from 1 on; returns it without its None values.

        Raises:
            ChatError: role or content is invalid.
        """
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            has = ", ".join(map(str, message)) if isinstance(message, Mapping) else repr(message)
            raise ChatError(
                f"message {number} has no role: it has {has[:60]}",
                "a message is an object with role and content",
            )
        found = {key: value for key, value in message.items() if value is not None}
        role = found["role"]
        if role not in ROLES:
            raise ChatError(
                f"message {number} has the role {role!r}", f"roles are {', '.join(ROLES)}"
            )
        if role in _FIRST_ROLES and number > 1:
            raise ChatError(
                f"message {number} has the role {role!r}, behind others", "it can only be the first"
            )
        if "content" not in found and not found.get("tool_calls"):
            raise ChatError(f"message {number} has no content", 'an empty one is ""')
        for text in _texts(found):
            if spelled := self._forbidden.search(text):
                raise ChatError(
                    f"message {number} spells the special token {spelled.group()!r}",
                    "take it out; with --special it becomes that token",
                )
        return found


def read_template(given: Path | None, folder: Path) -> tuple[str, str]:
    """Returns (text of the chat template to use, name of its file for errors).

    Args:
        given: the file of `--template`; None: the template in `folder`.
        folder: the tokenizer's folder.

    Raises:
        ConfigError: there is no template, or `given` cannot be read.
        DataError: tokenizer_config.json is not JSON.
    """
    for path in (given,) if given else (folder / FILE,):
        try:
            return path.read_text(), repr(str(path))
        except (OSError, UnicodeDecodeError) as error:
            if given:
                raise ConfigError(
                    f"the chat template {str(path)!r} cannot be read: {error}",
                    hint="--template names a file with a Jinja template",
                ) from error
    path = folder / "tokenizer_config.json"
    found = _config(path).get("chat_template")
    if isinstance(found, list):  # several by name
        found = {one.get("name"): one.get("template") for one in found}.get("default")
    if isinstance(found, str):
        return found, repr(str(path))
    raise ConfigError(
        f"nothing in {str(folder)!r} is a chat template: neither {FILE}, nor chat_template of"
        " tokenizer_config.json",
        hint="give one, such as that of the model's instruct checkpoint: --template FILE",
    )


def template_words(folder: Path) -> dict[str, str]:
    """Returns the texts of special tokens by the names that templates use, such as `bos_token`.

    Args:
        folder: the tokenizer's folder; {} if it has no tokenizer_config.json.

    Raises:
        DataError: tokenizer_config.json is not JSON.
    """
    texts = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in _config(folder / "tokenizer_config.json").items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DataError(f"{str(path)!r} is not JSON: {error}", hint="copy it again") from error
    return found if isinstance(found, dict) else {}


def _listed(messages: Any) -> Sequence[Any]:
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        return messages
    raise ChatError(
        f"it holds {type(messages).__name__}, not a list of messages",
        "name the field that has the messages: --field NAME",
    )


def _texts(value: Any) -> Iterator[str]:
    """Yields all strings in a message."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, Sequence):
        for part in value:
            yield from _texts(part)


def _unmarked(text: str) -> tuple[tuple[tuple[int, int], ...], str]:
    """Removes the marks from a text; returns (ranges of the marked parts, text without marks).

    The ranges are of characters of the text without marks.
    """
    parts = text.split(_MARK)
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + len(part))
    return tuple(zip(ends[1:-1:2], ends[2::2], strict=False)), "".join(parts)


def _environment() -> "ImmutableSandboxedEnvironment":
    """Returns Jinja's sandbox with the functions that chat templates expect, except the clock.

    Raises:
        ConfigError: jinja2 is not installed.
    """
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError as error:
        raise ConfigError(
            "chats need the package jinja2, which is not installed",
            hint="pip install 'diloco[tokens]'",
        ) from error

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - as the library declares it

        def parse(self, parser: Any) -> list[Any]:
            line = next(parser.stream).lineno
            mark = nodes.Output([nodes.TemplateData(_MARK)], lineno=line)
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return [mark, *body, mark]

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def as_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    found.globals["raise_exception"] = refuse
    found.filters["tojson"] = as_json
    return found
