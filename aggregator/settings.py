"""Settings that a run changes while it goes on: one message of the tape, by compare-and-swap.

Every fragment takes them from its next version on, every learner at its next step boundary; whoever
comes later finds the last such message, or the one that a record names.
"""

from diloco.aggregator.context import Context, identity, swap
from diloco.common import names, wire
from diloco.common.config import RunSettings, changes, check_changeable
from diloco.common.errors import RunMismatchError, SwapLostError
from diloco.common.tape import parse_changed


async def effective_settings(context: Context) -> tuple[RunSettings, int]:
    """The settings that the run follows, or will from each fragment's next version on.

    With the stream sequence of the message that said so, 0 for the specification's.
    """
    last = await context.bus.last(context.tape, names.settings(context.run))
    if last is None:
        return context.settings, 0
    return parse_changed(context.settings, last), last.seq


async def change_settings(context: Context, settings: RunSettings) -> list[str]:
    """Put settings in force from each fragment's next version on; what differs from before.

    Raises:
        ConfigError: a difference that no run can take while it goes on.
        RunMismatchError: the run has stopped, or somebody else has just changed its settings.
    """
    await check_goes_on(context)
    before, before_seq = await effective_settings(context)
    check_changeable(context.settings, settings)
    changed = changes(before, settings)
    if not changed:
        return []
    message = wire.Settings(run=context.run, settings=settings.model_dump(), changed=tuple(changed))
    subject = names.settings(context.run)
    try:
        await swap(context, subject, wire.encode(message), identity(context), before_seq)
    except SwapLostError as error:
        raise RunMismatchError(
            f"the settings of run {context.run!r} have just been changed by another operator",
            hint="repeat, if the change is still wanted",
        ) from error
    return changed


async def check_goes_on(context: Context) -> None:
    """Refuse what only a run that has not stopped can take.

    Raises:
        RunMismatchError: it has stopped.
    """
    if await context.bus.last(context.tape, names.stop(context.run)) is not None:
        raise RunMismatchError(
            f"run {context.run!r} has stopped",
            hint="create another run from its parameters: diloco run create --from FILE",
        )
