"""A tokenizer, documents and prepared data for tests: of files that every machine has, and small."""

import functools
import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from typer.testing import CliRunner, Result

from diloco.program import app

ROOT = Path(__file__).parents[1]
BEGIN, END = "<|begin|>", "<|end|>"
VOCABULARY = 320


@functools.cache
def trained(begin: bool) -> str:
    """A byte-level tokenizer.json of the standard library; one sets a token before a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    stdlib = Path(sysconfig.get_path("stdlib"))
    texts = [(stdlib / f"{name}.py").read_text() for name in ("abc", "bisect", "glob", "this")]
    tokenizer.train_from_iterator(texts, trainer)
    if begin:
        special = [(BEGIN, tokenizer.token_to_id(BEGIN))]
        tokenizer.post_processor = processors.TemplateProcessing(f"{BEGIN} $A", None, special)
    return str(tokenizer.to_str())


def make_tokenizer(folder: Path, *, begin: bool = False, **changed: Any) -> Path:
    """A Hugging Face folder's files of a tokenizer; its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    document = json.loads(trained(begin)) | changed
    (folder / "tokenizer.json").write_text(json.dumps(document))
    end = {"__type": "AddedToken", "content": END}
    config = {"eos_token": end, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def make_texts(folder: Path, count: int = 24) -> Path:
    """Documents: the beginning of modules of the standard library, one a file."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-m]*.py"))[:count]:
        (folder / f"{path.stem}.txt").write_text(path.read_text()[:2000])
    return folder


def command(*words: object) -> Result:
    """`diloco data WORDS`, in this process; an error is the result's exception."""
    return CliRunner().invoke(app, ["data", *map(str, words)])


def checked(place: object) -> Result:
    """`diloco check PLACE`, in this process; an error is the result's exception."""
    return CliRunner().invoke(app, ["check", str(place)])


def prepared(*words: object) -> Result:
    """`diloco data prepare WORDS` that ends well."""
    done = command("prepare", *words)
    assert done.exit_code == 0, done.output + repr(done.exception)
    return done


def contents(folder: Path) -> dict[str, bytes]:
    """All that a folder has, hidden or not."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def decoded(tokenizer: Path, tokens: Sequence[int]) -> str:
    """The text of tokens, special ones too."""
    found = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    return str(found.decode(list(tokens), skip_special_tokens=False))
