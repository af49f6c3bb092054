"""`diloco run delete` that is interrupted can be repeated, and leaves nothing that would mislead."""

import contextlib
from types import SimpleNamespace

import pytest
from runlab import RUN, Lab

from diloco.common.protocol import names
from diloco.common.protocol.errors import BusUnavailableError
from diloco.operate import remove


def test_a_removal_that_was_interrupted_is_repeated(run_async, monkeypatch):
    """Leases that outlive their tape would say to a new run of the name that all is done."""

    async def scenario():
        lab = Lab()
        await lab.create()
        config = SimpleNamespace(bus=SimpleNamespace(url="bus"), store=SimpleNamespace(url="store"))

        @contextlib.asynccontextmanager
        async def opened(_target):
            await lab.bus.last_sequence(names.tape_stream(RUN))
            yield SimpleNamespace(context=lab.context, config=config)

        monkeypatch.setattr(remove, "open_run", opened)
        found = await remove.belongings(RUN, going_on=True)
        remove_stream, removed = lab.bus.remove_stream, []

        async def once(stream):
            if removed:
                raise BusUnavailableError("no answer")
            removed.append(stream)
            await remove_stream(stream)

        monkeypatch.setattr(lab.bus, "remove_stream", once)
        with pytest.raises(BusUnavailableError):
            await remove.remove(RUN, found)
        monkeypatch.setattr(lab.bus, "remove_stream", remove_stream)
        await remove.remove(RUN, await remove.belongings(RUN, going_on=True))
        return await lab.bus.streams(), lab.objects()

    assert run_async(scenario()) == ([], set())
