"""Chats become tokens of which only the assistant's are trained on, and what is refused."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from token_lab import END, command, make_tokenizer, prepared
from tokenizers import Tokenizer

from diloco.common.protocol.errors import ConfigError, DataError
from diloco.learner.load_and_check_task import load_task
from diloco.learner.task import Task
from diloco.learner.tensors.inner_step import make_inner_step
from diloco.models.data.chats import ChatError, ChatTemplate
from diloco.models.decoders import model
from diloco.models.decoders.config import parse_config
from diloco.models.decoders.task import loss_sums
from diloco.models.decoders.tokens import TokenFolders
from tests.models.cases import LLAMA

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{%- for m in messages -%}<{{ m.role }}>"
    "{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}</>{% endgeneration %}"
    "{%- else %}{{ m.content }}</>{% endif %}{{ '\\n' }}{% endfor %}"
)
# As templates that leave out what was thought in earlier turns.
FORGETS = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else '' }}")


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


TALK = [{"role": "system", "content": "be\nbrief"}, user("one ü?"), assistant("two."),
        user("漢字"), assistant("three 🙂")]  # fmt: skip


def answers(chat):
    return [chat.text[begin:end] for begin, end in chat.answers]


def write_chats(path, chats):
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


@pytest.fixture
def tokenizer(tmp_path):
    folder = make_tokenizer(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(PLAIN)
    return folder


def test_an_answer_is_what_the_template_writes_behind_the_prompt_for_it():
    assert answers(ChatTemplate(PLAIN, "it", {}).chat(TALK)) == ["two.</>\n", "three 🙂</>\n"]


def test_a_template_that_marks_answers_is_believed():
    plain, marked = (ChatTemplate(source, "it", {}).chat(TALK) for source in (PLAIN, MARKED))
    assert answers(marked) == ["two.</>", "three 🙂</>"]
    assert marked.text == plain.text


def test_a_template_has_its_words_its_tools_and_no_clock():
    source = (
        "{{ bos_token }}{{ tools | tojson }}{{ strftime_now is defined }}"
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}"
        "{% endfor %}"
    )
    chat = ChatTemplate(source, "it", {"bos_token": "<s>"}).chat([assistant("a")], [{"n": "<ü>"}])
    assert chat.text == '<s>[{"n": "<ü>"}]Falsea'


@pytest.mark.parametrize(
    ("messages", "source", "words"),
    [
        ("hello", PLAIN, "holds str, not a list of messages"),
        ([{"from": "human", "value": "a"}], PLAIN, "message 1 has no role: it has from, value"),
        ([user("a"), {"role": "gpt", "content": "b"}], PLAIN, "message 2 has the role 'gpt'"),
        ([user("a"), {"role": "system", "content": "b"}], PLAIN, "message 2 .*'system', behind"),
        ([user("a"), assistant(None)], PLAIN, "message 2 has no content"),
        ([user(f"{END}a"), assistant("b")], PLAIN, "message 1 spells the special token"),
        ([user("a"), assistant("b\0")], PLAIN, "message 2 spells"),
        ([user("a")], PLAIN, "no message of it is the assistant's"),
        ([user("a")], MARKED, "no message of it is the assistant's"),
        ([user("a"), assistant("b"), user("c"), assistant("d")], FORGETS, "message 2 .*be told"),
        ([assistant("a")], "{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ([assistant("a")], "{{ messages[3].content }}", "does not take it"),
        ([assistant("a")], "{{ messages.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_chat_that_cannot_be_is_refused(messages, source, words):
    with pytest.raises(ChatError, match=words) as told:
        ChatTemplate(source, "it", {}, [END]).chat(messages)
    assert told.value.hint


def test_tokens_that_the_assistant_does_not_say_are_below_zero(tmp_path, tokenizer):
    chats = [
        [user(f"question {i}?"), assistant(f"answer {i}."), user("more"), assistant(f"answer {i}!")]
        for i in range(40)
    ]
    source = write_chats(tmp_path / "chats.jsonl", chats)
    given = [source, "--chats", "--tokenizer", tokenizer, "--held-out", 0.2]
    said = prepared(*given, "--out", tmp_path / "out").output
    folders = TokenFolders(str(tmp_path / "out"), length=32, vocab=400, model=tokenizer)
    rows = folders.train(seed=0)
    batch = np.stack([rows[index] for index in range(len(rows))])
    library = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    tokens = np.where(batch < 0, ~batch, batch)
    text = library.decode(tokens[:, :-1].ravel().tolist(), skip_special_tokens=False)
    learned = library.decode(batch[:, :-1][batch[:, :-1] >= 0].tolist())
    assert re.search(r"<user>more</>\n<assistant>answer \d+!</>\n<\|end\|>", text)
    assert re.fullmatch(r"(.*</>\n)?(answer \d+[.!]</>\n)+.*", learned)
    manifest = json.loads((tmp_path / "out" / "tokens.json").read_text())
    stored = np.concatenate([np.load(path) for path in sorted((tmp_path / "out").glob("train*"))])
    assert sum(shard["unlearned"] for shard in manifest["shards"] if shard["side"] == "train") == (
        np.sum(stored < 0)
    )
    assert f"({np.sum(stored >= 0)} trained on)" in said
    assert folders.held_out(1)[0].min() < 0 <= folders.end


def test_only_answers_make_the_loss():
    config = parse_config(LLAMA, source="")
    params = model.init_params(config, jax.random.key(0))
    window = np.arange(10, 19)[None]

    @jax.jit
    def sums(learned, end):
        windows = jnp.where(learned, window, ~window)
        return loss_sums(config, params, windows, compute=model.DEFAULT, end=end)

    place, none = np.arange(9), 99
    whole, first, last = (sums(which, none) for which in (place >= 0, place < 6, place >= 6))
    assert (int(whole.learned), int(first.learned), int(last.learned)) == (8, 5, 3)
    assert float(whole.losses) == pytest.approx(float(first.losses + last.losses), rel=1e-5)
    assert float(last.losses) > 1
    # What follows the end of a document is not predicted from it.
    assert int(sums(place >= 6, 16).learned) == 2
    assert float(sums(place < 0, none).mean()) == 0


@pytest.mark.long
def test_the_held_out_loss_is_the_mean_over_answers_of_all_rows(tmp_path, tokenizer):
    chats = [[user(f"{i}? " * (i % 9)), assistant(f"answer {i}.")] for i in range(60)]
    source = write_chats(tmp_path / "chats.jsonl", chats)
    out = tmp_path / "out"
    prepared(source, "--chats", "--tokenizer", tokenizer, "--held-out", 0.5, "--out", out)
    (tokenizer / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 400}))
    options = {"model": str(tokenizer), "data": str(out), "length": 32, "batch": 2}
    task = load_task(
        "diloco.models.decoders:build", steps=9, seed=0, options={**options, "fresh": True}
    )
    config = parse_config(LLAMA | {"vocab_size": 400}, source="")
    params = task.init(jax.random.key(0))
    rows = np.concatenate(TokenFolders(str(out), length=32, vocab=400).held_out(32))
    sums = jax.jit(lambda rows: loss_sums(config, params, rows, compute=model.DEFAULT, end=1))(rows)
    counts = ((rows[:, 1:] >= 0) & (rows[:, :-1] != 1) & (rows[:, :-1] != ~1)).sum(axis=1)
    assert len(set(counts)) > 3
    assert int(sums.learned) == counts.sum()
    assert task.evaluate(params) == pytest.approx(float(sums.mean()), rel=1e-5)
    batch = next(task.batches("a", 0))
    assert batch.shape == (2, 33)
    assert int(task.weigh(batch)) == ((batch[:, 1:] >= 0) & (batch[:, :-1] != ~1)).sum()


def test_parts_of_a_batch_count_by_what_is_trained_on():
    def loss(params, batch, key):
        learned = batch > 0
        squares = jnp.square(params["w"] - batch) * learned
        return squares.sum() / jnp.maximum(1, learned.sum()), {}

    task = Task(
        init=lambda key: {"w": jnp.ones(())}, loss=loss, batches=lambda learner, position: iter(()),
        evaluate=lambda params: 0.0, tokens_per_batch=1, optimizer=optax.sgd(0.1),
        weigh=lambda batch: jnp.sum(batch > 0),
    )  # fmt: skip
    # Cut in two parts by turns: one has four that count, the other one.
    batch = np.asarray([1.0, 0.0, 2.0, 7.0, 3.0, 0.0, 4.0, 0.0], np.float32)
    moved = []
    for one in (task, dataclasses.replace(task, accumulate=2)):
        params = one.init(jax.random.key(0))
        params, _, said = make_inner_step(one)(params, one.optimizer.init(params), batch, 0)
        moved.append((float(params["w"]), float(said.loss)))
    assert moved[0] == pytest.approx(moved[1], rel=1e-5)


# Bad input, before anything is written


def refusal(kind, *words):
    error = command("prepare", *words).exception
    assert isinstance(error, kind), repr(error)
    assert error.hint
    return error


def test_chats_that_cannot_be_prepared_are_refused_before_a_folder_is_made(tmp_path, tokenizer):
    good = [user("a"), assistant("b")]
    source = write_chats(tmp_path / "a.jsonl", [good])
    given = [source, "--tokenizer", tokenizer, "--out", tmp_path / "out"]
    assert "--chats" in refusal(DataError, *given).hint
    assert "--chats" in refusal(DataError, *given, "--field", "messages").hint
    assert "add --chats" in refusal(ConfigError, *given, "--template", source).hint
    wrong = write_chats(tmp_path / "b.jsonl", [[user("a"), {"role": "gpt", "content": ""}]])
    assert "line 1 of" in refusal(DataError, wrong, *given[1:], "--chats").message
    (tmp_path / "plain.txt").write_text("text")
    assert (
        "has no chats" in refusal(DataError, tmp_path / "plain.txt", *given[1:], "--chats").message
    )
    template = tokenizer / "chat_template.jinja"
    template.write_text(PLAIN.replace("</>", END))
    assert "within chats" in refusal(DataError, *given, "--chats").message
    template.write_text("{% for %}")
    assert "line 1" in refusal(DataError, *given, "--chats").message
    template.unlink()
    assert "nothing in" in refusal(ConfigError, *given, "--chats").message
    assert (
        "cannot be read" in refusal(ConfigError, *given, "--chats", "--template", template).message
    )
    assert not (tmp_path / "out").exists()
