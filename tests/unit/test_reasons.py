"""Why something is refused: one list of reasons, which everybody who refuses draws from."""

from pathlib import Path

import msgpack
import pytest
from messages import EXAMPLES

from diloco.common.protocol import wire
from diloco.common.protocol.reasons import Reason, find, is_offence

ROOT = Path(__file__).parents[2]


def test_who_could_not_know_or_did_nothing_is_no_offender():
    honest = {"ended", "internal", "late", "quarantined", "rolled_back", "stale", "superseded"}
    rejecting = {reason for reason in Reason if {*reason.stages} & {"manifest", "objects"}}
    assert {reason.value for reason in rejecting if not is_offence(reason)} == honest


def test_a_reason_of_another_release_is_read():
    assert find("fatigue") is None
    assert is_offence("fatigue")
    assert find("checksum") is Reason.CHECKSUM


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_is_a_plain_word_on_the_wire_and_in_texts(reason):
    message = EXAMPLES[wire.Rejection].model_copy(update={"reason": reason})
    assert msgpack.unpackb(wire.encode(message))["reason"] == reason.value
    assert f"{reason}{reason!r}{[reason]}" == f"{reason.value}{reason.value!r}{[reason.value]}"


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_says_what_it_means_and_what_to_do(reason):
    assert reason.text
    assert (ROOT / reason.runbook).is_file()
