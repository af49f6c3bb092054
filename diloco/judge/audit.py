"""Checks a run's tape against the rules of `diloco.judge.oracle`, and counts its updates.

No claim of a daemon is trusted: what the tape's messages determine is computed from them. On a
trimmed tape each fragment is checked from its oldest record on. The store's objects are checked by
`objects.py` and `remake_and_compare.py`.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from diloco.common.protocol import names
from diloco.common.protocol.errors import IntegrityError, ObjectMissingError, WireError
from diloco.common.storage.tape import Entry, Item, read_positions
from diloco.judge.oracle import Oracle, Remaker
from diloco.run.history import History


class Breach(NamedTuple):
    """A value that breaks a rule.

    Attributes:
        rule: a key of `RULES` in `oracle/finding.py`; or "objects" (missing, or of another size),
            "bytes" or "digests" (contents other than recorded), or "decision".
        where: the part of the run, for people: "fragment 0 version 5, message 57".
        what: the expected value and the value found, as a sentence.
    """

    rule: str
    where: str
    what: str


@dataclass
class ObjectsReport:
    """The state of a run's objects in the store.

    Attributes:
        breaches: named objects that are lost or have another size, and objects with wrong contents.
        needed: number of objects that a recovering aggregator and joining learners read;
            `needed_bytes` is the sum of their sizes.
        missing: number of objects that records name and the store lacks.
        orphans: by name, the size in bytes of each object that nothing on the tape names.
        invented: by learner, the number of orphans under incarnations that it never had.
        newer: by name, the size in bytes of each object of a version beyond the tape's end.
        remade: number of versions that were merged again, and gave the recorded digests.
        read: number of objects whose bytes were compared with their records.
    """

    breaches: list[Breach] = field(default_factory=list)
    needed: int = 0
    needed_bytes: int = 0
    missing: int = 0
    orphans: dict[str, int] = field(default_factory=dict)
    invented: Counter[str] = field(default_factory=Counter)
    newer: dict[str, int] = field(default_factory=dict)
    remade: int = 0
    read: int = 0


@dataclass
class Account:
    """Numbers of updates, and of their tokens, since each fragment's oldest record on the tape.

    `sent` is the sum of merged, rejected and `in_flight`: updates without a verdict yet.
    """

    sent: int = 0
    merged: int = 0
    rejected: int = 0
    in_flight: int = 0
    tokens_sent: int = 0
    tokens_merged: int = 0
    tokens_rejected: int = 0
    tokens_in_flight: int = 0


@dataclass(kw_only=True)
class Audit:
    """The result of `audit`.

    Attributes:
        breaches: all broken rules.
        account: the numbers of updates and tokens.
        deep: whether decisions and versions were recomputed.
        followed: number of records whose decisions were recomputed.
        unknown: number of records whose decisions could not be recomputed: the tape is trimmed, or
            the record's maker followed rules of another release.
        remade: number of versions that were recomputed.
    """

    breaches: list[Breach] = field(default_factory=list)
    account: Account = field(default_factory=Account)
    deep: bool = False
    followed: int = 0
    unknown: int = 0
    remade: int = 0


def audit(history: History, *, deep: bool = False) -> Audit:
    """Checks a tape against the oracle's rules; blocks.

    Args:
        history: the tape.
        deep: also recompute every record's decisions, and every version, with the oracle's code.

    Raises:
        StoreUnavailableError: the store is unreachable.
    """
    found, specification = Audit(deep=deep), history.specification
    try:
        positions = read_positions(history.store, specification)
    except (ObjectMissingError, IntegrityError, WireError) as error:
        found.breaches.append(Breach("data", "the specification", error.message))
        positions = {}
    remaker = Remaker(history.layout, history.store.get) if deep else None
    oracle = Oracle(
        specification, history.layout, remaker=remaker, positions=positions, follow=deep
    )
    for item in _items(history):
        oracle.take(item)
    oracle.close()
    # A damaged object is another finding (`remake_and_compare.py`): no rule was broken.
    broken = [one for one in oracle.findings if one.rule != "input"]
    found.breaches += [Breach(one.rule, one.where, one.what) for one in broken]
    found.followed = sum(chain.followed for chain in oracle.chains)
    found.unknown = sum(len(chain.unknown) for chain in oracle.chains)
    found.remade = remaker.remade if remaker is not None else 0
    _account(found, history, oracle)
    return found


def _items(history: History) -> Iterator[Item]:
    """Yields all messages of the tape, also those that cannot be decoded, by stream sequence."""
    records = (
        Entry(seq, history.times_s[seq], names.record(history.run, record.fragment), record, 0)
        for seq, record in history.in_order()
    )
    each: tuple[Iterable[Item], ...] = (
        records, history.entries, history.undecoded, history.unreadable,
    )  # fmt: skip
    yield from heapq.merge(*each, key=attrgetter("seq"))


def _account(found: Audit, history: History, oracle: Oracle) -> None:
    account = found.account
    for chain in history.records.values():
        first, last = chain[0][1].totals, chain[-1][1].totals
        account.merged += last.updates_merged - first.updates_merged
        account.rejected += last.updates_rejected - first.updates_rejected
        account.tokens_merged += last.tokens_merged - first.tokens_merged
        account.tokens_rejected += last.tokens_rejected - first.tokens_rejected
    for _, waiting in oracle.data.in_flight():
        account.in_flight += 1
        account.tokens_in_flight += waiting.tokens
    account.sent = account.merged + account.rejected + account.in_flight
    account.tokens_sent = account.tokens_merged + account.tokens_rejected + account.tokens_in_flight
