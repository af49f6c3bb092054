"""Each role's rights on a run's NATS subjects, derived from what its daemon does. Pure.

With a right to publish in the account of the run's streams, a party could do much more. A request
names a subject, to which the server sends its answer, and the messages that are read. So a learner
could name a record's subject, and have the acknowledgement of its own update stored as a record.
Hence every identity but the operator has a separate account. That reaches the run's account only by
imports of the subjects below, and answers stay in the account that asked
(docs/adr/0017-credentials.md).
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from diloco.common.process.credentials import (
    OWN_API,
    PROCESSES,
    SHARED_API,
    Role,
    consumer_names,
    inbox_prefix,
)
from diloco.common.protocol import names

# The most subscriptions of one process.
_MAX_SUBS = 64


class Identity(NamedTuple):
    """A party of a run.

    Attributes:
        public_key: the public part of its nkey.
        processes: the most processes that may connect at once.
        fragments: of a learner, the only fragments of which it may send updates; empty: all.
    """

    name: str
    role: Role
    public_key: str
    processes: int = PROCESSES
    fragments: tuple[int, ...] = ()


class Grants(NamedTuple):
    """Patterns of subjects that an identity may use.

    Attributes:
        requests: to publish to.
        hears: to subscribe to, besides its own inbox.
    """

    requests: tuple[str, ...]
    hears: tuple[str, ...] = ()


def grants(run: str, identity: Identity) -> Grants:
    """Returns an identity's permissions in the run's account; the operator needs none of these."""
    match identity.role:
        case "learner":
            return _learner(run, identity.name, identity.fragments)
        case "reader":
            return _reader(run, identity)
        case _:
            return _aggregator(run)


def _learner(run: str, learner: str, fragments: tuple[int, ...]) -> Grants:
    """Returns a learner's grants: to write its own subjects, and to read the run's and its own.

    Args:
        run: the run's name.
        learner: the learner's name.
        fragments: the only fragments of which it may send updates; empty: all.
    """
    tape, ops = names.tape_stream(run), names.ops_stream(run)
    own = (
        names.join(run, learner),
        names.leave(run, learner),
        names.claim(run, learner),
        *(names.update(run, learner, fragment) for fragment in fragments or ("*",)),
    )
    readable = (
        names.spec(run),
        names.record(run, "*"),
        names.settings(run),
        names.stop(run),
        names.end(run),
        names.join(run, learner),
        names.leave(run, learner),
        names.update(run, learner, "*"),
        # Claims tell it which shares of the data are free.
        names.claim(run, "*"),
    )
    return Grants(
        requests=(
            *own,
            names.heartbeat(run, learner),
            f"{OWN_API}.STREAM.INFO.{tape}",
            *_fenced_reads(learner, tape, readable),
            # The last heartbeat of its life before, whose error its join repeats.
            *_fenced_reads(
                learner, ops, (names.rejected(run, learner), names.heartbeat(run, learner))
            ),
        ),
        hears=(names.round_open(run, "*"),),
    )


def _aggregator(run: str) -> Grants:
    """Returns an aggregator's grants: publish records and leases, read all, trim the tape."""
    return Grants(
        requests=(
            names.record(run, "*"),
            names.stop(run),
            names.end(run),
            names.checkpoint(run),
            # To end the life of a silent learner, by a join in its name.
            names.join(run, "*"),
            names.leave(run, "*"),
            names.claim(run, "*"),
            names.quarantine(run, "*"),
            names.rejected(run, "*"),
            names.round_open(run, "*"),
            *names.leases_subjects(run),
            *_reads(run, ("*",)),
            f"{OWN_API}.STREAM.PURGE.{names.tape_stream(run)}",
        )
    )


def _reader(run: str, reader: Identity) -> Grants:
    """Returns a reader's grants: to read everything of the run, and publish nothing."""
    consumers = consumer_names("reader", reader.name, (), reader.processes)
    return Grants(tuple(_reads(run, consumers)))


def _fenced_reads(learner: str, stream: str, subjects: Iterable[str]) -> Iterable[str]:
    """Yields the grants with which a learner can read these subjects of a stream, and no others."""
    for subject in subjects:
        yield f"{OWN_API}.DIRECT.GET.{stream}.{subject}"
        for consumer in consumer_names("learner", learner, (subject,)):
            yield f"{OWN_API}.CONSUMER.CREATE.{stream}.{consumer}.{subject}"
            yield from _uses(stream, consumer)


def _reads(run: str, consumers: Iterable[str]) -> Iterable[str]:
    """Yields the grants to read all of the run's streams, by consumers with these names."""
    for stream in names.streams(run):
        yield f"{OWN_API}.STREAM.INFO.{stream}"
        yield f"{OWN_API}.STREAM.MSG.GET.{stream}"
        for consumer in consumers:
            yield f"{OWN_API}.CONSUMER.CREATE.{stream}.{consumer}"
            yield from _uses(stream, consumer)


def _uses(stream: str, consumer: str) -> Iterable[str]:
    """Yields the grants to read from an existing consumer, and to remove it."""
    yield f"{OWN_API}.CONSUMER.MSG.NEXT.{stream}.{consumer}"
    yield f"{OWN_API}.CONSUMER.DELETE.{stream}.{consumer}"


def render_accounts(run: str, identities: Iterable[Identity], limits: Mapping[str, int]) -> str:
    """Returns the text of a run's accounts, for the `accounts` block of a server's configuration.

    Args:
        run: the run's name.
        identities: all parties that may connect.
        limits: JetStream limits of the run's account: max_file (bytes), max_streams, max_consumers.
    """
    known = sorted(identities)
    others = [identity for identity in known if identity.role != "operator"]
    operators = [identity for identity in known if identity.role == "operator"]
    lines = [
        "# Written by diloco auth, which will write it again: change nothing here.",
        f"{_quoted(run_account(run))}: {{",
        f"  jetstream: {{{', '.join(f'{key}: {value}' for key, value in limits.items())}}}",
        "  users: [",
        *(
            f"    {{nkey: {one.public_key}, permissions: {{publish: {_quoted('>')}, "
            f"subscribe: {_quoted('>')}}}}}"
            for one in operators
        ),
        "  ]",
        "  exports: [",
        *(f"    {export}" for export in _exports(run, others)),
        "  ]",
        "}",
    ]
    for one in others:
        lines += _account(run, one)
    return "\n".join(lines) + "\n"


def _exports(run: str, identities: Iterable[Identity]) -> list[str]:
    """Returns the exports of the run's account: each subject, and the accounts that import it."""
    users: dict[tuple[str, str], list[str]] = {}
    for one in identities:
        granted = grants(run, one)
        for kind, subjects in (("service", granted.requests), ("stream", granted.hears)):
            for subject in subjects:
                users.setdefault((kind, subject), []).append(_quoted(_own_account(run, one)))
    return [
        f"{{{kind}: {_quoted(subject)}, {_answers(subject)}accounts: [{', '.join(accounts)}]}}"
        for (kind, subject), accounts in users.items()
    ]


def _answers(subject: str) -> str:
    """Returns the export's response type: a pull gets many messages, other requests get one."""
    return "response: stream, " if ".CONSUMER.MSG.NEXT." in subject else ""


def _account(run: str, identity: Identity) -> list[str]:
    """Returns the lines of an identity's account, with the subjects that it imports."""
    granted = grants(run, identity)
    from_run = f"account: {_quoted(run_account(run))}"
    publish = ", ".join(_quoted(_as_seen(subject)) for subject in granted.requests)
    inbox = f"{inbox_prefix(identity.role, identity.name)}.>"
    subscribe = ", ".join(_quoted(subject) for subject in (inbox, *granted.hears))
    subs = _MAX_SUBS * identity.processes
    return [
        f"{_quoted(_own_account(run, identity))}: {{",
        f"  limits: {{max_connections: {identity.processes}, max_subscriptions: {subs}}}",
        f"  users: [{{nkey: {identity.public_key}, permissions: {{",
        f"    publish: [{publish}]",
        f"    subscribe: [{subscribe}]",
        "  }}]",
        "  imports: [",
        *(
            f"    {{service: {{{from_run}, subject: {_quoted(subject)}}}, "
            f"to: {_quoted(_as_seen(subject))}}}"
            for subject in granted.requests
        ),
        *(
            f"    {{stream: {{{from_run}, subject: {_quoted(subject)}}}}}"
            for subject in granted.hears
        ),
        "  ]",
        "}",
    ]


def _as_seen(subject: str) -> str:
    """Returns the subject by which accounts that import `subject` of the run's account use it."""
    if subject.startswith(f"{OWN_API}."):
        return f"{SHARED_API}{subject.removeprefix(OWN_API)}"
    return subject


def run_account(run: str) -> str:
    """Returns the name of a run's account; the names of its identities' accounts begin with it."""
    return f"diloco-{run}"


def _own_account(run: str, identity: Identity) -> str:
    # No run's name holds a '_'.
    return f"diloco-{run}_{identity.role}_{identity.name}"


def _quoted(text: str) -> str:
    # Without quotes the server's parser takes '$' for a variable.
    return f'"{text}"'
