"""When a round opens, is cut and closes: docs/design/design.md, "A round and its merge"."""

from diloco.common.protocol.reasons import Reason
from diloco.judge.oracle import numbers
from diloco.judge.oracle.life import Close, OwnerLife


def time_up_s(life: OwnerLife) -> float | None:
    """Returns when the round stops waiting, in seconds since the epoch; None if no timer runs.

    The timer is that of the read, of the deadline, of the grace window, or of the pace.
    """
    if life.final:
        return None
    quorum = life.settings.quorum
    if life.cut is not None:
        waits = bool(life.cut_at_s and life.unread())
        return life.cut_at_s + quorum.read_timeout_s if waits else None
    if life.memory.stopping_at_s:
        return max(life.memory.stopping_at_s, life.began_at_s) + quorum.deadline_s
    if life.phase == "idle":
        return opens_at_s(life)
    deadline_s = life.opened_at_s + quorum.deadline_s
    if life.phase == "open" or life.settings.sync.mode == "lockstep":
        return deadline_s
    memory = life.memory
    window_s = numbers.grace_s(life.settings, memory.step_times(), memory.quorum_s, memory.sync_s)
    return min(deadline_s, life.quorum_at_s + window_s)


def opens_at_s(life: OwnerLife) -> float | None:
    """Returns when the round opens: at the first announcement, or at the pace time if later.

    None: nothing is announced, or the fragment has no further round.
    """
    told = [one.announced_at_s for one in life.unread()]
    told += [one.announced_at_s for one in life.merged]
    if not told or not life.may_follow():
        return None
    memory, pace_at_s = life.memory, 0.0
    if memory.closed_at_s and not memory.stopping_at_s:
        steps = life.next_clock() - life.clock
        pace_at_s = memory.closed_at_s + numbers.pace_s(life.settings, memory.step_times(), steps)
    return max(pace_at_s, min(told), life.began_at_s)


def settle(life: OwnerLife) -> None:
    """Advances the round after an event: it opens, reaches its quorum, or makes a record due."""
    if life.due is not None:
        return
    _empty(life)
    free = not life.storing
    if life.phase == "idle" and life.refused and free:
        life.due = Close("verdict", "rejections", life.final, life.now_s)
    elif life.final:
        return
    elif life.cut is not None:
        if life.cut_at_s and not life.unread() and free:
            _end_cut(life, *life.cut)
    else:
        _go_on(life)


def _empty(life: OwnerLife) -> None:
    """Returns the round to idle if all its announcements failed, as if it had not opened."""
    asking = life.cut is not None and (life.cut[1] or not life.cut_at_s)
    waits = any(not one.passed for one in life.waiting.values())
    if not (asking or life.merged or waits):
        life.phase, life.cut = "idle", None


def _end_cut(life: OwnerLife, reason: str, final: bool) -> None:
    if final:
        # Senders are not charged for updates that could not wait any longer.
        for one in [*life.waiting.values()]:
            life.refuse(one.manifest, one.stream_seq, Reason.LATE)
        _close(life, reason, final=True)
    elif life.merged:
        _close(life, reason)
    else:
        life.phase, life.cut = "open", None
        life.opened_at_s, life.quorum_at_s = life.now_s, 0.0
        settle(life)


def _go_on(life: OwnerLife) -> None:
    if life.phase == "idle":
        at_s = opens_at_s(life)
        if at_s is not None and (life.now_s >= at_s or _all_announced(life)):
            at_s = min(at_s, life.now_s)
            life.phase, life.opened_at_s, life.quorum_at_s = "open", at_s, 0.0
    if life.memory.stopping_at_s:
        _end_run(life)
    elif life.phase != "idle":
        _count(life)
        if not life.storing and _complete(life):
            _close(life, "complete")


def _all_announced(life: OwnerLife) -> bool:
    """True if all live learners have announced: then the round opens before the pace time."""
    return life.memory.waited_for().keys() <= life.announcers()


def _end_run(life: OwnerLife) -> None:
    """Closes the last rounds after the stop.

    It waits until no update waits, and the owner has reread what earlier owners had read.
    """
    if life.waiting or life.storing or life.read_seq < life.known_seq:
        return
    awaited = {name for name, member in life.memory.waited_for().items() if not member.final}
    if not awaited:
        _close(life, "final", final=True)
    elif life.merged and awaited <= life.answered():
        _close(life, "complete")


def _count(life: OwnerLife) -> None:
    """Counts announcers towards the quorum; it is lost again if too many of their updates fail."""
    quorum, there = life.settings.quorum, len(life.memory.awaited())
    lockstep = life.settings.sync.mode == "lockstep"
    needed = quorum.min_learners if lockstep else max(1, min(quorum.min_learners, there))
    if life.settings.run.trust == "others":
        thirds = there - there // 3
        needed = max(needed, thirds if life.version else max(3, thirds))
    reached = len(life.announcers()) >= needed
    if reached and life.phase == "open":
        life.phase, life.quorum_at_s = "grace", max(life.opened_at_s, life.now_s)
        took_s = numbers.between_s(life.opened_at_s, life.quorum_at_s)
        life.memory.quorum_s = numbers.moved(life.memory.quorum_s, took_s)
    elif not reached and life.phase == "grace":
        life.phase, life.quorum_at_s = "open", 0.0


def _complete(life: OwnerLife) -> bool:
    """True if the round answers an update of every awaited learner, and no update is unread.

    An update that was passed on to the next round does not count as unread. With lockstep, at least
    `quorum.min_learners` learners must be answered.
    """
    answered = life.answered()
    lockstep = life.settings.sync.mode == "lockstep"
    if lockstep and len(answered) < life.settings.quorum.min_learners:
        return False
    awaited = life.memory.waited_for() if lockstep else life.memory.awaited()
    return not life.unread() and awaited.keys() <= answered


def _close(life: OwnerLife, reason: str, *, final: bool = False) -> None:
    life.due = Close("version" if life.merged else "verdict", reason, final, life.now_s)


def time_is_up(life: OwnerLife) -> None:
    """Handles the end of a timer: opens or cuts the round, or passes over updates up to the cut."""
    if life.cut is not None:
        for one in life.unread():
            one.passed = True
        settle(life)
    elif life.memory.stopping_at_s:
        _cut(life, "deadline", final=True)
    elif life.phase == "idle":
        settle(life)
    else:
        _cut(life, "grace" if life.phase == "grace" else "deadline")


def _cut(life: OwnerLife, reason: str, *, final: bool = False) -> None:
    life.phase, life.cut, life.cut_seq, life.cut_at_s = "cut", (reason, final), 0, 0.0
    life.asked_seq = life.read_seq


def recorded(life: OwnerLife, close: Close) -> None:
    """Updates the owner's state once a record is decided, so that the next round can begin."""
    memory = life.memory
    if close.what == "version":
        answers = list(life.resolved())
        memory.closed_at_s = close.at_s
        memory.took_part(life.round_norms())
        life.clock = min(life.settings.run.steps, life.next_clock())
        life.version += 1
        life.merged, life.phase, life.cut = [], "idle", None
    else:
        answers = [answer for answer in life.resolved() if answer[2] is not None]
        if close.final:
            life.phase, life.cut = "idle", None
    for update, stream_seq, reason in answers:
        memory.resolve(update, stream_seq, reason)
    memory.forget_old_lives()
    life.refused = []
    life.storing, life.final, life.due = close.what, close.final, None
