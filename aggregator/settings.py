"""Changes the settings of a run under way: one message on the tape, by compare-and-swap.

Every fragment follows the new settings from its next version on, every learner from its next step
boundary. A process that starts later reads the last such message, or the one named in a record.
"""

from diloco.aggregator.compare_and_swap import swap
from diloco.aggregator.context import Context
from diloco.common.process.config import RunSettings, changes, check_changeable
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import ConfigError, RunMismatchError, SwapLostError
from diloco.common.protocol.layout import next_step
from diloco.common.storage.tape import RunContext, effective_settings, last_record


async def change_settings(
    context: Context, settings: RunSettings, *, based_on: int | None = None
) -> list[str]:
    """Publishes settings that hold from each fragment's next version on.

    Returns each changed setting, as in "outer.learning_rate: 0.9 -> 0.5"; [] if none has changed,
    and then publishes nothing.

    Args:
        context: the operator's context.
        settings: all settings, changed or not.
        based_on: stream sequence of the settings from which `settings` were derived, as
            `effective_settings` returned it; the change is refused if the settings in force are
            newer. None: no such check.

    Raises:
        ConfigError: a setting that is fixed at creation, or a `run.steps` that the run has passed.
        RunMismatchError: the run has stopped, or another operator has just changed its settings.
    """
    before, before_seq = await effective_settings(context)
    if based_on is not None and based_on != before_seq:
        raise _changed_meanwhile(context)
    await check_change(context, before, settings)
    changed = changes(before, settings)
    if not changed:
        return []
    message = wire.Settings(
        run=context.run,
        settings=settings.model_dump(),
        changed=tuple(changed),
        by=context.name,
    )
    subject = names.settings(context.run)
    try:
        await swap(context, subject, wire.encode(message), context.runtime.new_id(), before_seq)
    except SwapLostError as error:
        raise _changed_meanwhile(context) from error
    return changed


async def check_change(context: RunContext, before: RunSettings, after: RunSettings) -> None:
    """Refuses a change of settings that the run cannot follow now.

    Args:
        context: the operator's context.
        before: the settings in force.
        after: the new settings.

    Raises:
        ConfigError: a setting that is fixed at creation, or a `run.steps` that the run has passed.
        RunMismatchError: the run has stopped.
    """
    await check_goes_on(context)
    check_changeable(context.settings, after)
    await _check_length(context, before, after)


def _changed_meanwhile(context: Context) -> RunMismatchError:
    return RunMismatchError(
        f"the settings of run {context.run!r} have just been changed by another operator",
        hint="repeat, if the change is still wanted",
    )


async def _check_length(context: RunContext, before: RunSettings, after: RunSettings) -> None:
    """Refuses a `run.steps` that the run has passed, as the run's clock would have to go back.

    Raises:
        ConfigError: a fragment's present round ends beyond `run.steps`.
    """
    if after.run.steps >= before.run.steps:
        return
    fragments = range(len(context.layout.fragments))
    newest = [(await last_record(context, fragment))[0] for fragment in fragments]
    reached = max(next_step(after.sync.rhythm(r.fragment), r.global_step) for r in newest)
    if after.run.steps < reached:
        raise ConfigError(
            f"run.steps = {after.run.steps}: the round that is being made goes to step {reached}",
            hint="end the run as soon as its rounds are closed: diloco run end RUN",
        )


async def end_run(context: Context, reason: str) -> int:
    """Stops a run early; returns the run's clock, in steps: the highest of its fragments.

    Learners send their unsent updates, then the last rounds close.

    Raises:
        RunMismatchError: the run has stopped already.
    """
    await check_goes_on(context)
    fragments = range(len(context.layout.fragments))
    newest = [(await last_record(context, fragment))[0] for fragment in fragments]
    step = max(record.global_step for record in newest)
    stop = wire.Stop(run=context.run, global_step=step, reason=reason, by=context.name)
    try:
        await swap(context, names.stop(context.run), wire.encode(stop), context.runtime.new_id(), 0)
    except SwapLostError:
        await check_goes_on(context)
    return step


async def check_goes_on(context: RunContext) -> None:
    """Raises if the run has stopped.

    Raises:
        RunMismatchError: the run has stopped.
    """
    if await context.bus.last(context.tape, names.stop(context.run)) is not None:
        raise RunMismatchError(
            f"run {context.run!r} has stopped",
            hint="create another run from its parameters: diloco export RUN DIR, then diloco run "
            "create --config FILE --from DIR/model.safetensors",
        )
