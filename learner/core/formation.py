"""Which slices of a learner train together: the agreement between its hosts' supervisors.

A learner of several *slices* has a whole copy of the model on each slice, a group of hosts of equal
number. Each host runs a *supervisor*, a small process without JAX, which starts and ends the host's
training process. A *formation* is a set of slices whose training processes are one JAX program. If
a host of a formation is lost, the supervisors that are left end their training processes, and
start new ones for the slices that are whole. A slice that returns is taken in at a step boundary.

Supervisors send each other a `HostReport` several times a second. Nothing else is exchanged: each
report has all that its sender knows, so that a lost report does no harm. A connection carries the
reports of both ends, so that one end that can be called is enough to hear each other; processes
that train together call each other both ways, and so must their supervisors. The *leader* is the
host that can bring the most slices together; of equal ones, that with the lowest number. It alone
decides on formations; the other supervisors carry out what its report says.

If the hosts are cut into two groups that do not hear each other, both may have a formation. The
run's tape decides between them: the group that joined last is the learner, and the training
processes of the other group end as superseded. That group then waits until it hears others, or
for `LONGEST_OUT_S` seconds.

    reports, ends of processes, signals -> `Agreement` -> `decide` -> `Begin`, `Kill` ...
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from diloco.common.protocol.errors import Exit, find

# The number of a formation is a multiple of this plus the number of the host that led, so that no
# two leaders give the same number.
MOST_HOSTS = 4096
# A slice whose training process failed stays out for this long at first, then for twice as long
# each time, but never for longer than LONGEST_OUT_S.
FIRST_OUT_S = 2.0
LONGEST_OUT_S = 300.0
# The exit status of a process that JAX aborts, since another process of its program is gone.
ABORTED = -6
# The exit status of a process that was asked to leave before it trained, and was killed.
UNREADY = -15
# A slice for which the others have waited in vain stays out for so many times as long.
WAITED_TIMES = 9
# A slice that trains, and was whole for this long, is sound: its earlier failures are forgotten.
SOUND_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FormationRules:
    """The constants of the agreement.

    Attributes:
        slices: the number of the learner's slices.
        hosts: the number of hosts of each slice; slice s has the hosts s * hosts, s * hosts + 1 ...
        least: the fewest slices that train.
        silent_s: a host that has sent no report for so many seconds is lost.
        gather_s: seconds for which the first formation waits for further slices.
        settle_s: a slice that returns is taken in once its hosts have been there for so long.
        grace_s: seconds from the end of a training process to the end of its supervisor, in which
            all supervisors learn of it.
        meet_s: seconds for which a training process waits for the others before it gives up.
    """

    slices: int
    hosts: int
    least: int
    silent_s: float
    gather_s: float = 20.0
    settle_s: float = 15.0
    grace_s: float = 3.0
    meet_s: float = 300.0

    def hosts_of(self, number: int) -> range:
        """Returns the numbers of a slice's hosts."""
        return range(number * self.hosts, (number + 1) * self.hosts)

    def slice_of(self, host: int) -> int:
        """Returns the number of a host's slice."""
        return host // self.hosts


class Formation(NamedTuple):
    """A set of slices whose training processes are one JAX program.

    Attributes:
        number: greater than the numbers of the formations before it.
        slices: the numbers of its slices, ascending.
        boots: for each host of these slices, in order, the `boot` of its supervisor.
        coordinator: the address of JAX's coordinator on its first host, `host:port`.
    """

    number: int
    slices: tuple[int, ...]
    boots: tuple[str, ...]
    coordinator: str


class TrainingProcess(NamedTuple):
    """The newest training process of a host.

    Attributes:
        formation: the number of the formation for which it was started; 0: none was started.
        phase: "running"; "ended": it has ended by itself; "none": there is none, or it was killed.
        status: its exit status if it has ended, negative for a signal.
    """

    formation: int = 0
    phase: Literal["none", "running", "ended"] = "none"
    status: int = 0


class HostReport(NamedTuple):
    """All that one supervisor tells the others.

    Attributes:
        host: the number of its host.
        boot: a random text of the supervisor's process, another one after each start.
        address: the address at which its training process may serve JAX's coordinator.
        leader: the number of the host that it takes for the leader.
        formation: of a leader: the present formation; else the formation that it knows; None: none.
        process: its training process.
        closed: of a leader: the greatest number of a formation that is over.
        regroup: the number of the newest formation that was to end at a step boundary, so that
            another one could begin; 0: none was.
        leaving: its supervisor was asked to end.
        over: the learner has ended; no further formation begins.
        newest: (incarnation, local step) of the newest part of a checkpoint on its host; None: it
            has none.
        strikes: by slice, how often in a row it has broken a formation, as its leader counts.
        trains: its training process has begun to train, and waits for neither NATS nor the store.
        meets: its training process waits for those of other hosts, before it trains; of one that
            has ended: it did so last.
        hears: the hosts whose calls reach it, a bit for each host, that of host 0 the lowest of
            the first byte.
        reach: the number of slices that it could bring together.
        alike: the settings that all hosts must have alike, as text.
    """

    host: int
    boot: str
    address: str
    leader: int
    formation: Formation | None
    closed: int
    process: TrainingProcess
    regroup: int
    leaving: bool
    over: bool
    newest: tuple[int, int] | None
    strikes: tuple[int, ...] = ()
    trains: bool = False
    meets: bool = False
    hears: bytes = b""
    reach: int = 0
    alike: str = ""


# --- What a supervisor is to do


class Begin(NamedTuple):
    """Start a training process.

    Attributes:
        formation: its formation.
        rank: its number among the formation's training processes, from 0.
        copy_from: the hosts that have a newer part of a checkpoint, which is to be copied before,
            the one with the newest first.
    """

    formation: Formation
    rank: int
    copy_from: tuple[int, ...]


class Kill(NamedTuple):
    """Kill the training process; `formation` is the number of its formation."""

    formation: int


class AskToLeave(NamedTuple):
    """Ask the training process to end at a step boundary; `formation` as in `Kill`."""

    formation: int


class Finish(NamedTuple):
    """End the supervisor with an exit status."""

    status: int


Action = Begin | Kill | AskToLeave | Finish


# --- The state


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What one supervisor knows.

    Attributes:
        me: its own report, which is up to date after each `decide`.
        began_s: when it began.
        decided_s: when it last decided.
        heard: by number, the other hosts' newest reports, and when each came.
        called_s: by number, when the newest report came over a connection that the host opened.
        followed_s: when the host that it follows was last the one to follow.
        whole_since: by number, since when the slice's hosts have all been there.
        strikes: by number, how often in a row the slice has broken a formation.
        late_until_s: by number, until when a slice stays out, for which others waited in vain.
        formed_s: when the leader made or found the present formation.
        ended_s: when the training process ended by itself.
        asked: the number of the formation whose process was asked to leave; 0: none.
        alone: the hosts that were there when a group without all hosts was superseded: the group
            waits until it hears another host, or until `alone_until_s`. Empty: it was not.
    """

    me: HostReport
    began_s: float
    decided_s: float
    heard: Mapping[int, tuple[HostReport, float]] = field(default_factory=dict)
    called_s: Mapping[int, float] = field(default_factory=dict)
    followed_s: float = 0.0
    whole_since: Mapping[int, float] = field(default_factory=dict)
    strikes: Mapping[int, int] = field(default_factory=dict)
    late_until_s: Mapping[int, float] = field(default_factory=dict)
    formed_s: float = 0.0
    ended_s: float = 0.0
    asked: int = 0
    alone: frozenset[int] = frozenset()
    alone_until_s: float = 0.0


def begin(host: int, boot: str, address: str, now_s: float) -> Agreement:
    """Returns the state of a supervisor that has just started. Arguments as in `HostReport`."""
    report = HostReport(
        host, boot, address, host, None, 0, TrainingProcess(), 0, leaving=False, over=False,
        newest=None,
    )  # fmt: skip
    return Agreement(me=report, began_s=now_s, decided_s=now_s)


def heard(state: Agreement, report: HostReport, now_s: float, *, called: bool) -> Agreement:
    """Returns the state after another host's report has come.

    Args:
        state: the state before.
        report: the report.
        now_s: the time.
        called: it came over a connection that the other host opened.
    """
    called_s = {**state.called_s, report.host: now_s} if called else state.called_s
    return replace(state, heard={**state.heard, report.host: (report, now_s)}, called_s=called_s)


def lost(state: Agreement, host: int, boot: str) -> Agreement:
    """Returns the state after all connections with a supervisor have broken; `boot` is its own."""
    known = state.heard.get(host)
    if known is None or known[0].boot != boot:
        return state
    return replace(
        state,
        heard={other: came for other, came in state.heard.items() if other != host},
        called_s={other: came_s for other, came_s in state.called_s.items() if other != host},
    )


def ended(state: Agreement, formation: int, status: int, now_s: float) -> Agreement:
    """Returns the state after the training process of a formation has ended by itself.

    Args:
        state: the state before.
        formation: the number of the process's formation; of another one than the newest process's
            it is ignored, as of a process that was killed.
        status: its exit status, negative for a signal.
        now_s: the time.
    """
    process = state.me.process
    if process.formation != formation or process.phase != "running":
        return state
    process = process._replace(phase="ended", status=status)
    return replace(state, me=state.me._replace(process=process), ended_s=now_s)


def noted(
    state: Agreement,
    *,
    leaving: bool,
    address: str,
    newest: tuple[int, int] | None,
    trains: bool,
    meets: bool,
) -> Agreement:
    """Returns the state with a new report of this supervisor; arguments as in `HostReport`."""
    report = state.me._replace(
        leaving=leaving, address=address, newest=newest, trains=trains, meets=meets
    )
    return replace(state, me=report)


# --- Decisions


def decide(
    rules: FormationRules, state: Agreement, now_s: float
) -> tuple[Agreement, tuple[Action, ...]]:
    """Returns the state, and what the supervisor is to do now; call it several times a second."""
    state = _noting_calls(rules, _awake(rules, state, now_s), now_s)
    present = _present(rules, state, now_s)
    state = _noting_whole_slices(rules, state, present, now_s)
    reach = len(_linked(rules, state.whole_since, present))
    state = replace(state, me=state.me._replace(reach=reach))
    present = {**present, state.me.host: state.me}
    if not set(present) <= state.alone or now_s >= state.alone_until_s:
        state = replace(state, alone=frozenset())
    # Also what a leader has asked for that is lost since.
    regroup = max(report.regroup for report in present.values())
    state = replace(state, me=state.me._replace(regroup=regroup))
    leader, state = _leader(rules, state, present, now_s)
    state = _with_strikes(state, leader, present)
    if leader != state.me.host:
        state = _following(state, present[leader], present)
    elif any(present[host].leader not in present for host in present if host != leader):
        # Others follow a host that this one does not hear: it must not lead beside that host.
        state = _with_others_formation(state, present)
    else:
        state = _leading(rules, state, present, now_s)
    strikes = tuple(state.strikes.get(number, 0) for number in range(rules.slices))
    state = replace(state, me=state.me._replace(leader=leader, strikes=strikes))
    return _obeying(rules, state, present, now_s)


def _awake(rules: FormationRules, state: Agreement, now_s: float) -> Agreement:
    """Returns the state of a supervisor that may have slept, as with its machine.

    What others have said meanwhile is not read yet: of that time only half of `silent_s` counts,
    so that a slow supervisor, too, finds that another one is silent.
    """
    slept_s = max(0.0, now_s - state.decided_s - rules.silent_s / 2)
    known = {host: (report, came_s + slept_s) for host, (report, came_s) in state.heard.items()}
    called_s = {host: came_s + slept_s for host, came_s in state.called_s.items()}
    return replace(state, heard=known, called_s=called_s, decided_s=now_s)


def _noting_calls(rules: FormationRules, state: Agreement, now_s: float) -> Agreement:
    """Returns the state with the hosts whose calls reach this one in its report."""
    hears = sum(
        1 << host for host, came_s in state.called_s.items() if now_s - came_s <= rules.silent_s
    )
    length = (rules.slices * rules.hosts + 7) // 8
    return replace(state, me=state.me._replace(hears=hears.to_bytes(length, "little")))


def _present(rules: FormationRules, state: Agreement, now_s: float) -> dict[int, HostReport]:
    """Returns the newest report of each host that is there, by number; this host's own too."""
    others = {
        host: report
        for host, (report, came_s) in state.heard.items()
        if now_s - came_s <= rules.silent_s
    }
    return {**others, state.me.host: state.me}


def _noting_whole_slices(
    rules: FormationRules, state: Agreement, present: Mapping[int, HostReport], now_s: float
) -> Agreement:
    """Returns the state with `whole_since` of the slices whose hosts are all there."""
    whole = {
        number: state.whole_since.get(number, now_s)
        for number in range(rules.slices)
        if all(host in present and not present[host].leaving for host in rules.hosts_of(number))
    }
    late_until_s = {
        number: until_s for number, until_s in state.late_until_s.items() if number in whole
    }
    return replace(state, whole_since=whole, late_until_s=late_until_s)


def _linked(
    rules: FormationRules, numbers: Iterable[int], present: Mapping[int, HostReport]
) -> tuple[int, ...]:
    """Returns slices of `numbers` whose hosts all call each other, ascending.

    Leaves out the slice that fits with the fewest others, until all fit. If several links are cut,
    there may be a larger set, which would take too long to search for among many slices.
    """
    hosts = {number: rules.hosts_of(number) for number in numbers}
    there = sum(1 << host for found in hosts.values() for host in found)
    strangers: dict[int, set[int]] = {number: set() for number in hosts}
    for number, found in hosts.items():
        for host in found:
            unheard = there & ~(int.from_bytes(present[host].hears, "little") | 1 << host)
            while unheard:
                other = rules.slice_of(unheard.bit_length() - 1)
                strangers[number].add(other)
                strangers[other].add(number)
                unheard &= (1 << rules.hosts_of(other).start) - 1
    while any(strangers.values()):
        worst = max(strangers, key=lambda one: (one in strangers[one], len(strangers[one]), one))
        for other in strangers.pop(worst) - {worst}:
            strangers[other].discard(worst)
    return tuple(sorted(strangers))


def _leader(
    rules: FormationRules, state: Agreement, present: Mapping[int, HostReport], now_s: float
) -> tuple[int, Agreement]:
    """Returns the host to follow, and the state.

    While a formation goes on, who leads goes on until another one could bring more slices together
    for `silent_s`: hosts learn of a loss one after the other.
    """
    best = max(present, key=lambda host: (present[host].reach, -host))
    now = state.me.leader
    leads = now in present and present[now].leader == now
    if best == now or not leads or state.me.formation is None:
        return best, replace(state, followed_s=now_s)
    if now_s - state.followed_s >= rules.silent_s:
        return best, replace(state, followed_s=now_s)
    return now, state


def _with_strikes(state: Agreement, leader: int, present: Mapping[int, HostReport]) -> Agreement:
    """Returns the state with the leader's strikes; a new leader goes on with the others' count."""
    if leader == state.me.host:
        others = [one.strikes for one in present.values() if one.leader != leader]
        if not others:
            return state
        own = [state.strikes.get(number, 0) for number in range(max(map(len, others)))]
        found = [max(counts) for counts in itertools.zip_longest(own, *others, fillvalue=0)]
    elif present[leader].leader == leader:
        found = [*present[leader].strikes]
    else:
        return state
    return replace(state, strikes={number: count for number, count in enumerate(found) if count})


def _following(
    state: Agreement, leader: HostReport, present: Mapping[int, HostReport]
) -> Agreement:
    """Returns the state with what the leader says."""
    if leader.leader != leader.host:
        return state  # It follows, or begins to lead: its next report tells more.
    state = replace(state, me=state.me._replace(over=state.me.over or leader.over))
    known = 0 if state.me.formation is None else state.me.formation.number
    told = 0 if leader.formation is None else leader.formation.number
    trained = any(report.process.formation == known for report in present.values())
    if max(told, leader.closed) < known and trained:
        # It has just begun to lead, and has not yet heard of this formation. One that nobody
        # trains was made by a host that led for a moment, and nobody will hear of it.
        return state
    return _with_formation(state, leader.formation)


def _with_formation(state: Agreement, formation: Formation | None, regroup: int = 0) -> Agreement:
    regroup = max(regroup, state.me.regroup)
    return replace(state, me=state.me._replace(formation=formation, regroup=regroup))


def _with_others_formation(state: Agreement, present: Mapping[int, HostReport]) -> Agreement:
    """Returns the state with the newest formation that any host reports."""
    known = [report.formation for report in present.values() if report.formation is not None]
    return _with_formation(state, max(known, default=None))


def _leading(
    rules: FormationRules, state: Agreement, present: Mapping[int, HostReport], now_s: float
) -> Agreement:
    """Returns the state of the leader, with the formation that is to train now."""
    state = _with_newest_formation(state, present, now_s)
    if any(report.over for report in present.values()):
        state = replace(state, me=state.me._replace(over=True))
    formation = state.me.formation
    if formation is not None:
        state = _judging(rules, state, formation, present, now_s)
    if state.me.formation is None and not state.me.over and not state.alone:
        return _forming(rules, state, present, now_s)
    return state


def _with_newest_formation(
    state: Agreement, present: Mapping[int, HostReport], now_s: float
) -> Agreement:
    """Returns the state with the newest formation that trains, also one that another host led.

    After a leader is lost, or two groups of hosts hear each other again, the host that leads now
    finds the formation in the others' reports.
    """
    known = 0 if state.me.formation is None else state.me.formation.number
    training = [
        report.formation
        for report in present.values()
        if report.formation is not None
        and report.process.formation == report.formation.number
        and report.formation.number > max(known, state.me.closed)
    ]
    if not training:
        return state
    return replace(_with_formation(state, max(training)), formed_s=now_s)


def _judging(
    rules: FormationRules,
    state: Agreement,
    formation: Formation,
    present: Mapping[int, HostReport],
    now_s: float,
) -> Agreement:
    """Returns the state after a look at the present formation: it goes on, regroups or is over."""
    gone = set(_gone(rules, formation, present))
    ended_with = dict(_ended_with(rules, formation, present))
    if gone or not set(ended_with.values()) <= {Exit.ENDED, Exit.LEFT}:
        state = _broken(rules, state, formation, present, now_s)
        superseded = Exit.SUPERSEDED in ended_with.values()
        return _superseded(rules, state, present, formation, now_s) if superseded else state
    state = _forgiving(rules, state, formation, present, now_s)
    if Exit.ENDED in ended_with.values():
        return replace(state, me=state.me._replace(over=True))
    if ended_with:
        whole = len(ended_with) == len(formation.slices) * rules.hosts
        return _closed(state, formation) if whole else state
    leaving = any(
        present[host].leaving for number in formation.slices for host in rules.hosts_of(number)
    )
    settled = {
        number
        for number in _ready(rules, state, present, now_s)
        if now_s - max(state.formed_s, state.whole_since[number]) >= rules.settle_s
    }
    # To grow, a formation must train: what starts would begin anew with each slice that comes, and
    # what is cut off from NATS or the store trains on, but could not begin again.
    hosts = [host for number in formation.slices for host in rules.hosts_of(number)]
    more = len(settled) > len(formation.slices)
    grows = more and all(present[host].trains for host in hosts)
    regroups = leaving or grows
    return _with_formation(state, formation, formation.number if regroups else 0)


def _broken(
    rules: FormationRules,
    state: Agreement,
    formation: Formation,
    present: Mapping[int, HostReport],
    now_s: float,
) -> Agreement:
    """Returns the state after a formation has broken."""
    gone = set(_gone(rules, formation, present))
    ended_with = dict(_ended_with(rules, formation, present))
    asked = state.me.regroup == formation.number
    failed = {
        rules.slice_of(host)
        for host, status in ended_with.items()
        if _is_to_blame(status) and not (asked and status == UNREADY)
    }
    if asked and not gone | failed and UNREADY in ended_with.values():
        return _closed(state, formation)
    if gone | failed:
        return _closing(state, formation, gone | failed, now_s)
    if late := _late(rules, state, formation, present, ended_with, now_s):
        state = _closing(state, formation, late, now_s)
        until_s = now_s + WAITED_TIMES * (now_s - state.formed_s)
        return replace(state, late_until_s={**state.late_until_s, **dict.fromkeys(late, until_s)})
    return _closing(state, formation, _ended_first(rules, state, formation, ended_with), now_s)


def _forgiving(
    rules: FormationRules,
    state: Agreement,
    formation: Formation,
    present: Mapping[int, HostReport],
    now_s: float,
) -> Agreement:
    """Returns the state without the strikes of slices that train, and have proved to be sound.

    Each by itself: of many slices some other one is lost again and again.
    """
    sound = {
        number
        for number in formation.slices
        if now_s - state.whole_since.get(number, now_s) >= SOUND_S
        and all(present[host].trains for host in rules.hosts_of(number))
    }
    if sound.isdisjoint(state.strikes):
        return state
    kept = {number: count for number, count in state.strikes.items() if number not in sound}
    return replace(state, strikes=kept)


def _gone(
    rules: FormationRules, formation: Formation, present: Mapping[int, HostReport]
) -> Iterator[int]:
    """Yields the slices of a formation with a host that is lost or whose supervisor is new."""
    boots = iter(formation.boots)
    for number in formation.slices:
        for host in rules.hosts_of(number):
            report, boot = present.get(host), next(boots)
            if report is None or report.boot != boot:
                yield number


def _ended_with(
    rules: FormationRules, formation: Formation, present: Mapping[int, HostReport]
) -> Iterator[tuple[int, int]]:
    """Yields (host, exit status) of the formation's training processes that have ended."""
    for number in formation.slices:
        for host in rules.hosts_of(number):
            report = present.get(host)
            if report is None or report.process.formation != formation.number:
                continue
            if report.process.phase == "ended":
                yield host, report.process.status
            elif report.process.phase == "none":  # Its host has given it up.
                yield host, int(Exit.PASSING)


def _late(
    rules: FormationRules,
    state: Agreement,
    formation: Formation,
    present: Mapping[int, HostReport],
    ended_with: Mapping[int, int],
    now_s: float,
) -> set[int]:
    """Returns the slices for whose processes the others have waited in vain before they trained.

    One that hangs, or that leads the others and waits for NATS as long as it takes. A meeting that
    ends early has broken, with the process that led it.
    """
    gave_up = any(present[host].meets for host in ended_with)
    if not gave_up or now_s - state.formed_s < rules.meet_s:
        return set()
    runs = (formation.number, "running")
    return {
        number
        for number in formation.slices
        for report in map(present.__getitem__, rules.hosts_of(number))
        if report.process[:2] == runs and not report.meets
    }


def _ended_first(
    rules: FormationRules, state: Agreement, formation: Formation, ended_with: Mapping[int, int]
) -> set[int]:
    """Returns the slices whose processes ended first, once each slice has broken a formation.

    A process that aborts looks like one whose peer is gone. So the first time nobody is blamed, and
    what happens again is blamed on those that end while others still run.
    """
    first = {rules.slice_of(host) for host in ended_with}
    again = all(state.strikes.get(number) for number in formation.slices)
    return first if again and len(first) < len(formation.slices) else set()


def _is_to_blame(status: int) -> bool:
    """True unless a training process may have ended because another one was lost.

    A process whose peer is gone ends with `Exit.PASSING`, or JAX aborts it.
    """
    return status not in (0, Exit.PASSING, Exit.SUPERSEDED, Exit.LEFT, ABORTED)


def _superseded(
    rules: FormationRules,
    state: Agreement,
    present: Mapping[int, HostReport],
    formation: Formation | None,
    now_s: float,
) -> Agreement:
    """Returns the state after a formation's training processes were superseded.

    If it had all slices and all hosts are there, another learner has this learner's name, and this
    one ends. If it had fewer, a group that was cut off may have superseded it, and is heard again.

    Args:
        rules: the constants.
        state: the state before.
        present: the reports of the hosts that are there.
        formation: the formation; None: a newer one is known.
        now_s: the time.
    """
    if len(present) == rules.slices * rules.hosts:
        whole = formation is not None and len(formation.slices) == rules.slices
        return replace(state, me=state.me._replace(over=True)) if whole else state
    until_s = now_s + LONGEST_OUT_S
    return replace(state, alone=frozenset(present), alone_until_s=until_s)


def _closing(state: Agreement, formation: Formation, blamed: set[int], now_s: float) -> Agreement:
    """Returns the state after a formation has broken; each blamed slice gets a strike.

    Args:
        state: the state before.
        formation: the formation that has broken.
        blamed: numbers of the slices with a lost host or a failed process; empty: nobody knows.
        now_s: the time.
    """
    hit = blamed or set(formation.slices)
    strikes = {**state.strikes, **{number: state.strikes.get(number, 0) + 1 for number in hit}}
    # A slice whose own host was lost is not whole now; one whose process failed begins anew.
    since = {
        number: now_s if number in hit else since_s for number, since_s in state.whole_since.items()
    }
    return replace(_closed(state, formation), strikes=strikes, whole_since=since)


def _closed(state: Agreement, formation: Formation) -> Agreement:
    return replace(state, me=state.me._replace(formation=None, closed=formation.number))


def _ready(
    rules: FormationRules, state: Agreement, present: Mapping[int, HostReport], now_s: float
) -> tuple[int, ...]:
    """Returns the slices that can be in a formation now, ascending."""

    def follows(host: int) -> bool:
        return host == state.me.host or present[host].leader == state.me.host

    ready = [
        number
        for number, since_s in state.whole_since.items()
        if now_s - since_s >= _stays_out_s(state.strikes.get(number, 0))
        and all(map(follows, rules.hosts_of(number)))
    ]
    in_time = [number for number in ready if now_s >= state.late_until_s.get(number, now_s)]
    chosen = _linked(rules, in_time, present)
    # Where too few are left, waiting would help nobody.
    return chosen if len(chosen) >= rules.least else _linked(rules, ready, present)


def _stays_out_s(strikes: int) -> float:
    """Returns for how long a slice with so many strikes stays out; 0 without any."""
    return min(LONGEST_OUT_S, FIRST_OUT_S * 2.0 ** min(strikes - 1, 60)) if strikes else 0.0


def _forming(
    rules: FormationRules, state: Agreement, present: Mapping[int, HostReport], now_s: float
) -> Agreement:
    """Returns the state with a new formation, if enough slices are ready."""
    ready = _ready(rules, state, present, now_s)
    waits = not state.me.closed and now_s - state.began_s < rules.gather_s
    if len(ready) < rules.least or (waits and len(ready) < rules.slices):
        return state
    hosts = [host for number in ready for host in rules.hosts_of(number)]
    formation = Formation(
        number=(_newest_number(present) // MOST_HOSTS + 1) * MOST_HOSTS + state.me.host,
        slices=ready,
        boots=tuple(present[host].boot for host in hosts),
        coordinator=present[hosts[0]].address,
    )
    return replace(_with_formation(state, formation), formed_s=now_s)


def _newest_number(present: Mapping[int, HostReport]) -> int:
    """Returns the greatest number of a formation that any host knows."""
    return max(
        max(
            report.closed,
            report.process.formation,
            0 if report.formation is None else report.formation.number,
        )
        for report in present.values()
    )


# --- Carrying it out


def _obeying(
    rules: FormationRules, state: Agreement, present: Mapping[int, HostReport], now_s: float
) -> tuple[Agreement, tuple[Action, ...]]:
    """Returns the state, and the actions that bring this host's process where it is to be."""
    if _was_left_behind(state.me.process, present):
        state = _without_process(state)
    process = state.me.process
    if process.phase == "ended" and (status := _final_status(state)) is not None:
        if status == Exit.SUPERSEDED and not state.me.over:
            known = state.me.formation
            its_own = known if known and known.number == process.formation else None
            state = _superseded(rules, state, present, its_own, now_s)
            if state.alone:
                return _without_process(state), ()
            if not state.me.over:
                return state, ()  # Until the leader has seen it, and another formation begins.
        if now_s - state.ended_s >= rules.grace_s:
            return state, (Finish(status),)
        return state, ()
    formation = state.me.formation
    regroups = formation is not None and _ends(rules, state, formation, present, now_s)
    if process.phase != "running" and (state.me.over or (state.me.leaving and not regroups)):
        return state, (Finish(0),)
    rank = None if formation is None else _rank(rules, formation, state.me)
    if formation is None or rank is None or process.formation != formation.number:
        if process.phase == "running":
            return _without_process(state), (Kill(process.formation),)
        if formation is None or rank is None or process.formation > formation.number:
            return state, ()
        begun = TrainingProcess(formation.number, "running")
        sources = _sources_of_checkpoint(rules, state.me, present)
        state = replace(state, me=state.me._replace(process=begun))
        return state, (Begin(formation, rank, sources),)
    if process.phase == "running" and state.me.regroup == formation.number != state.asked:
        return replace(state, asked=formation.number), (AskToLeave(formation.number),)
    return state, ()


def _ends(
    rules: FormationRules,
    state: Agreement,
    formation: Formation,
    present: Mapping[int, HostReport],
    now_s: float,
) -> bool:
    """True while a formation in which this host's process has ended may still end for others.

    A supervisor that ended before that would be taken for lost.
    """
    if state.me.process.formation != formation.number:
        return False
    runs = (formation.number, "running")
    others = any(report.process[:2] == runs for report in present.values())
    return others or now_s - state.ended_s < rules.silent_s


def _was_left_behind(process: TrainingProcess, present: Mapping[int, HostReport]) -> bool:
    """True if a process was superseded by a newer formation of its own learner."""
    superseded = process.phase == "ended" and process.status == Exit.SUPERSEDED
    return superseded and process.formation < _newest_number(present)


def _final_status(state: Agreement) -> int | None:
    """Returns the status with which the supervisor ends after its process; None: it goes on."""
    process = state.me.process
    return None if find(process.status).restart else process.status


def _without_process(state: Agreement) -> Agreement:
    """Returns the state after the training process was killed or given up."""
    process = state.me.process._replace(phase="none", status=0)
    return replace(state, me=state.me._replace(process=process))


def _rank(rules: FormationRules, formation: Formation, me: HostReport) -> int | None:
    """Returns the rank of a host's process in a formation; None: the host is not in it."""
    number = rules.slice_of(me.host)
    if number not in formation.slices:
        return None
    rank = formation.slices.index(number) * rules.hosts + me.host % rules.hosts
    return rank if formation.boots[rank] == me.boot else None


def _sources_of_checkpoint(
    rules: FormationRules, me: HostReport, present: Mapping[int, HostReport]
) -> tuple[int, ...]:
    """Returns the hosts with a newer part of a checkpoint that is also this host's part.

    Hosts at the same place of their slices hold the same pieces. The host with the newest is first.
    """
    having = [
        (report.newest, -host)
        for host, report in present.items()
        if host % rules.hosts == me.host % rules.hosts
        and report.newest is not None
        and report.newest > (me.newest or (0, 0))
    ]
    return tuple(-host for _, host in sorted(having, reverse=True))
