"""The keeper: recreates learners' preempted machines, and deletes the machines of ended runs.

A group is a managed instance group of Google Compute Engine with the machines of one learner.
Google mostly repairs a group of one host. It repairs neither a slice of several hosts, whose group
is in bulk mode, nor flex-start machines: all machines of such a group must be deleted and created
again. So the keeper resizes the group to 0, waits until it is empty, and resizes it to its number
of hosts. It does the same with a group of one host that has been lost for a quarter of an hour.

A learner's machine states by a guest attribute that its run has ended (`ended.py`). If all machines
of a group do, the keeper resizes the group to 0, and does not enlarge it again. From the time
`stop_at` on, and once the run's budget in dollars is spent, it resizes all groups to 0, until
Terraform sets a later time or a larger budget. It counts what it sees running, by the prices that
Terraform tells (`Spending`).

Only Terraform changes a group's template and permissions. The keeper's account may change the
groups and machines of this run, and nothing else. The keeper reads the list of groups from its own
machine's metadata each time, so that `terraform apply` needs no restart.
"""

import json
import math
import time
import traceback
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from diloco.infra.cloud import COMPUTE, Google
from diloco.infra.ended import ATTRIBUTE, ENDED
from diloco.infra.install_release import ERROR, say

STATE = Path("/var/lib/diloco-keeper/groups.json")
# Seconds that Google has to recreate a lost machine, or to create a missing one.
MEND_S = 900.0
_EVERY_S = 60.0
# States of an instance for which Google asks nothing; "": it is being created.
UNPAID = frozenset({"", "PROVISIONING", "STAGING", "STOPPED", "TERMINATED", "SUSPENDED"})
# Answers and failures of Google's after which the other groups are still checked.
_FAULTS = (OSError, HTTPException, ValueError, LookupError, TypeError)
# Spending is printed each time that another such share of the budget is spent.
_SHARE = 0.1
# States of an instance that was preempted or stopped, and does not come back by itself.
GONE = frozenset({"STOPPING", "STOPPED", "TERMINATED", "SUSPENDING", "SUSPENDED"})


class GroupSpec(NamedTuple):
    """A learner's group as Terraform defines it.

    Attributes:
        project: the project's id.
        zone: the group's zone.
        name: the group's name.
        hosts: the number of machines; 0 while the learner is paused.
        ours: True if the keeper alone recreates the group's machines; False if Google does.
        dollars_hour: what one machine costs an hour; 0.0 if that is not known.
    """

    project: str
    zone: str
    name: str
    hosts: int
    ours: bool
    dollars_hour: float = 0.0

    @property
    def url(self) -> str:
        """The URL of the group in the Compute Engine API."""
        return (
            f"{COMPUTE}projects/{self.project}/zones/{self.zone}/instanceGroupManagers/{self.name}"
        )


class GroupState(NamedTuple):
    """A group as Google reports it.

    Attributes:
        size: the target size that was last set.
        states: the status of each existing machine, such as RUNNING; "": being created.
        ended: the number of machines that state that their run has ended.
    """

    size: int
    states: Sequence[str]
    ended: int

    @property
    def stopped(self) -> bool:
        """True if a machine was preempted or stopped (`GONE`)."""
        return any(state in GONE for state in self.states)

    @property
    def lost(self) -> bool:
        """True if a machine was preempted or stopped, or is missing and not being created."""
        return self.stopped or len(self.states) < self.size

    @property
    def paid(self) -> int:
        """The number of machines that Google asks money for."""
        return sum(state not in UNPAID for state in self.states)


class Spending(NamedTuple):
    """The dollars that a run has spent, as far as its prices are known.

    Attributes:
        dollars: the sum since the keeper's first check.
        at_s: the time up to which is counted, in seconds since 1970; None: nothing is counted yet.
        machines: the number of paid machines at that time, by the group's name.
    """

    dollars: float = 0.0
    at_s: float | None = None
    machines: Mapping[str, int] = {}

    def until(
        self, now_s: float, groups: Sequence[GroupSpec], paid: Mapping[str, int], rest_hour: float
    ) -> "Spending":
        """Returns the spending up to `now_s`. Pure.

        Of the two counts of a group's machines, before and now, the larger one is counted for the
        whole time between: it may be long, as the keeper's own machine may have been away.

        Args:
            now_s: seconds since 1970; a time before `at_s` counts nothing.
            groups: the groups, with the prices of their machines.
            paid: the number of paid machines now, by the group's name; a group that could not be
                seen has the number of before.
            rest_hour: dollars an hour of all else.
        """
        machines = {one.name: paid.get(one.name, self.machines.get(one.name, 0)) for one in groups}
        if self.at_s is None:
            return Spending(self.dollars, now_s, machines)
        hour = rest_hour + sum(
            one.dollars_hour * max(machines[one.name], self.machines.get(one.name, 0))
            for one in groups
        )
        hours = max(0.0, now_s - self.at_s) / 3600
        return Spending(self.dollars + hours * hour, max(now_s, self.at_s), machines)


def decide(
    wanted: GroupSpec, seen: GroupState, has_ended: bool, lost_s: float
) -> tuple[int | None, bool]:
    """Returns (the group's next size or None to leave it, whether its run has ended). Pure.

    Args:
        wanted: the group as Terraform defines it.
        seen: the group as it is.
        has_ended: whether the run had ended at the last check.
        lost_s: seconds for which the group has been `GroupState.lost`.
    """
    if wanted.hosts == 0:
        return None, False
    if seen.size == 0:
        # This program emptied it: to recreate its machines, or because the run has ended.
        grows = not has_ended and not seen.states
        return (wanted.hosts if grows else None), has_ended
    if seen.states and seen.ended == len(seen.states):
        return 0, True
    if (wanted.ours and seen.stopped) or (seen.lost and lost_s >= MEND_S):
        return 0, False
    return None, False


class Keeper:
    """Checks and resizes the groups through Google's API.

    Args:
        google: access as an account that may resize the groups.
        state: JSON file of what `check_groups` remembers: the groups whose runs have ended, since
            when machines of a group have been lost, and what was spent.
        clock: returns the time in seconds since 1970.
    """

    def __init__(
        self, google: Google, state: Path = STATE, clock: Callable[[], float] = time.time
    ) -> None:
        self._google = google
        self._state = state
        self._clock = clock

    def check_groups(self) -> None:
        """Checks each group once, and resizes it if `decide`, `stop_at` or the budget says so.

        An error with one group is printed, and the other groups are still checked.
        """
        noted = json.loads(self._state.read_text()) if self._state.exists() else {}
        ended, lost = set(noted.get("ended", ())), dict(noted.get("lost", {}))
        told = self._google.parameters()
        groups = [GroupSpec(**group) for group in told["groups"]]
        states = {one.name: seen for one in groups if (seen := self._try_to_see(one)) is not None}
        spent = Spending(**noted.get("spent", {}))
        spent, stop = self._account(spent, groups, states, told)
        for wanted in groups:
            if (seen := states.get(wanted.name)) is None:
                continue
            since = lost.get(wanted.name, self._clock()) if seen.lost else self._clock()
            size, over = decide(wanted, seen, wanted.name in ended, self._clock() - since)
            if stop:
                size = 0 if seen.size else None
            why = ", its run has ended" if over else stop
            if size is not None and not self._resize(wanted, size, why):
                continue
            ended = ended | {wanted.name} if over else ended - {wanted.name}
            lost.pop(wanted.name, None)
            if seen.lost and size is None:
                lost[wanted.name] = since
        kept = {"ended": sorted(ended), "lost": lost, "spent": spent._asdict()}
        part = self._state.with_suffix(".part")
        part.write_text(json.dumps(kept))
        part.replace(self._state)

    def _account(
        self,
        spent: Spending,
        groups: Sequence[GroupSpec],
        states: Mapping[str, GroupState],
        told: Mapping[str, Any],
    ) -> tuple[Spending, str]:
        """Returns (the spending until now, why all groups are to be empty or "").

        Prints the spending whenever another tenth of the budget is spent, and its end as an error.
        """
        now_s, budget = self._clock(), told.get("budget")
        stop = ", as stop_at is over" if now_s >= _seconds(told.get("stop_at")) else ""
        if not budget:
            # What was spent before there is a budget is not counted against it.
            return Spending(), stop
        paid = {name: seen.paid for name, seen in states.items()}
        after = spent.until(now_s, groups, paid, budget["dollars_hour"])
        most = budget["dollars"]
        uncounted = "".join(f"; not counted: {what}" for what in budget["uncounted"])
        line = f"${after.dollars:,.2f} of the budget of ${most:,.2f} are spent{uncounted}"
        over = after.dollars >= most
        if int(after.dollars / most / _SHARE) > int(spent.dollars / most / _SHARE):
            say(line, ERROR if over else "")
        return after, f", as {line}" if over else stop

    def _try_to_see(self, wanted: GroupSpec) -> GroupState | None:
        """Returns the group as it is; None, and prints the error, if Google does not say."""
        try:
            return self._see(wanted)
        except _FAULTS as error:
            say(f"{wanted.name}: {error!r}; is checked again")
            return None

    def _resize(self, wanted: GroupSpec, size: int, why: str) -> bool:
        """Resizes a group, and prints why; returns False, and prints the error, if that fails."""
        try:
            say(f"{wanted.name}: to {size} machines{why}")
            self._google.call(f"{wanted.url}/resize?size={size}", {})
        except _FAULTS as error:
            say(f"{wanted.name}: {error!r}; is checked again")
            return False
        return True

    def _see(self, wanted: GroupSpec) -> GroupState:
        size = int(self._google.call(wanted.url)["targetSize"])
        machines = self._machines(wanted)
        ended = sum(self._says_ended(machine["instance"]) for machine in machines)
        return GroupState(size, [machine.get("instanceStatus", "") for machine in machines], ended)

    def _machines(self, wanted: GroupSpec) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = []
        page = ""
        while True:
            told = self._google.call(f"{wanted.url}/listManagedInstances?pageToken={page}", {})
            found += told.get("managedInstances", [])
            page = told.get("nextPageToken", "")
            if not page:
                return found

    def _says_ended(self, instance: str) -> bool:
        try:
            told = self._google.call(f"{instance}/getGuestAttributes?queryPath={ATTRIBUTE}")
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                return False
            raise
        items = told.get("queryValue", {}).get("items", [])
        return any(item.get("value") == ENDED for item in items)


def _seconds(moment: str | None) -> float:
    """Returns an RFC 3339 time in seconds since 1970; infinity for None or ""."""
    return datetime.strptime(moment, "%Y-%m-%dT%H:%M:%S%z").timestamp() if moment else math.inf


def main() -> None:
    """Checks the groups every `_EVERY_S` seconds, while the machine runs."""
    keeper = Keeper(Google())
    while True:
        try:
            keeper.check_groups()
        except Exception:  # noqa: BLE001 - nobody else is there to try again
            traceback.print_exc()
        time.sleep(_EVERY_S)


if __name__ == "__main__":
    main()
