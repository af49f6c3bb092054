"""Keep the groups of a run's learners: make anew what was preempted, and let go what has ended.

Google mends a group of one host by itself, mostly. A slice of several hosts, whose group is in bulk
mode, and machines of flex-start it does not: all of them must be deleted and created again. So this
resizes its group to nothing, waits until it is empty, and resizes it to its hosts, which is what a
person would do; and so it does with one host that has been lost for a quarter of an hour.
the group itself, its template and rights stay Terraform's. A learner's machine says by a guest
attribute that its run has ended (`ended.py`); a group whose machines all say so is resized to
nothing, and stays so until somebody resizes it.

What it may do is limited to the groups and machines of this run, and its account has no other
right. Which groups there are it reads from its machine's metadata each time: an apply needs no
restart.
"""

import json
import time
import traceback
import urllib.error
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from diloco.infra.cloud import COMPUTE, Google
from diloco.infra.ended import ATTRIBUTE, ENDED
from diloco.infra.release import say

STATE = Path("/var/lib/diloco-keeper/groups.json")
# So long Google has to make a lost machine anew, or to make one that is missing.
MEND_S = 900.0
_EVERY_S = 60.0
# Of an instance that was preempted, or stopped by anybody: it does not come back by itself.
GONE = frozenset({"STOPPING", "STOPPED", "TERMINATED", "SUSPENDING", "SUSPENDED"})


class GroupSpec(NamedTuple):
    """A group as Terraform wants it.

    Attributes:
        hosts: 0 while it is paused.
        ours: whether no other service recreates its machines.
    """

    project: str
    zone: str
    name: str
    hosts: int
    ours: bool

    @property
    def url(self) -> str:
        """The URL of the group."""
        return (
            f"{COMPUTE}projects/{self.project}/zones/{self.zone}/instanceGroupManagers/{self.name}"
        )


class GroupState(NamedTuple):
    """A group as it is.

    Attributes:
        size: the number of machines that it shall have.
        states: of those that it has.
        ended: the number of them that say that their run has ended.
    """

    size: int
    states: Sequence[str]
    ended: int

    @property
    def stopped(self) -> bool:
        """Whether a machine is there that does not come back by itself."""
        return any(state in GONE for state in self.states)

    @property
    def lost(self) -> bool:
        """Whether a machine has stopped, or is missing altogether: not even asked for."""
        return self.stopped or len(self.states) < self.size


def decide(
    wanted: GroupSpec, seen: GroupState, has_ended: bool, lost_s: float
) -> tuple[int | None, bool]:
    """To which size the group is to be resized, if at all, and whether its run has ended. Pure.

    `lost_s` is for how long machines have been lost.
    """
    if wanted.hosts == 0:
        return None, False
    if seen.size == 0:
        # Emptied by this program, in one of its two ways.
        grows = not has_ended and not seen.states
        return (wanted.hosts if grows else None), has_ended
    if seen.states and seen.ended == len(seen.states):
        return 0, True
    if (wanted.ours and seen.stopped) or (seen.lost and lost_s >= MEND_S):
        return 0, False
    return None, False


class Keeper:
    """The groups of machines, which are read and resized through Google's API.

    Args:
        google: whose account has the rights.
        state: where it notes which groups' runs have ended, and since when machines are lost.
        clock: the time in seconds.
    """

    def __init__(
        self, google: Google, state: Path = STATE, clock: Callable[[], float] = time.time
    ) -> None:
        self._google = google
        self._state = state
        self._clock = clock

    def look(self) -> None:
        """Look at each group once, and resize those that need it."""
        noted = json.loads(self._state.read_text()) if self._state.exists() else {}
        ended, lost = set(noted.get("ended", ())), dict(noted.get("lost", {}))
        for wanted in self._specs():
            try:
                seen = self._see(wanted)
                since = lost.get(wanted.name, self._clock()) if seen.lost else self._clock()
                size, over = decide(wanted, seen, wanted.name in ended, self._clock() - since)
                if size is not None:
                    say(f"{wanted.name}: to {size} machines{', its run has ended' * over}")
                    self._google.call(f"{wanted.url}/resize?size={size}", {})
            except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
                # Also an answer of another form than Google's: it concerns this group alone.
                say(f"{wanted.name}: {error!r}; is looked at again")
                continue
            ended = ended | {wanted.name} if over else ended - {wanted.name}
            lost.pop(wanted.name, None)
            if seen.lost and size is None:
                lost[wanted.name] = since
        self._state.write_text(json.dumps({"ended": sorted(ended), "lost": lost}))

    def _specs(self) -> Iterable[GroupSpec]:
        return [GroupSpec(**group) for group in self._google.parameters()["groups"]]

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


def main() -> None:
    """Look each minute."""
    keeper = Keeper(Google())
    while True:
        try:
            keeper.look()
        except Exception:  # noqa: BLE001 - nobody else is there to try again
            traceback.print_exc()
        time.sleep(_EVERY_S)


if __name__ == "__main__":
    main()
