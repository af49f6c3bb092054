"""Has the oracle judge a run: records by tape and rules, versions by their objects."""

from typing import NamedTuple

from diloco.check.audit import Breach
from diloco.common.errors import IntegrityError, ObjectMissingError, WireError
from diloco.common.tape import RunContext, load_specification, read_positions, read_tape
from diloco.oracle import Oracle, Remaker


class Judged(NamedTuple):
    """What the oracle says of a run.

    Attributes:
        breaches: one for each finding, in order of the tape.
        followed: records whose decision follows from the tape; `unknown`: those that it could not
            follow, since the tape is trimmed or an earlier release made them.
        remade: versions made again in plain arithmetic.
    """

    breaches: list[Breach]
    followed: int
    unknown: int
    remade: int


async def judge(context: RunContext) -> Judged:
    """Read a run's tape and judge it.

    Raises:
        BusUnavailableError, StoreUnavailableError: as `read_tape`.
    """
    specification = await load_specification(context.bus, context.run)
    remaker = Remaker(context.layout, context.store.get)
    try:
        positions = await context.runtime.call(read_positions, context.store, specification)
    except (ObjectMissingError, IntegrityError, WireError) as error:
        return Judged([Breach("data", "the specification", error.message)], 0, 0, 0)
    oracle = Oracle(specification, context.layout, remaker=remaker, positions=positions)
    async for item in read_tape(context):
        await context.runtime.call(oracle.take, item)
    return Judged(
        [
            Breach(one.rule, f"message {one.seq}", one.sentence)
            for one in oracle.findings
            # An object that is damaged is told of as such: no rule was broken.
            if one.rule != "input"
        ],
        sum(chain.followed for chain in oracle.chains),
        sum(len(chain.unknown) for chain in oracle.chains),
        remaker.remade,
    )
