"""Credentials of a NATS client: a file with the seed of its key, written by `diloco auth`.

    run = "demo"
    identity = "berlin"
    role = "learner"
    seed = "SU..."

The client's other settings follow from the role. Each identity except the operator has a NATS
account of its own, in which the JetStream API has another prefix. Each identity also has its own
inbox (the subjects of answers to its requests), so that no identity can read another's answers.
The permissions of a learner or a reader list the names of its consumers one by one, so the number
of consumers is limited, and revoking the identity removes them
(docs/adr/0087-consumers-by-name.md).
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
# What a systemd unit passes in place of a missing file; the file's path follows.
NO_FILE = "# no file: "
# Other roles need this prefix, as `$JS.API` means the streams of the client's own account.
SHARED_API = "JS.diloco"
_OF_LANE = 2
# A reader's consumers for look-ups, in addition to one for each process that follows the run.
_LOOKING = 12
# The processes of one file, unless `diloco auth add-reader --processes` sets another number.
PROCESSES = 4
_NO_TOKEN = re.compile("[^a-z]")


class Credentials(BaseModel):
    """The contents of a credentials file: one identity in one run.

    Attributes:
        identity: name of the learner, aggregator, reader or operator.
        seed: the secret seed of the identity's NATS key.
        processes: the number of a reader's processes that may be connected at once.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    run: Name
    identity: Name
    role: Role
    seed: str
    processes: Annotated[int, Field(ge=1)] = PROCESSES

    @property
    def inbox_prefix(self) -> str:
        """The first token of the subjects of answers to this identity."""
        return inbox_prefix(self.role, self.identity)

    @property
    def api_prefix(self) -> str:
        """The prefix under which this identity finds the JetStream API."""
        return OWN_API if self.role == "operator" else SHARED_API

    def consumer_names(self, subjects: Sequence[str]) -> tuple[str, ...]:
        """Returns the names that a consumer of `subjects` may have; () if any name is allowed."""
        return consumer_names(self.role, self.identity, subjects, self.processes)

    @property
    def direct_reads(self) -> bool:
        """True if the client reads a subject's last message by JetStream's direct-get subjects.

        The subject of a direct-get request contains the subject that is read, so the server can
        restrict what a learner reads.
        """
        return self.role == "learner"


def inbox_prefix(role: Role, identity: str) -> str:
    """Returns the first token of the subjects of answers to an identity."""
    return f"_INBOX_{role}_{identity}"


def consumers_prefix(role: Role, identity: str) -> str:
    """Returns the prefix of the names of an identity's consumers; identities contain no '_'."""
    return f"{role}_{identity}_"


def consumer_names(
    role: Role, identity: str, subjects: Sequence[str], processes: int = PROCESSES
) -> tuple[str, ...]:
    """Returns the names that a consumer of `subjects` may have; () if any name is allowed.

    A learner has two names for each kind of subject (record, settings, ...): one to follow the
    subject, and one to read it again. A reader has 12 names, and one more for each of `processes`.
    An aggregator may use any name, as the number of its consumers depends on the run.
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
    """Returns the text of a file that `load_credentials` can read."""
    head = "# Whoever can read this file can act as this identity. diloco auth revoke ends that.\n"
    return head + tomli_w.dumps(credentials.model_dump(exclude_defaults=True))


def check_secret(what: str, path: Path, status: os.stat_result, otherwise: str) -> None:
    """Checks that nobody else can read a secret's file; root may permit a group to read it.

    Args:
        what: the file, as the error begins.
        path: its path.
        status: its status.
        otherwise: what to do where others may have read it, for the hint.

    Raises:
        ConfigError: others can read it.
    """
    forbidden = 0o037 if status.st_uid == 0 and status.st_gid != 0 else 0o077
    if status.st_mode & forbidden:
        raise ConfigError(
            f"{what} {str(path)!r} has mode {status.st_mode & 0o777:04o}: others can read it",
            hint=f"chmod 600 {path}; {otherwise}",
        )


def load_credentials(path: Path) -> Credentials | None:
    """Reads a credentials file; returns None for a `.creds` file of NATS's own tools.

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
        # systemd does not expand %i in that text; the folder's name contains the instance.
        instance = path.parent.name.partition("@")[2].removesuffix(".service")
        missing = text.removeprefix(NO_FILE).strip().replace("%i", instance)
        raise ConfigError(
            f"there is no credentials file {missing}, which the systemd unit should provide",
            hint="make it with diloco auth, bring it there with mode 0600, and start the unit "
            "again: runbooks/credentials.md",
        )
    check_secret(
        "the credentials file",
        path,
        status,
        "if others may have read it, revoke it and create another",
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
