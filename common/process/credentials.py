"""Credentials of a client of NATS: a file with the seed of its key, written by `diloco auth`.

    run = "demo"
    identity = "berlin"
    role = "learner"
    seed = "SU..."

What else a client must do follows from the role. Everybody but the operator lives in an
account of its own, where the JetStream API has another prefix; and each identity has its own
inbox, so that nobody can listen to another's answers. The consumers of a learner or a reader have
names that its permissions list one by one: there are never more of them, and whoever revokes it
knows which to remove (docs/adr/0087-consumers-by-name.md).
"""

import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field

from diloco.common.protocol.errors import ConfigError
from diloco.common.protocol.names import NAME

Role = Literal["learner", "aggregator", "reader", "operator"]
Name = Annotated[str, Field(pattern=rf"^{NAME.pattern}$")]
OWN_API = "$JS.API"
# What the units hand over in place of a file that is not there; then its path.
NO_FILE = "# no file: "
# The server takes `$JS.API` in every account for that account's own streams.
SHARED_API = "JS.diloco"
_OF_LANE = 2
# Of a reader's consumers, those for what its processes look up beside the one that each follows by.
_LOOKING = 12
# Of one file, where `diloco auth add-reader --processes` does not say more.
PROCESSES = 4
_NO_TOKEN = re.compile("[^a-z]")


class Credentials(BaseModel):
    """One identity in one run; `seed` is secret. As many `processes` may be connected at once."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    run: Name
    identity: Name
    role: Role
    seed: str
    processes: Annotated[int, Field(ge=1)] = PROCESSES

    @property
    def inbox_prefix(self) -> str:
        """First token of the subjects that answers come to."""
        return inbox_prefix(self.role, self.identity)

    @property
    def api_prefix(self) -> str:
        """The prefix under which this identity finds the JetStream API."""
        return OWN_API if self.role == "operator" else SHARED_API

    def consumer_names(self, subjects: Sequence[str]) -> tuple[str, ...]:
        """Names that a consumer of these subjects may have; none where any will do."""
        return consumer_names(self.role, self.identity, subjects, self.processes)

    @property
    def direct_reads(self) -> bool:
        """Whether the last message of a subject is asked for with the subject in the request.

        Only so can the server fence what a learner reads.
        """
        return self.role == "learner"


def inbox_prefix(role: Role, identity: str) -> str:
    """First token of the subjects that answers to an identity come to."""
    return f"_INBOX_{role}_{identity}"


def consumers_prefix(role: Role, identity: str) -> str:
    """The prefix of the names of an identity's consumers; no identity's name holds a '_'."""
    return f"{role}_{identity}_"


def consumer_names(
    role: Role, identity: str, subjects: Sequence[str], processes: int = PROCESSES
) -> tuple[str, ...]:
    """Names that an identity's consumers of these subjects may have; none where any will do.

    A learner follows each kind of subject once, and reads it once more now and then. A reader's
    credentials serve several `processes`. How many an aggregator needs follows from the run.
    """
    prefix = consumers_prefix(role, identity)
    match role:
        case "learner":
            lane = f"{prefix}{_NO_TOKEN.sub('', subjects[0].split('.')[2])}_"
            return tuple(f"{lane}{number}" for number in range(_OF_LANE))
        case "reader":
            return tuple(f"{prefix}{number}" for number in range(_LOOKING + processes))
        case _:
            return ()


def render_credentials(credentials: Credentials) -> str:
    """The file that `load_credentials` reads."""
    head = "# Whoever can read this file can act as this identity. diloco auth revoke ends that.\n"
    return head + tomli_w.dumps(credentials.model_dump(exclude_defaults=True))


def _forbidden(status: os.stat_result) -> int:
    """The bits of a mode that a secret may not have: root may let a group of operators read it."""
    return 0o037 if status.st_uid == 0 and status.st_gid != 0 else 0o077


def load_credentials(path: Path) -> Credentials | None:
    """Read a credentials file; None for a `.creds` file of NATS's own tools.

    Raises:
        ConfigError: no such file, others can read it, or it is not a credentials file.
    """
    try:
        status = path.stat()
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"no credentials file {str(path)!r}: {error}",
            hint="name one made by: diloco auth add-learner, add-aggregator or add-reader",
        ) from error
    if text.startswith(NO_FILE):
        # systemd does not expand %i there; the folder is named after the unit.
        instance = path.parent.name.partition("@")[2].removesuffix(".service")
        missing = text.removeprefix(NO_FILE).strip().replace("%i", instance)
        raise ConfigError(
            f"there is no credentials file {missing}, which the unit hands over",
            hint="make it with diloco auth, bring it there with mode 0600, and start the unit "
            "again: runbooks/credentials.md",
        )
    if status.st_mode & _forbidden(status):
        raise ConfigError(
            f"the credentials file {str(path)!r} has mode {status.st_mode & 0o777:04o}: "
            "others can read it",
            hint=f"chmod 600 {path}; if others may have read it, revoke it and create another",
        )
    if "-----BEGIN NATS USER JWT-----" in text:
        return None
    try:
        return Credentials.model_validate(tomllib.loads(text))
    except (ValueError, RecursionError) as error:
        # Without the error's own words, which may show the seed.
        raise ConfigError(
            f"{str(path)!r} is not a credentials file",
            hint="make one with: diloco auth add-learner, add-aggregator or add-reader",
        ) from error
