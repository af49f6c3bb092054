"""Room for decoded versions: what the training loop's thread gives back, the event loop gets."""

import asyncio
import threading

from diloco.learner.wire.fetch_versions import Room


def test_who_waits_for_room_hears_of_each_part_that_a_thread_gives_back(run_async):
    async def scenario():
        room = Room(10)
        for _ in range(10):
            room.take(1)
        giving = threading.Thread(target=lambda: [room.give_back(1) for _ in range(10)])
        giving.start()
        while not room.fits(10):
            async with asyncio.timeout(300):
                await room.freed()
        giving.join()
        return room.taken_bytes

    assert run_async(scenario()) == 0


def test_all_who_wait_for_room_look_again(run_async):
    async def scenario():
        room = Room(10)
        room.take(10)
        got = []

        async def wait(name):
            while not room.fits(5):
                await room.freed()
            room.take(5)
            got.append(name)

        waiting = [asyncio.ensure_future(wait(name)) for name in "ab"]
        await asyncio.sleep(0)
        threading.Thread(target=room.give_back, args=(10,)).start()
        async with asyncio.timeout(300):
            await asyncio.gather(*waiting)
        return sorted(got)

    assert run_async(scenario()) == ["a", "b"]


def test_nobody_is_woken_who_does_not_wait(run_async):
    async def scenario():
        room, woken = Room(10), []
        asyncio.get_running_loop().call_soon_threadsafe = lambda *call: woken.append(call)
        room.take(5)
        assert room.fits(5)
        room.give_back(5)
        assert not woken
        room.take(10)
        assert not room.fits(5)
        room.give_back(10)
        return woken

    assert len(run_async(scenario())) == 1
