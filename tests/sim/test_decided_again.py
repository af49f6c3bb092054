"""Every decision of a run can be reproduced from its tape and records, under any faults."""

from collections import Counter

import pytest
from simrun import simulate
from simtrial import Trial

from diloco.common.process.config import parse_settings
from diloco.common.protocol import names, wire
from diloco.common.storage.tape import read_message
from diloco.replay.decide import decide
from diloco.run.history import History

SEEDS = 6


def history_of(world) -> History:
    """Returns the part of the world's tape that is left at the end."""
    run = world.run_name
    messages = list(world.broker.stream(names.tape_stream(run)).log.values())
    (said,) = [message for message in messages if message.subject == names.spec(run)]
    specification = wire.decode(wire.Specification, said.payload)
    history = History(
        specification=specification,
        settings=parse_settings(specification.settings),
        layout=world.layout,
        store=world.store,
    )
    for message in messages:
        history.take(read_message(message, world.store, world.layout))
    return history


@pytest.mark.parametrize("first", [100, 100 + SEEDS])
def test_every_decision_of_every_seed(first):
    outcomes: Counter[str] = Counter()
    for seed in range(first, first + SEEDS):
        outcome = simulate(Trial(seed=seed))
        assert outcome.violation is None
        history = history_of(outcome.world)
        for fragment, chain in history.records.items():
            for decision in decide(history, fragment, chain):
                about = f"seed {seed}, fragment {fragment}, record {decision.record_seq}"
                assert decision.outcome != "different", f"{about}: {decision.fields}"
                outcomes[decision.outcome] += 1
    # Garbage is collected at once here: the oldest records alone do not say all.
    assert outcomes["same"] > outcomes["unknown"] > 0
