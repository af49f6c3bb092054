"""What a local run shows of a tape that has a past, and of a run whose length is changed."""

from diloco.common import wire
from diloco.common.config import make_config
from diloco.common.tape import Entry, Garbage
from diloco.local.reading import Reading


def change(seq: int, steps: int) -> Entry:
    """An operator's change of the run's length."""
    document = {"run": {"name": "demo", "steps": steps}, "store": {"url": "/store"}}
    settings = make_config(document, source="a test").settings().model_dump(mode="json")
    body = wire.Settings(run="demo", settings=settings, changed=("run.steps",))
    return Entry(seq, 0.0, "diloco.demo.settings", body, 100)


def test_a_run_is_shown_as_it_stands_once_its_past_is_read() -> None:
    reading = Reading(steps=200, past_seq=9)
    for item in (change(4, 100), Garbage(8, 0.0, "diloco.demo.what", "why")):
        reading.hear(item)
        assert not reading.is_of_now
    reading.hear(Garbage(9, 0.0, "diloco.demo.what", "why"))
    assert reading.is_of_now
    assert reading.steps == 200


def test_a_change_of_the_length_is_followed() -> None:
    reading = Reading(steps=200, past_seq=9)
    reading.hear(change(12, 300))
    assert reading.steps == 300
