"""A learner of several slices in the simulation: production's supervisors, and a life for each formation.

Each host has a supervisor (`learner/core/formation.py`), which decides several times a second in
virtual time. Their reports are delayed, lost, and cut off; machines are lost and return, processes
fail, supervisors sleep and are asked to end. A formation's training processes are one `SimLearner`,
which takes a step only while all of its slices are there. The tokens of each step are counted here,
by the slices that were there, and are compared with those that updates say.
"""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from simactor import Actor
from simchain import Violation, hold
from simlearner import SimLearner, SimSynchronizer
from simtensors import TOKENS
from simworld import World

from diloco.common.process.config import LearnerSection
from diloco.common.protocol.errors import Exit
from diloco.learner.core import formation
from diloco.learner.core.formation import (
    UNREADY,
    Action,
    Agreement,
    AskToLeave,
    Begin,
    Finish,
    Formation,
    FormationRules,
    Kill,
)
from diloco.learner.island import task_of_slices
from diloco.learner.tensors.mesh import ROWS

# Seconds between two decisions of a supervisor; a report takes at most so many times as long.
TICK_S = 1.0
DELAYS = 3
KILLED = -9
# Each of these divides into every number of slices.
ROWS_OF_BATCH = 12
# Seconds between two faults of a learner's hosts, on average.
STRIKES_S = (8.0, 20.0, 40.0)


class _Program(SimLearner):
    """The training processes of one formation, which are one JAX program.

    Args:
        of: the learner.
        made: the formation.
    """

    def __init__(self, of: "SlicedLearner", made: Formation) -> None:
        super().__init__(of.world, of.index, step_s=of.step_s)
        self.made = made
        self.tokens_per_step = of.tokens_by_settings(made)
        self._of = of
        self.members = [host for number in made.slices for host in of.rules.hosts_of(number)]
        # Hosts whose training process runs.
        self.running: set[int] = set()
        self.complete = False

    @property
    def whole(self) -> bool:
        """Whether all of its training processes run."""
        return len(self.running) == len(self.members)

    async def step(self, actor: Actor, synchronizer: SimSynchronizer) -> None:
        """Takes a step, which never ends once a process is lost: the others wait for it."""
        await super().step(actor, synchronizer)
        if not self.whole:
            await asyncio.Event().wait()
        there = {self._of.rules.slice_of(host) for host in self.running}
        whole_batch = self._of.section.keep_batch
        tokens = TOKENS if whole_batch else TOKENS * len(there) // self._of.rules.slices
        self.world.checkers.on_trained(synchronizer.life, synchronizer.position, tokens)


class SlicedLearner(SimLearner):
    """A learner of several slices; one *life* of it here lasts until all of its supervisors end.

    Args:
        rng: draws its shape and its faults.
        programs: the list of all learners, to which its training programs are added.
        opened: waits until processes may start.
        is_calm: whether the time of faults is over.
        other: arguments of `SimLearner`.
    """

    def __init__(
        self,
        world: World,
        index: int,
        *,
        rng: random.Random,
        programs: list[SimLearner],
        opened: Callable[[], Awaitable[None]],
        is_calm: Callable[[], bool],
        **other: Any,
    ) -> None:
        super().__init__(world, index, **other)
        slices, hosts = rng.choice([(2, 1), (2, 2), (3, 1), (4, 1)])
        peers = [f"host-{host}:1" for host in range(slices * hosts)]
        # A third of a batch has no whole number of tokens.
        keep_batch = slices == 3 or rng.random() < 0.3
        self.section = LearnerSection(
            slices=slices, peers=peers, keep_batch=keep_batch, checkpoint_dir="/none"
        )
        self.rules = FormationRules(
            slices=slices, hosts=hosts, least=rng.choice([1, 1, 2]), silent_s=5.0, gather_s=5.0
        )
        self._rng, self._all, self._opened, self._is_calm = rng, programs, opened, is_calm
        self._strikes_s = rng.choice(STRIKES_S)
        self._boots = itertools.count(1)
        self._hosts: dict[int, Agreement] = {}
        self._programs: dict[Formation, _Program] = {}
        # By host: the formation whose training process it runs.
        self._runs: dict[int, _Program] = {}
        self._reports: list[tuple[float, int, formation.HostReport]] = []
        self._returns: dict[int, float] = {}
        self._leaving: set[int] = set()
        self._sleeps_until_s: dict[int, float] = {}
        self._cut: tuple[frozenset[int], float] = (frozenset(), 0.0)
        self._begin: Callable[[Actor], None] | None = None

    def tokens_by_settings(self, made: Formation) -> int:
        """Returns the tokens of a step as production computes them for a formation."""
        section = self.section.model_copy(update={"formation": made.slices})
        task = _Task(tokens_per_batch=TOKENS)
        axes = dict.fromkeys(ROWS, 1) | {"data": len(made.slices)}
        mesh = SimpleNamespace(shape=axes)
        batch = np.zeros(ROWS_OF_BATCH)
        return task_of_slices(task, batch, section, mesh).tokens_per_batch

    async def live(self, begin: Callable[[Actor], None] | None = None) -> bool:
        """Run all supervisors until each has ended; returns True."""
        self._begin, self.leave_asked, self.superseded = begin, False, False
        self._leaving, self._reports = set(), []
        self._returns = dict.fromkeys(range(self.rules.slices * self.rules.hosts), 0.0)
        while self._hosts or self._returns:
            self._let_return()
            if not self._is_calm():
                self._strike()
            self._read()
            for host in list(self._hosts):
                if self._now_s >= self._sleeps_until_s.get(host, 0.0):
                    self._tick(host)
            await asyncio.sleep(TICK_S)
        return True

    @property
    def _now_s(self) -> float:
        return self.world.loop.now_s

    # Supervisors

    def _let_return(self) -> None:
        for host, at_s in list(self._returns.items()):
            if at_s <= self._now_s or self._is_calm():
                del self._returns[host]
                self._leaving.discard(host)
                boot = f"boot-{next(self._boots)}"
                self._hosts[host] = formation.begin(host, boot, f"host-{host}:1", self._now_s)

    def _read(self) -> None:
        """Gives the reports that have come to supervisors that are awake."""
        due, self._reports = self._reports, []
        for at_s, to, report in due:
            asleep = self._now_s <= self._sleeps_until_s.get(to, 0.0)
            if at_s > self._now_s or asleep:
                self._reports.append((at_s, to, report))
            elif to in self._hosts:
                self._hosts[to] = formation.heard(self._hosts[to], report, self._now_s, called=True)

    def _tick(self, host: int) -> None:
        state = self._hosts[host]
        # Who was cut off when the run ended waits for the others, until an operator stops it.
        left_over = self._is_calm() and self.world.checkers.end_seq and not self._runs
        leaving = bool(self.leave_asked or left_over or host in self._leaving)
        program = self._runs.get(host)
        state = formation.noted(
            state,
            leaving=leaving,
            address=state.me.address,
            newest=None,
            trains=program is not None and bool(program.incarnation),
            meets=False,
        )
        state, actions = formation.decide(self.rules, state, self._now_s)
        self._hosts[host] = state
        for action in actions:
            self._act(host, action)
        if host not in self._hosts:
            return
        side, until_s = self._cut
        is_cut = self._now_s < until_s
        for other in self._hosts:
            lost = is_cut and (host in side) != (other in side)
            if other != host and not lost and (self._is_calm() or self._rng.random() > 0.05):
                # One connection keeps the order of its reports.
                known = [at_s for at_s, to, one in self._reports if (to, one.host) == (other, host)]
                at_s = self._now_s + TICK_S * self._rng.randrange(DELAYS)
                self._reports.append((max([at_s, *known]), other, state.me))

    def _act(self, host: int, action: Action) -> None:
        match action:
            case Begin(made):
                runs = self._runs.get(host)
                about = f"{self.name} host {host}"
                what = f"begins {made} beside {runs and runs.made}"
                self._guard(hold, runs is None, "slices", about, what)
                program = self._programs.get(made)
                if program is None:
                    program = self._programs[made] = _Program(self, made)
                program.running.add(host)
                self._runs[host] = program
                if program.whole:
                    asyncio.ensure_future(self._run(program)).add_done_callback(self._done)
            case Kill():
                self._lose_process(host)
            case AskToLeave():
                program = self._runs.get(host)
                if program is not None and not program.incarnation:
                    self._lose_process(host, UNREADY)
                elif program is not None and host == program.members[0]:
                    program.leave_asked = True
            case Finish(status):
                self.superseded = self.superseded or status == Exit.SUPERSEDED
                if host in self._leaving and not self._hosts[host].me.over:
                    self._returns[host] = self._now_s + self._rng.uniform(0.5, 15.0)
                self._leaving.discard(host)
                del self._hosts[host]

    def _done(self, task: "asyncio.Future[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.world.fail(Violation("breaks", self.name, repr(error)))

    def _guard(self, check: Callable[..., None], *arguments: object) -> None:
        try:
            check(*arguments)
        except Violation as violation:
            self.world.fail(violation)

    # Training processes

    async def _run(self, program: _Program) -> None:
        """Run a formation's training processes from their meeting to their end."""
        number = program.made.number
        await asyncio.sleep(self._rng.uniform(0.5, 4.0))
        await self._opened()
        if not program.whole:
            return
        fewer = len(program.made.slices) < self.rules.slices
        self.world.injected["slices"] += fewer
        self._all.append(program)
        by_itself = await program.live(self._begin)
        self._all.remove(program)
        self.leave_asked = self.leave_asked or (program.leave_asked and not self._asked(number))
        first = program.members[0]
        if by_itself:
            left = program.leave_asked and not program.run_ended
            statuses = dict.fromkeys(program.members, int(Exit.LEFT if left else Exit.ENDED))
        elif program.superseded:
            statuses = dict.fromkeys(program.members, int(Exit.SUPERSEDED))
        else:
            statuses = {**dict.fromkeys(program.members, int(Exit.PASSING)), first: KILLED}
        self._end(program, statuses)

    def _asked(self, number: int) -> bool:
        """Whether a formation was to end so that another one can begin."""
        return any(state.me.regroup >= number for state in self._hosts.values())

    def _end(self, program: _Program, statuses: dict[int, int]) -> None:
        """All processes of a formation that still run end by themselves."""
        for host in list(program.running):
            self._end_process(host, statuses.get(host, int(Exit.PASSING)))

    def _end_process(self, host: int, status: int) -> None:
        program = self._runs.pop(host)
        program.running.discard(host)
        number = program.made.number
        if host in self._hosts:
            self._hosts[host] = formation.ended(self._hosts[host], number, status, self._now_s)

    def _lose_process(self, host: int, status: int = KILLED) -> None:
        """A process is gone; the others wait for it, until their collective fails."""
        program = self._runs.get(host)
        if program is None:
            return
        self._end_process(host, status)
        if host == program.members[0]:
            self._break(program)
        else:
            after_s, context = self._rng.uniform(0.0, 2.5), self.world.context
            self.world.loop.call_later(after_s, partial(self._break, program), context=context)

    def _break(self, program: _Program) -> None:
        """The processes that are left end, as their collective fails."""
        if program.actor is not None:
            program.actor.kill()
        self._end(program, {})

    # Faults

    def _strike(self) -> None:
        """Strikes a host, or cuts the hosts into two groups, now and then."""
        if not self._hosts or self._rng.random() >= TICK_S / self._strikes_s:
            return
        host = self._rng.choice(sorted(self._hosts))
        match self._rng.choice(["lost", "fails", "sleeps", "cut", "cut", "leaves"]):
            case "lost":
                self._lose_machine(host)
            case "fails":
                self._lose_process(host)
            case "sleeps":
                self._sleeps_until_s[host] = self._now_s + self._rng.uniform(1.0, 12.0)
            case "cut":
                side = frozenset(one for one in self._hosts if self._rng.random() < 0.5)
                self._cut = (side, self._now_s + self._rng.uniform(2.0, 25.0))
            case "leaves":
                self._leaving.add(host)

    def _lose_machine(self, host: int) -> None:
        boot = self._hosts[host].me.boot
        self._lose_process(host)
        del self._hosts[host]
        self._reports = [one for one in self._reports if host not in (one[1], one[2].host)]
        self._returns[host] = self._now_s + self._rng.uniform(0.5, 15.0)
        if self._rng.random() < 0.5:  # Its connections are closed.
            for other, state in self._hosts.items():
                self._hosts[other] = formation.lost(state, host, boot)


@dataclass
class _Task:
    """What `task_of_slices` reads and changes of a task."""

    tokens_per_batch: int
    accumulate: int = 1
