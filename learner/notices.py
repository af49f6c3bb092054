"""What a learner hears of the whole run: changed settings, its stop and end, and open rounds."""

import asyncio

from diloco.common import names, wire
from diloco.common.bus import Message
from diloco.common.errors import WireError
from diloco.common.service import cancel
from diloco.common.tape import decode_as, parse_changed
from diloco.learner import sync
from diloco.learner.boundary import Post
from diloco.learner.context import Context


async def follow_run(context: Context, post: Post) -> None:
    """Hand these over as they come; never returns."""
    run = context.run
    # One subject to a reader: so the server can fence what a learner reads. Their order among each
    # other does not matter here.
    subjects = (names.settings(run), names.stop(run), names.end(run))
    tasks = [
        *(asyncio.ensure_future(_follow_subject(context, post, subject)) for subject in subjects),
        asyncio.ensure_future(_listen(context, post)),
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel(*tasks)


async def _follow_subject(context: Context, post: Post, subject: str) -> None:
    """Hand over the messages of one subject.

    Only the last one matters of those that are there. It may be one of a replica that is behind: so
    what follows it is read in order, from it on and not from the newest records.
    """
    last = await context.runtime.retry(
        "reading the tape",
        lambda: context.bus.last(context.tape, subject),
        logger=context.logger,
    )
    if last is not None:
        _pass_on(context, post, last)
    start = 1 if last is None else last.seq + 1
    async for message in context.bus.read(context.tape, [subject], start):
        # What a bus delivers again may be of the past: settings that hold no more.
        if message.seq >= start:
            start = message.seq + 1
            _pass_on(context, post, message)


def _pass_on(context: Context, post: Post, message: Message) -> None:
    # Stop and end by their subject alone: a run that nobody could stop is worse.
    match names.parse_subject(message.subject):
        case names.Subject(kind="stop"):
            post(sync.Stop())
        case names.Subject(kind="end"):
            post(sync.End())
        case _:
            try:
                settings = parse_changed(context.settings, message)
            except WireError as error:
                context.logger.warning("unreadable", subject=message.subject, reason=error.reason)
                return
            context.logger.info("settings", settings_seq=message.seq)
            context.answers.interval_steps = settings.sync.interval_steps
            rules = sync.sync_rules(settings.sync, context.layout, paused=settings.run.paused)
            post(sync.Changed(rules))


async def _listen(context: Context, post: Post) -> None:
    async for heard, payload in context.bus.listen(names.round_open(context.run, "*")):
        try:
            opened = decode_as(wire.RoundOpen, heard, payload)
        except WireError as error:
            context.logger.warning("unreadable", subject=heard, reason=error.reason)
            continue
        post(sync.RoundOpened(opened.fragment, opened.version))
