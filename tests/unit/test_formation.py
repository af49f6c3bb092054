"""Supervisors of a learner of several slices agree on who trains, whatever is killed or cut off."""

import heapq
import itertools
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diloco.common.protocol.errors import Exit
from diloco.learner.core import formation
from diloco.learner.core.formation import AskToLeave, Begin, Finish, FormationRules, Kill

TICK_S = 0.25
# From its begin until a training process is in its collectives.
STARTS_S = 2.0
# From the loss of a process until the others' collectives fail.
FAILS_S = 1.0
# A training process waits so long for the others before it gives up.
GIVES_UP_S = 60.0
KILLED = -9


@dataclass
class Training:
    """A training process of the world: it trains once all of its formation have begun."""

    formation: formation.Formation
    rank: int
    began_s: float
    leaves: bool = False


@dataclass
class World:
    """Supervisors in virtual time, with processes and links that break; each message takes 10 ms."""

    rules: FormationRules
    now_s: float = 0.0
    states: dict = field(default_factory=dict)
    processes: dict = field(default_factory=dict)
    finished: dict = field(default_factory=dict)
    paused: set = field(default_factory=set)
    # What has come to a paused host: it looks at its clock before it reads.
    unread: dict = field(default_factory=dict)
    cut: set = field(default_factory=set)
    # (from, to): calls that are not let in, such as by a closed port.
    closed: set = field(default_factory=set)
    # Hosts whose training processes hang as they start.
    hung: set = field(default_factory=set)
    boots: itertools.count = field(default_factory=lambda: itertools.count(1))
    queue: list = field(default_factory=list)
    order: itertools.count = field(default_factory=itertools.count)
    joins: list = field(default_factory=list)
    leaving: set = field(default_factory=set)
    starts_s: float = STARTS_S
    gives_up_s: float = GIVES_UP_S
    # Hosts that cannot reach NATS.
    offline: set = field(default_factory=set)
    whole_s: float = 0.0

    def start(self, host):
        boot = f"boot-{next(self.boots)}"
        self.states[host] = formation.begin(host, boot, f"host-{host}:{boot}", self.now_s)

    def start_all(self):
        for host in range(self.rules.slices * self.rules.hosts):
            self.start(host)

    def kill_machine(self, host):
        state = self.states.pop(host, None)
        self.processes.pop(host, None)
        self.paused.discard(host)
        if state is not None:
            # What a connection has carried is read before its end.
            self.queue = [one for one in self.queue if one[3].boot != state.me.boot]
            self.unread = {
                to: [report for report in reports if report.boot != state.me.boot]
                for to, reports in self.unread.items()
                if to != host
            }
            heapq.heapify(self.queue)
            for other in self.linked(host):
                self.states[other] = formation.lost(self.states[other], host, state.me.boot)

    def linked(self, host):
        return [
            other
            for other in self.states
            if other != host
            and frozenset((host, other)) not in self.cut
            and not {(host, other), (other, host)} <= self.closed
        ]

    def works(self, one, other):
        """Whether training processes of two hosts reach each other: each calls the other."""
        return frozenset((one, other)) not in self.cut and not (
            {(one, other), (other, one)} & self.closed
        )

    def end_process(self, host, status):
        process = self.processes.pop(host, None)
        if process is not None:
            number = process.formation.number
            self.states[host] = formation.ended(self.states[host], number, status, self.now_s)

    def run(self, seconds):
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += TICK_S
            while self.queue and self.queue[0][0] <= self.now_s:
                _, _, to, report = heapq.heappop(self.queue)
                if to in self.paused or self.unread.get(to):
                    self.unread.setdefault(to, []).append(report)
                else:
                    self.hear(to, report)
            self.train()
            for host in [host for host in self.states if host not in self.paused]:
                self.tick(host)
                for report in self.unread.pop(host, ()):
                    self.hear(host, report)

    def hear(self, host, report):
        if host in self.states:
            called = (report.host, host) not in self.closed
            self.states[host] = formation.heard(
                self.states[host], report, self.now_s, called=called
            )

    def meets(self, host):
        process = self.processes.get(host)
        if process is None:
            return self.states[host].me.meets
        waits = host not in self.hung and process.formation not in self.joins
        return waits and self.now_s - process.began_s >= self.starts_s

    def tick(self, host):
        state = self.states[host]
        process = self.processes.get(host)
        state = formation.noted(
            state,
            leaving=host in self.leaving,
            address=state.me.address,
            newest=state.me.newest,
            trains=process is not None
            and process.formation in self.joins
            and host not in self.offline,
            meets=self.meets(host),
        )
        state, actions = formation.decide(self.rules, state, self.now_s)
        self.states[host] = state
        for action in actions:
            self.act(host, action)
        if host not in self.states:
            return
        for other in self.linked(host):
            heapq.heappush(
                self.queue, (self.now_s + 0.01, next(self.order), other, self.states[host].me)
            )

    def act(self, host, action):
        match action:
            case Begin(made, rank, _):
                assert host not in self.processes
                self.processes[host] = Training(made, rank, self.now_s)
            case Kill(number):
                assert self.processes.pop(host).formation.number == number
            case AskToLeave(number):
                assert self.processes[host].formation.number == number
                if self.now_s - self.processes[host].began_s < self.starts_s:
                    self.end_process(host, formation.UNREADY)
                else:
                    self.processes[host].leaves = True
            case Finish(status):
                assert host not in self.processes
                self.finished[host] = status
                self.kill_machine(host)

    def whole(self):
        """The formation that trains now: all its processes have begun and hear each other."""
        numbers = {one.formation.number for one in self.processes.values()}
        for number in sorted(numbers, reverse=True):
            found = {h: p for h, p in self.processes.items() if p.formation.number == number}
            made = next(iter(found.values())).formation
            whole = len(found) == len(made.slices) * self.rules.hosts
            old = all(self.now_s - one.began_s >= self.starts_s for one in found.values())
            links = all(self.works(*two) for two in itertools.combinations(found, 2))
            begun = made in self.joins or not set(found) & self.hung
            if whole and old and links and begun and not set(found) & self.paused:
                yield made, found

    def train(self):
        for made in self.joins[-1:]:
            found = [h for h, p in self.processes.items() if p.formation == made]
            links = all(self.works(*two) for two in itertools.combinations(found, 2))
            if links and len(found) == len(made.slices) * self.rules.hosts:
                self.whole_s = self.now_s
            elif self.now_s - self.whole_s >= FAILS_S:
                for host in found:
                    self.end_process(host, int(Exit.PASSING))
        self.give_up()
        self.begin_to_train()

    def give_up(self):
        """Processes that have waited for others in vain end."""
        for host, process in list(self.processes.items()):
            if self.meets(host) and self.now_s - process.began_s >= self.starts_s + self.gives_up_s:
                self.end_process(host, int(Exit.PASSING))

    def begin_to_train(self):
        for made, found in list(self.whole()):
            assert len({one.formation for one in found.values()}) == 1
            assert sorted(one.rank for one in found.values()) == list(range(len(found)))
            if made not in self.joins:
                # The tape: who joins last is the learner, the others are superseded.
                for other in self.joins[-1:]:
                    for host in [h for h, p in self.processes.items() if p.formation == other]:
                        self.end_process(host, int(Exit.SUPERSEDED))
                self.joins.append(made)
            if any(one.leaves for one in found.values()):
                for host in found:
                    self.end_process(host, int(Exit.LEFT))

    def suffer(self, kind, one, other):
        match kind:
            case "kill":
                self.kill_machine(one)
            case "start" if one not in self.states:
                self.start(one)
            case "pause" if one in self.states:
                self.paused.add(one)
            case "resume":
                self.paused.discard(one)
            case "fail":
                self.end_process(one, KILLED)
            case "cut" if one != other:
                self.cut.add(frozenset((one, other)))
            case "close" if one != other:
                self.closed.add((one, other))
            case "hang":
                self.hung.add(one)
            case "join":
                self.cut.clear()
                self.closed.clear()
                self.hung.clear()
            case "leave":
                self.leaving.add(one)

    def trains(self):
        return [made.slices for made, _ in self.whole()]


def world_of(slices=4, hosts=2, least=1):
    world = World(
        FormationRules(slices=slices, hosts=hosts, least=least, silent_s=3.0, meet_s=GIVES_UP_S)
    )
    world.start_all()
    return world


def test_all_slices_train_once_all_are_there():
    world = world_of()
    world.run(STARTS_S + 2)
    assert world.trains() == [(0, 1, 2, 3)]


def test_the_first_formation_waits_for_slices_that_come_late():
    world = World(FormationRules(slices=2, hosts=1, least=1, silent_s=3.0))
    world.start(1)
    world.run(10)
    assert not world.processes
    world.start(0)
    world.run(STARTS_S + 2)
    assert world.trains() == [(0, 1)]


def test_slices_that_are_there_train_after_a_while():
    world = World(FormationRules(slices=2, hosts=1, least=1, silent_s=3.0))
    world.start(1)
    world.run(20 + STARTS_S + 2)
    assert world.trains() == [(1,)]


@pytest.mark.parametrize("host", range(8))
def test_a_lost_machine_costs_its_slice_alone(host):
    world = world_of()
    world.run(30)
    world.kill_machine(host)
    world.run(STARTS_S + 2)
    assert world.trains() == [tuple(one for one in range(4) if one != host // 2)]
    world.start(host)
    world.run(30)
    assert world.trains() == [(0, 1, 2, 3)]
    assert not world.finished


@pytest.mark.parametrize("host", [0, 5])
def test_a_supervisor_that_is_silent_loses_its_place_and_gets_it_back(host):
    world = world_of()
    world.run(30)
    world.paused.add(host)
    world.run(3 + STARTS_S + 2)
    assert world.trains() == [tuple(one for one in range(4) if one != host // 2)]
    world.paused.discard(host)
    world.run(30)
    assert world.trains() == [(0, 1, 2, 3)]


@pytest.mark.parametrize("host", range(4))
def test_a_supervisor_that_slept_does_not_disturb_those_that_train_without_it(host):
    world = world_of(hosts=1)
    world.run(30)
    world.paused.add(host)
    world.run(20)
    world.paused.discard(host)
    world.run(30)
    left = tuple(one for one in range(4) if one != host)
    assert [made.slices for made in world.joins] == [(0, 1, 2, 3), left, (0, 1, 2, 3)]


def test_a_process_that_is_asked_to_leave_while_it_starts_has_not_failed():
    world = world_of()
    world.starts_s = 24.0
    world.run(30)
    world.kill_machine(2)
    world.run(3)
    world.leaving.add(6)  # Those that are left still start.
    world.run(60)
    assert world.trains() == [(0, 2)]
    # Only the slice that was lost was blamed.
    assert set(world.states[0].strikes) == {1}


def test_a_slice_that_comes_does_not_end_what_still_starts():
    world = World(FormationRules(slices=6, hosts=1, least=1, silent_s=3.0), starts_s=120.0)
    for host in range(6):
        world.start(host)
        world.run(60)
    assert world.joins[0].slices == (0,)
    world.run(20 + 2 * 120)
    assert world.trains() == [(0, 1, 2, 3, 4, 5)]
    assert [len(made.slices) for made in world.joins] == [1, 3, 5, 6]


@pytest.mark.parametrize("offline", [{0, 1, 3}, {0}])
def test_who_trains_without_nats_takes_no_slice_in_before_it_is_back(offline):
    world = world_of()
    world.run(30)
    world.kill_machine(2)
    world.run(20)
    world.offline = offline
    world.start(2)
    world.run(60)
    assert world.trains() == [(0, 2, 3)]
    world.offline = set()
    world.run(10)
    assert world.trains() == [(0, 1, 2, 3)]


@pytest.mark.parametrize(("slices", "host"), [(2, 0), (2, 1), (4, 2)])
def test_a_slice_for_which_the_others_wait_in_vain_is_left_out(slices, host):
    """Its process hangs as it starts, or leads the others and never reaches NATS."""
    world, trained_s = world_of(slices, hosts=1), 0.0
    world.run(30)
    world.hung = {host}
    world.end_process(host, 1)
    while world.now_s < 700:
        world.run(TICK_S)
        trained_s += TICK_S * bool(world.trains())
    assert set(world.states[slices - 1].strikes) == {host}
    assert trained_s > 0.8 * 670
    world.hung.clear()
    world.run(10 * GIVES_UP_S)
    assert world.trains() == [tuple(range(slices))]


def test_who_gives_up_as_a_meeting_breaks_blames_nobody_that_still_starts():
    """The process that led the meeting has ended, and is seen to a moment later."""
    world = world_of(hosts=1)
    world.starts_s = 40.0
    world.run(10)
    for host in (1, 2):
        world.states[host] = replace(
            world.states[host], me=world.states[host].me._replace(meets=True)
        )
        world.end_process(host, int(Exit.PASSING))
    world.run(TICK_S)
    world.end_process(0, int(Exit.PASSING))
    world.starts_s = STARTS_S
    world.run(30)
    assert world.trains() == [(0, 1, 2, 3)]


def test_a_slice_may_fail_for_weeks():
    world = world_of(slices=2, hosts=1)
    world.run(30)
    world.states[0] = replace(world.states[0], strikes={1: 5000})
    world.end_process(1, 1)
    world.run(30)
    assert world.trains() == [(0,)]
    world.run(formation.LONGEST_OUT_S)
    assert world.trains() == [(0, 1)]


@pytest.mark.parametrize("after_s", [0, 2, 20])
@pytest.mark.parametrize("host", [1, 2])
def test_who_is_asked_to_end_while_its_link_to_the_leader_is_cut_ends(host, after_s):
    world = world_of(slices=3, hosts=1)
    world.run(30)
    world.cut.add(frozenset((0, host)))
    world.run(after_s)
    world.leaving.add(host)
    world.run(30)
    assert world.finished == {host: 0}


def test_a_slice_without_which_nobody_trains_does_not_stay_out():
    world = world_of(slices=2, hosts=1, least=2)
    world.run(30)
    world.hung = {1}
    world.end_process(1, 1)
    world.run(GIVES_UP_S + 10)
    assert set(world.states[0].strikes) == {1}
    world.hung.clear()
    world.run(GIVES_UP_S + 20)
    assert world.trains() == [(0, 1)]


def test_a_slice_that_few_others_reach_makes_room_for_more():
    world = World(FormationRules(slices=4, hosts=1, least=1, silent_s=3.0))
    world.closed = {(3, 0)}
    for host in (1, 3):
        world.start(host)
    world.run(30)
    assert world.trains() == [(1, 3)]
    for host in (0, 2):
        world.start(host)
    world.run(30)
    assert world.trains() == [(0, 1, 2)]


@pytest.mark.parametrize("status", [KILLED, 1, int(Exit.PASSING), formation.ABORTED])
def test_a_process_that_fails_begins_again(status):
    world = world_of()
    world.run(30)
    world.end_process(3, status)
    world.run(30)
    assert world.trains() == [(0, 1, 2, 3)]


def test_failures_of_a_slice_are_forgotten_though_other_slices_fail_meanwhile():
    """Of many slices one is lost every few minutes: no formation stands for ten."""
    world = world_of(hosts=1)
    world.run(30)
    for _ in range(3):
        world.end_process(1, 1)
        world.run(40)
    assert world.states[0].strikes == {1: 3}
    for other in (2, 3, 2, 3):
        world.run(150)
        world.end_process(other, 1)
        world.run(20)
    assert set(world.states[0].strikes) == {2, 3}


def test_a_slice_whose_process_fails_again_and_again_stays_out_longer_each_time():
    world = world_of()
    world.run(30)
    left = 0.0
    for _ in range(400):
        world.run(1)
        if 3 in world.processes and world.trains() == [(0, 1, 2, 3)]:
            world.end_process(3, 1)
        left += world.trains() == [(0, 2, 3)]
    assert left > 200


@pytest.mark.parametrize("slices", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("status", [formation.ABORTED, int(Exit.PASSING), KILLED, 1])
@pytest.mark.parametrize("dies_after_s", [1.0, 5.0])
def test_a_slice_that_breaks_each_formation_is_left_out_however_it_ends(
    slices, status, dies_after_s
):
    """Also where its processes end as those do whose peer is gone."""
    world, trained_s = world_of(slices, hosts=1), 0.0
    while world.now_s < 900:
        world.run(TICK_S)
        bad = world.processes.get(1)
        if bad and world.now_s - bad.began_s >= dies_after_s:
            world.end_process(1, status)
        trained_s += TICK_S * bool(world.trains())
    assert trained_s > 600


def test_a_first_slice_whose_machine_is_lost_again_and_again_stays_out_longer_each_time():
    """It leads as soon as it is back, and goes on with the count of who led meanwhile."""
    losses = []
    for flapping in (0, 1):
        world, count, gone_s = world_of(hosts=1), 0, 0.0
        while world.now_s < 900:
            world.run(TICK_S)
            process = world.processes.get(flapping)
            if process and world.now_s - process.began_s >= 10:
                world.kill_machine(flapping)
                count, gone_s = count + 1, world.now_s
            if flapping not in world.states and world.now_s - gone_s >= 10:
                world.start(flapping)
        losses.append(count)
    assert max(losses) < 15
    assert abs(losses[0] - losses[1]) <= 2


@pytest.mark.parametrize("period_s", [0.25, 1.4, 1.5, 2.0, 10.0])
def test_a_slow_supervisor_too_finds_that_another_one_is_silent(period_s):
    rules = FormationRules(slices=2, hosts=1, least=1, silent_s=3.0)
    here, there = (formation.begin(host, str(host), "x", 0.0) for host in (0, 1))
    here, now_s = formation.heard(here, there.me, 0.0, called=True), 0.0
    for _ in range(300):
        now_s += period_s
        here, _ = formation.decide(rules, here, now_s)
    assert here.me.formation is not None
    assert here.me.formation.slices == (0,)


def test_too_few_slices_do_not_train():
    world = world_of(least=3)
    world.run(30)
    world.kill_machine(0)
    world.run(10)
    assert world.trains() == [(1, 2, 3)]
    world.kill_machine(2)
    world.run(10)
    assert world.trains() == []
    assert not world.processes


def test_a_status_that_no_restart_mends_ends_the_learner():
    world = world_of(slices=2, hosts=1)
    world.run(30)
    for host in (0, 1):
        world.end_process(host, int(Exit.TASK))
    world.run(10)
    assert world.finished == {0: Exit.TASK, 1: Exit.TASK}


def test_the_end_of_the_run_ends_all_supervisors():
    world = world_of()
    world.run(30)
    world.kill_machine(7)
    world.run(10)
    for host in list(world.processes):
        world.end_process(host, 0)
    world.run(10)
    assert world.finished == dict.fromkeys(range(7), 0)


@pytest.mark.parametrize("host", [0, 7])
def test_a_host_that_is_asked_to_end_leaves_at_a_boundary(host):
    world = world_of()
    world.run(30)
    world.leaving.add(host)
    world.run(STARTS_S + 3)
    assert world.finished == {host: 0}
    assert world.trains() == [tuple(one for one in range(4) if one != host // 2)]
    assert len(world.joins) == 2


def test_all_hosts_are_asked_to_end():
    world = world_of()
    world.run(30)
    world.leaving |= set(range(8))
    world.run(10)
    assert world.finished == dict.fromkeys(range(8), 0)
    assert len(world.joins) == 1


def test_two_groups_that_do_not_hear_each_other_leave_one_learner():
    world = world_of()
    world.run(30)
    world.cut |= {frozenset((a, b)) for a in range(4) for b in range(4, 8)}
    world.run(60)
    assert world.trains() in ([(0, 1)], [(2, 3)])
    before = len(world.joins)
    world.run(60)
    assert len(world.joins) == before  # they do not supersede each other in turn
    world.cut.clear()
    world.run(40)
    assert world.trains() == [(0, 1, 2, 3)]


def test_a_link_that_is_cut_leaves_out_one_slice():
    world = world_of(slices=3, hosts=1)
    world.run(30)
    world.cut.add(frozenset((0, 1)))
    world.run(20)
    assert world.trains() == [(0, 2)]
    world.cut.clear()
    world.run(30)
    assert world.trains() == [(0, 1, 2)]


def test_another_process_under_the_name_ends_the_learner():
    world = world_of(slices=2, hosts=1)
    world.run(30)
    for host in (0, 1):
        world.end_process(host, int(Exit.SUPERSEDED))
    world.run(20)
    assert world.finished == {0: Exit.SUPERSEDED, 1: Exit.SUPERSEDED}


def test_a_new_host_copies_the_newest_checkpoint_of_its_place():
    rules = FormationRules(slices=3, hosts=2, least=1, silent_s=3.0)
    reports = {}
    for host, newest in enumerate([(7, 90), (7, 10), (9, 30), (7, 20), None, None]):
        state = formation.begin(host, f"boot-{host}", "", 0.0)
        state = formation.noted(
            state, leaving=False, address=f"h:{host}", newest=newest, trains=False, meets=False
        )
        reports[host] = state
    for host, sources in enumerate([(2,), (3,), (), (), (2, 0), (3, 1)]):
        state = reports[host]
        for other, known in reports.items():
            if other != host:
                report = known.me._replace(leader=0, hears=b"\x3f", reach=3)
                state = formation.heard(state, report, 0.0, called=True)
        leader = reports[0]
        for other, known in reports.items():
            if other:
                report = known.me._replace(leader=0, hears=b"\x3f", reach=3)
                leader = formation.heard(leader, report, 0.0, called=True)
        leader, _ = formation.decide(rules, leader, 0.0)
        if host:
            state = formation.heard(state, leader.me, 0.0, called=True)
        _, (begun,) = formation.decide(rules, state, 0.0)
        assert (begun.rank, begun.copy_from) == (host, sources)


def most_that_reach_each_other(world):
    """How many slices can train together at most."""
    numbers = range(world.rules.slices)
    hosts = {number: tuple(world.rules.hosts_of(number)) for number in numbers}
    return max(
        count
        for count in range(len(numbers) + 1)
        for chosen in itertools.combinations(numbers, count)
        if all(
            world.works(*two)
            for two in itertools.combinations([h for one in chosen for h in hosts[one]], 2)
        )
    )


LINKS = st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=12)
SHAPES = st.sampled_from([(2, 1), (4, 1), (4, 2), (3, 2)])


def links_of(pairs, count):
    return {(a % count, b % count) for a, b in pairs if a % count != b % count}


@settings(max_examples=8, deadline=None)
@example({(a, 0) for a in range(1, 8)}, (4, 1))
@example({(a, 0) for a in range(1, 8)}, (4, 2))
@example({(a, 7) for a in range(7)}, (4, 2))
@given(LINKS, SHAPES)
def test_calls_that_are_not_let_in_cost_the_slices_alone_that_they_part(pairs, shape):
    """Such as of a host whose port is closed: it sends reports, and is sent none."""
    world = world_of(*shape)
    world.run(30)
    links = links_of(pairs, shape[0] * shape[1])
    world.closed = {(a, b) for a, b in links if (b, a) not in links or a < b}
    world.run(90)
    assert [len(made) for made in world.trains()] == [most_that_reach_each_other(world)]
    world.closed.clear()
    world.run(60)
    assert world.trains() == [tuple(range(shape[0]))]


@settings(max_examples=8, deadline=None)
# Host 0 reaches the last one alone.
@example({(0, host) for host in range(1, 7)}, (4, 2), 1)
@example({(0, 1), (0, 2)}, (4, 1), 3)
@given(LINKS, SHAPES, st.integers(1, 3))
def test_whatever_is_cut_some_slices_that_reach_each_other_train(pairs, shape, least):
    world = world_of(*shape, least=min(least, shape[0]))
    world.run(30)
    world.cut = {frozenset(link) for link in links_of(pairs, shape[0] * shape[1])}
    world.run(90)
    joins = len(world.joins)
    possible = most_that_reach_each_other(world) >= world.rules.least
    assert len(world.trains()) == possible
    world.run(60)
    assert len(world.joins) == joins  # they do not supersede each other in turn
    world.cut.clear()
    world.run(90)
    assert world.trains() == [tuple(range(shape[0]))]


FAULTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["kill", "start", "pause", "resume", "fail", "cut", "close", "hang", "join", "leave"]
        ),
        st.integers(0, 7),
        st.integers(0, 7),
        st.floats(0.0, 8.0),
    ),
    max_size=25,
)


# A host whose clean end was long ago, when others regroup.
LEFT_OUT = [("leave", 0, 0, 0.75), ("kill", 0, 0, 0.0)]
# A leader that is lost after it has asked the others to regroup.
LEADER_LOST = [("fail", 0, 0, 6.0), ("kill", 0, 0, 1.0)]
# Two groups hear each other again when one has just superseded the other.
SUPERSEDED_BY_ITS_OWN = [("cut", 0, 1, 5.25)]
# A host leads for a moment, and makes a formation that nobody trains.
LED_FOR_A_MOMENT = [("pause", 0, 0, 0.0), ("kill", 5, 0, 0.3574868281423456), ("pause", 6, 0, 3.25)]


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@example(LEFT_OUT, (3, 2))
@example(LEADER_LOST, (2, 1))
@example(SUPERSEDED_BY_ITS_OWN, (2, 1))
@example(LED_FOR_A_MOMENT, (4, 2))
@given(FAULTS, st.sampled_from([(2, 1), (4, 2), (3, 2)]))
def test_after_any_faults_all_slices_train_again(faults, shape):
    slices, hosts = shape
    world = world_of(slices, hosts)
    count = slices * hosts
    world.run(10)
    for kind, first, second, seconds in faults:
        one, other = first % count, second % count
        world.suffer(kind, one, other)
        world.run(seconds)
        for host in list(world.finished):
            assert host in world.leaving, world.finished
            del world.finished[host]
            world.leaving.discard(host)
    world.suffer("join", 0, 0)
    world.paused.clear()
    world.leaving.clear()
    for host in range(count):
        if host not in world.states:
            world.start(host)
    until_s = world.now_s + 2 * formation.LONGEST_OUT_S
    while world.now_s < until_s and world.trains() != [tuple(range(slices))]:
        world.run(5)
    assert world.trains() == [tuple(range(slices))]
