"""A bundle of somebody else, whose checksums are all right: what is refused, found, or only said."""

import contextlib
import io
import json
import math
import tracemalloc

import forged
import pytest
import spoiled
from forged import object_at, retold, score_of, with_file, write
from rich.console import Console

from diloco.common.protocol import names, shards, wire
from diloco.common.protocol.errors import ConfigError, IntegrityError, TaskError
from diloco.common.storage.bundle import open_bundle
from diloco.common.storage.tape import decode
from diloco.judge.doctor import examine
from diloco.learner.load_and_check_task import load_task
from diloco.replay.bundle import run_bundle
from diloco.replay.modes import run_replay
from diloco.replay.options import BundleOptions, Options
from diloco.replay.restore import run_unpack
from diloco.show.page.report import gather
from diloco.show.page.summary import warnings


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return spoiled.bundled(tmp_path_factory.mktemp("whole"), versions=4)


@pytest.fixture
def frames(whole):
    return forged.frames_of(whole)


def replay(bundle, **options) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=300)
    return run_replay(str(bundle), Options(**options), console), console.file.getvalue()


# What no bundle is


def changed_header(**changes):
    return lambda frames: [{**frames[0], **changes}, *frames[1:]]


def changed_end(**changes):
    return lambda frames: [*frames[:-1], {**frames[-1], **changes}]


def more(content):
    return lambda frames: [*frames[:3], content, *frames[3:]]


def piece(**changes):
    content = {"object": "a/b", "of": 1, "at": 0, "data": b"x"} | changes
    return more({key: value for key, value in content.items() if value is not None})


def last_message(part, value):
    def change(frames):
        index = max(i for i, one in enumerate(frames) if isinstance(one, list))
        message = list(frames[index])
        message[part] = value
        return [*frames[:index], message, *frames[index + 1 :]]

    return change


def pieces(*parts):
    """An object of a run in two parts of its bytes, each (where it says that it begins, from, to)."""

    def change(frames):
        index = object_at(frames, "/update/")
        one = frames[index]
        size = one["of"]
        cut = [int(size * share) for part in parts for share in part]
        found = [
            one | {"at": cut[i], "data": one["data"][cut[i + 1] : cut[i + 2]]}
            for i in range(0, len(cut), 3)
        ]
        return [*frames[:index], *found, *frames[index + 1 :]]

    return change


def twice(frames):
    return [*frames[:-1], frames[object_at(frames, "/update/")], frames[-1]]


def heartbeats_out_of_order(frames):
    beat = [names.heartbeat(frames[0]["run"], "a"), 9, 1.0, b"", ""]
    return [*frames[:-1], {"ops": beat}, {"ops": [beat[0], 3, *beat[2:]]}, frames[-1]]


STRUCTURE = {
    "a run that is a path": (changed_header(run="../x"), "no run's name"),
    "a run that is a pattern": (changed_header(run="*"), "no run's name"),
    "the log of another run": (changed_header(run="another"), "is of run 'another' and has"),
    "no word on objects": (changed_header(objects=None), "whether it has objects"),
    "no time": (changed_header(made_s="soon"), "which is no time"),
    "a time that is no number": (changed_header(made_s=math.nan), "which is no time"),
    "a time without end": (changed_header(made_s=1e300), "which is no time"),
    "a loss that is no sentence": (changed_header(lost=[1]), "no sentence"),
    "a number": (more(7), "a frame that is a int"),
    "nothing": (more(None), "a frame that is a NoneType"),
    "a word": (more("messages"), "a frame that is a str"),
    "keys that are none": (more({1: 2}), "holds no msgpack"),
    "no place": (piece(at=None), "lies outside"),
    "a number for a name": (piece(object=5), "a piece of no object"),
    "text for bytes": (piece(data="x"), "a piece of no object"),
    "less than nothing": (piece(of=-1), "lies outside"),
    "more than there is": (piece(of=(1 << 63) + 5), "lies outside"),
    "behind its end": (piece(at=1), "lies outside"),
    "empty pieces without end": (piece(of=9, data=b""), "an empty piece"),
    "an object that is a path": (piece(object="../x"), "is not an object name"),
    "an absolute object": (piece(object="/etc/x"), "is not an object name"),
    "an object twice": (twice, "in part or twice"),
    "pieces that overlap": (pieces((0, 0, 0.5), (0.25, 0.25, 0.75)), "in part or twice"),
    "pieces in another order": (pieces((0.5, 0.5, 1), (0, 0, 0.5)), "in part or twice"),
    "an end without objects": (changed_end(objects=None), "ends with"),
    "oldest records that are none": (changed_end(oldest=[1]), "oldest records"),
    "oldest records of no fragment": (changed_end(oldest={"x": 3}), "oldest records"),
    "a message of another run": (last_message(0, "diloco.other.end"), "of 'diloco.other.end'"),
    "a message of no subject": (last_message(0, ""), "of ''"),
    "a line more in a subject": (
        last_message(0, "diloco.spoiled-plain.update.a\r\nPUB x.0"), "and has a message",
    ),
    "a sequence without end": (last_message(1, (1 << 63) + 5), "of sequence"),
    "a sequence below one": (last_message(1, -5), "of sequence"),
    "a message of no time": (last_message(2, math.nan), "of time nan"),
    "a message of the end of time": (last_message(2, 1e308), "of time 1e\\+308"),
    "headers in an id": (last_message(4, "x\r\nNats-Rollup: all"), "no server gave it"),
    "heartbeats out of order": (heartbeats_out_of_order, "3 comes after 9"),
}  # fmt: skip


@pytest.mark.parametrize("case", STRUCTURE)
def test_what_no_bundle_is_is_refused(frames, tmp_path, case):
    change, said = STRUCTURE[case]
    path = write(tmp_path / "x.bundle", change(frames))
    with pytest.raises(IntegrityError, match=said):
        open_bundle(path)
    # What is whole of it can be salvaged, or is refused with a sentence as well.
    with contextlib.suppress(IntegrityError):
        open_bundle(path, salvage=True).close()


FILES = {
    "up": "../x", "up from within": "logs/../../x", "absolute": "/tmp/x", "none": "", "here": ".",
    "a nought": "a\0b", "a terminal's": "\x1b[31mred", "long": "x" * 5000, "long inside": "x" * 300,
    "doubled": "a//b", "of another system": "..\\x", "a module": "logs/evil.py",
    "a compiled module": "logs/evil.SO",
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_nothing_is_written_of_files_that_lead_elsewhere(frames, tmp_path, case):
    good = with_file(frames, "logs/one.log")
    path = write(tmp_path / "x.bundle", with_file(good, FILES[case]))
    before = {*tmp_path.rglob("*")}
    with pytest.raises(IntegrityError, match="which no bundle has"):
        run_unpack(path, tmp_path / "out")
    assert {*tmp_path.rglob("*")} == before


def test_a_file_in_a_file_is_refused_before_anything_is_written(frames, tmp_path):
    path = write(tmp_path / "x.bundle", with_file(frames, "about.json/x"))
    with pytest.raises(IntegrityError, match="and in it a file"):
        run_unpack(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_comes_out_is_said_to_be_its_makers_word(frames, tmp_path, capsys):
    path = write(tmp_path / "x.bundle", with_file(frames, "logs/a.log", b"all is well"))
    run_unpack(path, tmp_path / "out")
    assert "nothing has checked what they say" in " ".join(capsys.readouterr().out.split())


def test_no_log_is_taken_that_no_reader_would_take(whole, tmp_path):
    log = tmp_path / "evil.py"
    log.write_text("a line")
    with pytest.raises(ConfigError, match="is not a name that a bundle can hold"):
        run_bundle(str(whole), tmp_path / "x.bundle", BundleOptions(logs=[log]))
    assert not (tmp_path / "x.bundle").exists()


def test_a_large_file_takes_no_more_memory_than_its_pieces(frames, tmp_path):
    """Zeros, which a compressed file would have in nothing: here each has its place."""
    size, part = 32 << 20, 1 << 20
    zeros = [
        {"file": "logs/z.log", "of": size, "at": at, "data": bytes(part)}
        for at in range(0, size, part)
    ]
    path = write(tmp_path / "x.bundle", [*frames[:-1], *zeros, frames[-1]])
    tracemalloc.start()
    try:
        run_unpack(path, tmp_path / "out")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "out/logs/z.log").stat().st_size == size
    assert most < size / 3


# What is a bundle, and says what was not


def test_chained_again_as_it_was_a_tape_is_verified(frames, tmp_path):
    """The forger's own rewriting, without a change, is no reason to refuse."""
    status, text = replay(write(tmp_path / "x.bundle", retold(frames, lambda body: body)))
    assert (status, "bit for bit" in text) == (0, True), text


def test_another_update_under_a_manifest_made_anew_does_not_give_the_version(frames, tmp_path):
    """Object, its checksum in manifest and record, and the chain: all fit each other."""
    first = object_at(frames, "/update/0/0-")
    other = object_at(frames[first + 1 :], "/update/0/0-") + first + 1
    name, data = frames[first]["object"], frames[other]["data"]
    frames[first] |= {"data": data, "of": len(data)}
    checksum = shards.crc32c(data)

    def anew(part):
        if part.name != name:
            return part
        return part.model_copy(update={"crc32c": checksum, "size_bytes": len(data)})

    def change(body):
        if isinstance(body, wire.Manifest):
            return body.model_copy(update={"shards": tuple(map(anew, body.shards))})
        if isinstance(body, wire.Record):
            inputs = tuple(
                one.model_copy(update={"shards": tuple(map(anew, one.shards))})
                for one in body.inputs
            )
            return body.model_copy(update={"inputs": inputs})
        return body

    status, text = replay(write(tmp_path / "x.bundle", retold(frames, change)))
    assert status == 1, text
    assert "1 WRONG" in text


def test_a_record_that_names_another_learner_is_not_what_its_manifest_says(frames, tmp_path):
    """Blame laid on somebody else: with a new chain, but against what was announced."""

    def change(body):
        if not isinstance(body, wire.Record):
            return body
        swapped = {"island-c": "island-a", "island-a": "island-c"}
        inputs = tuple(
            one.model_copy(update={"learner": swapped.get(one.learner, one.learner)})
            for one in body.inputs
        )
        return body.model_copy(update={"inputs": inputs})

    status, text = replay(write(tmp_path / "x.bundle", retold(frames, change)))
    assert status == 1, text


def forged_scores(frames):
    """Losses of every version of which the first falls to nothing, as its maker would have them."""
    bodies = [(one[1], decode(one[0], one[3])) for one in frames if isinstance(one, list)]
    newest = {}
    for seq, body in bodies:
        if isinstance(body, wire.Record):
            newest[body.fragment] = (seq, body)
            if len(newest) == spoiled.FRAGMENTS:
                at = [newest[fragment] for fragment in sorted(newest)]
                score = wire.Score(
                    run=body.run, epoch=0, versions=tuple(record.version for _, record in at),
                    record_seqs=tuple(place for place, _ in at), global_step=body.global_step,
                    tokens=1, at_s=body.closed_at_s, loss=1e-9,
                )  # fmt: skip
                frames = score_of(frames, score)
    return frames


def test_losses_that_came_with_a_file_are_said_to_be_its_makers(frames, tmp_path, capsys):
    path = write(tmp_path / "x.bundle", forged_scores(frames))
    status, text = replay(path, score=True)
    assert status == 0
    assert "9 of the losses came with the file: nothing here has made them again" in text
    capsys.readouterr()
    replay(path, score=True, json=True)
    assert json.loads(capsys.readouterr().out)["kept"] == 9
    # Of a file's own versions that were scored here nothing of the kind is said.
    assert "came with the file" not in replay(write(tmp_path / "y.bundle", frames), score=True)[1]


def test_doctor_and_report_say_that_a_file_is_its_makers_word(whole, run_async):
    report = run_async(examine(str(whole)))
    (found,) = [one for one in report.findings if one.about == "file"]
    assert (found.severity, "its maker's word" in found.sentence) == ("note", True)
    shown, _ = gather(str(whole), 0, lambda *_: None, pairs=False)
    assert any("the file's maker" in text for text in warnings(shown))


def test_a_strangers_task_that_takes_anything_is_not_called():
    """A bundle names the function that makes its model: what takes any keyword is none."""
    said = []
    globals()["anything"] = lambda **given: said.append(given)
    with pytest.raises(TaskError, match="must name seed and steps"):
        load_task(f"{__name__}:anything", steps=1, seed=0, options={"args": ["rm"]})
    assert said == []
