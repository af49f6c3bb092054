"""The checkers: the rules that must hold whenever a message or an object is stored or removed.

Each checker has its own state (`simchain.py`, `simadmission.py`, `simgarbage.py`), computed from
the contents of the broker and the store; it relies on no actor. The first broken rule ends the
simulation as a `Violation`.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from simadmission import LIAR, LIAR_INDEX, Admission
from simaveraged import Life, Overwritten, check_mean
from simblended import Blended
from simchain import Chain, Sent, UpdateId, Violation, check_covers, hold, update_id
from simgarbage import GarbageChecker
from simoracle import OracleOfTapes
from simshares import Batches
from simstore import SoundObjects
from simtensors import TOKENS, Covers, Light

from diloco.common.protocol import names, shards, wire
from diloco.common.protocol.errors import DilocoError, WireError
from diloco.common.protocol.sequences import first_sequence
from diloco.common.storage.bus import Message
from diloco.common.storage.data_share_allocation import Holding
from diloco.common.storage.tape import decode, decode_as
from diloco.common.storage.tape.positions import by_learner
from diloco.learner.core.events import Ready

if TYPE_CHECKING:
    from simworld import World


class Checkers:
    """All checkers of one run.

    Args:
        world: the simulated world; its broker and store call `on_message`, `on_stored`,
            `on_deleted` and `on_trimming`.
    """

    def __init__(self, world: "World") -> None:
        self._world = world
        self.chains = [Chain(index) for index in range(len(world.layout.fragments))]
        self.let_go = self._accounts()
        self.joined: dict[str, int] = {}
        # By life, the modules that it holds; empty: all.
        self.holds: dict[tuple[str, int], tuple[str, ...]] = {}
        # Data positions of the newest updates, by learner and life.
        self.sent_at: dict[tuple[str, int], int] = {}
        # By life of several slices: the tokens of each step, by its data position.
        self.trained: defaultdict[tuple[str, int], dict[int, int]] = defaultdict(dict)
        self.stopped = False
        self.end_seq = 0
        self.adopted: dict[tuple[str, int, int], str] = {}
        self.epoch = 0
        self.past: Counter[str] = Counter()
        self.oracle = OracleOfTapes(world.layout, light=isinstance(world.tensors, Light))
        self.admission = Admission(world.store.rotten, world.injected)
        self.batches = self._batches({})
        self.garbage = GarbageChecker(
            world.run_name,
            len(self.chains),
            replay_window_s=world.gc.replay_window_s,
            keep_checkpoints=world.gc.keep_checkpoints,
            hold=hold,
            sent=self._may_be_merged,
            stored=world.store.__contains__,
        )
        self._handlers = {
            "join": self._on_join,
            "leave": self._on_leave,
            "claim": self._on_claim,
            "update": self._on_update,
            "record": self._on_record,
            "quarantine": self._on_quarantine,
            "stop": self._on_stop,
            "end": self._on_end,
        }

    def begin_epoch(self, epoch: int, file: wire.CheckpointFile) -> None:
        """Note that a new tape begins with a checkpoint, in place of the lost one."""
        self.past = self.fates()
        self.past["abandoned"] += self.past.pop("in_flight")
        self.epoch, self.joined, self.stopped = epoch, {}, False
        self.let_go = self._accounts()
        earlier = by_learner(file.data_positions)
        self.batches = self._batches({**file.specification.positions, **earlier})
        shut_out = {name for record in file.records for name in record.policy.quarantined}
        world = self._world
        self.admission = Admission(world.store.rotten, world.injected, shut_out)
        # An operator may speak of learners while a tape is half made.
        for seq, word in world.messages(wire.Quarantine, names.quarantine(world.run_name, "*")):
            self.admission.hear(word, seq)
        lost, self.chains = self.chains, [Chain.goes_on(epoch, file, one) for one in file.records]
        for before, chain, record in zip(lost, self.chains, file.records, strict=True):
            known = before.digests.items()
            chain.digests = {version: pair for version, pair in known if version <= record.version}
        self.garbage.begin_epoch(file, world.store.names())

    def _batches(self, earlier: Mapping[str, int]) -> Batches:
        world = self._world
        return Batches(world.sizes, len(world.layout.fragments), earlier, world.injected)

    def _accounts(self) -> dict[int, Overwritten | Blended]:
        """Returns the checkers of the fragments at whose versions learners drop unsent steps."""
        sync, accounts = self._world.settings.sync, {}
        for fragment in self._world.layout.fragments:
            if fragment.averaged or sync.adopt == "overwrite":
                accounts[fragment.index] = Overwritten(fragment.index)
            elif sync.adopt == "blend":
                accounts[fragment.index] = Blended(fragment.index, 1 - sync.blend)
        return accounts

    # Hooks

    def on_message(self, stream: str, message: Message) -> None:
        """Checks a message that has just been stored."""
        if stream != names.tape_stream(self._world.run_name) or self._world.tail_lost:
            return
        subject = names.parse_subject(message.subject)
        handler = self._handlers.get(subject.kind) if subject else None
        if handler is not None:
            self._guard(handler, message)
        self._guard(self._ask_oracle, message)

    def _ask_oracle(self, message: Message) -> None:
        self._ask(self.oracle, message)

    def _ask(self, oracle: OracleOfTapes, message: Message) -> None:
        for finding in oracle.take(message, self._stored, self._world.injected):
            if finding.rule == "data" and LIAR in finding.about:
                continue  # A learner may lie about its own data.
            raise Violation(f"oracle-{finding.rule}", finding.about, finding.sentence)

    def on_stored(self, name: str) -> None:
        """Checks that a checkpoint has all that it names; called once an object is stored."""
        if name.startswith(names.checkpoint_prefix(self._world.run_name)):
            self._guard(self._on_checkpoint_file, name)

    def on_deleted(self, name: str) -> None:
        """Checks that an object may be deleted; called just before that."""
        if not self._world.tail_lost:
            self._guard(self.garbage.on_deleted, name)

    def on_trimming(self, stream: str, subject: str, below_seq: int) -> None:
        """Checks that a subject's messages below a sequence may be removed; called just before."""
        # A process that outlived another tape may trim messages that this tape does not have.
        if not self._world.tail_lost and below_seq > first_sequence(self.epoch):
            self._guard(self.garbage.on_trimming, stream, subject, below_seq)
            about = names.parse_subject(subject)
            if about is not None and about.kind == "leave" and about.learner:
                self.batches.trim_leaves(about.learner, below_seq)

    def _may_be_merged(self, shard: names.ShardName) -> bool:
        """Whether a record may still merge the update of a shard."""
        chain = self.chains[shard.fragment]
        update = UpdateId(shard.learner, shard.incarnation, shard.seq)
        if shard.epoch != self.epoch or shard.learner == LIAR:
            return False
        joined_seq = self.joined.get(shard.learner, 0)
        announced_seq = chain.unresolved.get(update)
        if announced_seq is not None:  # Of an older life it counts if it came before the join.
            return shard.incarnation >= joined_seq or announced_seq < joined_seq
        return update not in chain.sent and shard.incarnation >= joined_seq

    @property
    def _stored(self) -> SoundObjects:
        return SoundObjects(self._world.store)

    def _guard(self, handler, *arguments) -> None:
        """Calls a checker; an error of it ends the simulation, not the actor whose effect it checks."""
        try:
            handler(*arguments)
        except Violation as violation:
            self._world.fail(violation)
        except (DilocoError, ValueError, KeyError, AssertionError) as error:
            self._world.fail(Violation("readable", str(arguments[0])[:200], repr(error)))

    # The tape

    def _on_join(self, message: Message) -> None:
        join = decode_as(wire.Join, message.subject, message.payload)
        self.joined[join.learner] = message.seq
        self.holds[join.learner, message.seq] = join.holds
        lacks = {
            fragment.index
            for fragment in self._world.layout.fragments
            if join.holds and fragment.module not in join.holds
        }
        self.batches.join(join.learner, message.seq, message.msg_id, lacks)

    def _on_leave(self, message: Message) -> None:
        word = decode_as(wire.Leave, message.subject, message.payload)
        if word.learner != LIAR:
            self.batches.leave_said(word, message.seq)

    def _on_claim(self, message: Message) -> None:
        word = decode_as(wire.Claim, message.subject, message.payload)
        if word.learner != LIAR:
            self.batches.claim(word, message.seq)

    def _on_update(self, message: Message) -> None:
        try:
            manifest = decode_as(wire.Manifest, message.subject, message.payload)
        except WireError:
            damaged = message.payload in self._world.garbled
            if damaged or names.subject_learner(message.subject) == LIAR:
                return  # The message is no update, and no record answers it.
            raise
        chain, update = self.chains[manifest.fragment], update_id(manifest)
        known = chain.sent.get(update)
        if known is not None:
            if known.manifest is not None and manifest.learner != LIAR:
                same = known.manifest.model_copy(update={"attempt": manifest.attempt}) == manifest
                hold(same, "manifest", update, "announced again with other contents")
            return
        if manifest.epoch != self.epoch:
            return  # Its sender still goes on with a lost tape: no record may answer it.
        if manifest.learner == LIAR:
            covers = Covers(LIAR_INDEX, manifest.position - 1, manifest.position)
            chain.sent[update] = Sent(manifest, covers)
            return
        holds = self.holds.get((update.learner, update.incarnation), ())
        module = self._world.layout.fragments[manifest.fragment].module
        hold(module in (holds or (module,)), "modules", update, f"of {module}, holds {holds}")
        covers = self._covers(update, manifest)
        chain.send(manifest, covers, message.seq)
        self.batches.announce(update, manifest.fragment, covers, message.seq)
        self._world.announced(manifest)
        life = (update.learner, update.incarnation)
        # Several fragments were due at one step.
        self._world.injected["together"] += self.sent_at.get(life) == manifest.position
        self.sent_at[life] = manifest.position
        # What is stored after a newer life has joined will be rejected.
        if update.incarnation != self.joined.get(update.learner):
            return
        if manifest.fragment not in self.let_go:
            chain.check_data(update, covers)
        elif not self._world.tail_lost:
            let_go = self.let_go[manifest.fragment].check_data(update, covers)
            chain.fates["let_go"] += let_go
            averaged = self._world.layout.fragments[manifest.fragment].averaged
            kind = "averaged" if averaged else self._world.settings.sync.adopt
            self._world.injected[kind] += let_go > 0

    def _covers(self, update: UpdateId, manifest: wire.Manifest) -> Covers:
        world = self._world
        for entry in manifest.shards:
            if entry.name not in world.store:
                if update.incarnation < self.joined.get(update.learner, 0):
                    # A late message of a superseded life: it will be rejected, and garbage
                    # collection does not wait for it.
                    learner = int(manifest.learner.rsplit("-", 1)[1])
                    return Covers(learner, manifest.position, manifest.position)
                raise Violation("objects", str(update), f"no {entry.name}")
        covers = world.tensors.covers(self._stored, manifest, world.layout.block)
        check_covers(manifest, covers, self._tokens(update, covers))
        return covers

    def _tokens(self, update: UpdateId, covers: Covers) -> int:
        """Returns the tokens that a life has really trained in the steps of an update."""
        trained = self.trained.get((update.learner, update.incarnation))
        if trained is None:
            return TOKENS * (covers.stop - covers.start)
        return sum(trained[position] for position in range(covers.start, covers.stop))

    def _on_record(self, message: Message) -> None:
        record = self._read(message)
        chain = self.chains[record.fragment]
        chain.check_link(record)
        self._check_objects(record)
        for taken in record.inputs:
            chain.resolve(record, taken, lies=taken.learner == LIAR)
            self.admission.check_merged(record.fragment, taken)
            if taken.learner != LIAR:
                sent = chain.sent[update_id(taken)]
                self.batches.merge(record.fragment, update_id(taken), sent.covers)
            self._check_announced(taken)
        for refused in record.rejected:
            chain.resolve(record, refused, lies=refused.learner == LIAR)
            self.admission.check_rejected(message.seq, refused)
        if self._world.layout.fragments[record.fragment].averaged:
            check_mean(record)
        account = self.let_go.get(record.fragment)
        if isinstance(account, Blended):
            account.merge(record, message.seq)
        chain.follow(record, message.seq)
        self.garbage.needs[record.fragment].note(record, message.seq, message.time_s)

    def _check_announced(self, taken: wire.Input) -> None:
        """Checks that a record has the server's time of the announcement that it cites."""
        log = self._world.broker.stream(names.tape_stream(self._world.run_name)).log
        cited, said_s = log.get(taken.stream_seq), taken.announced_at_s
        right = cited is None or cited.time_s == said_s
        hold(right, "wait", update_id(taken), f"announced at {said_s}, says the record: {cited}")

    def _read(self, message: Message) -> wire.Record:
        found = decode(message.subject, message.payload)
        if isinstance(found, wire.RecordPointer):
            self._world.injected["bodies"] += 1
            found = wire.record_in_object(found, self._stored.get(found.body.name))
        assert isinstance(found, wire.Record)
        return found

    def views(self, fragment: int) -> set[str]:
        """Returns the view digests in a fragment's records on the tape."""
        log = self._world.broker.stream(names.tape_stream(self._world.run_name)).log
        subject = names.record(self._world.run_name, fragment)
        records = [self._read(one) for one in log.values() if one.subject == subject]
        return {record.view_digest for record in records}

    def _check_objects(self, record: wire.Record) -> None:
        """Checks that the objects that a record names are stored before the record is."""
        named = [record.snapshot, record.outer, *record.deltas]
        named += [record.delta] if record.delta else []
        for ref in named:
            what = f"version {record.version} names {ref.name}, which is not there"
            hold(ref.name in self._world.store, "objects", f"fragment {record.fragment}", what)

    def _on_checkpoint_file(self, name: str) -> None:
        file = wire.decode(wire.CheckpointFile, self._stored.get(name))
        if file.specification.epoch != self.epoch or self._world.tail_lost:
            return  # Whoever stored it had not heard that its tape is lost.
        if self.garbage.note_checkpoint(file):
            for record in file.records:
                self._check_objects(record)

    def _on_quarantine(self, message: Message) -> None:
        word = decode_as(wire.Quarantine, message.subject, message.payload)
        self.admission.hear(word, message.seq)

    def _on_stop(self, message: Message) -> None:
        hold(not self.stopped, "end", message.subject, "stopped twice")
        self.stopped = True

    def _on_end(self, message: Message) -> None:
        end = decode_as(wire.End, message.subject, message.payload)
        hold(not self.end_seq, "end", message.subject, "ended twice")
        self.end_seq = message.seq
        records = [chain.record for chain in self.chains]
        final = all(record is not None and record.final for record in records)
        hold(final, "end", message.subject, "before every fragment's last version")
        versions = tuple(record.version for record in records if record is not None)
        hold(end.versions == versions, "end", message.subject, f"{end.versions}")

    # Learners

    def on_began(self, life: Life, versions: Sequence[int], position: int, before: int = 0) -> None:
        """Checks the data position at which a life begins; notes it, and the life's versions.

        `before` is the life whose unsent work it goes on with; 0: there is none.
        """
        if self._is_judged(life):
            self._guard(self.batches.begin, life, position, before)
        if life.epoch == self.epoch:
            for account in self.let_go.values():
                account.begin(life, versions[account.fragment], position)

    def on_batch(self, life: Life, position: int, holding: Holding) -> None:
        """Checks the batch, at this data position, on which a life begins a step."""
        if self._is_judged(life):
            self._guard(self.batches.train, life, position, holding)

    def _is_judged(self, life: Life) -> bool:
        """Whether a life joined this tape, and the tape has lost no acknowledged message."""
        return life.epoch == self.epoch and not self._world.tail_lost

    def on_leaving(self, life: Life, position: int) -> None:
        """Note that a life ends in order at this data position."""
        if self._is_judged(life):
            self.batches.leave(life, position)

    def on_granted(self, life: Life, holding: Holding) -> None:
        """Checks that a life has a share by the oracle's rules too, unless it has ended on the tape.

        A life that an aggregator ended while it was paused may not have read that yet.
        """
        self._world.injected["shares"] += 1
        if self._is_judged(life) and self.oracle.oracle is not None:
            shares = self.oracle.oracle.shares
            held = any(one.share == holding.share for one in shares._held[life.learner])
            ended = shares._ended.get(life.learner, 0) >= life.incarnation
            self._guard(hold, held or ended, "shares", life, f"is granted {holding}")

    def on_adopted(self, life: Life, ready: Ready, view: np.ndarray, position: int) -> None:
        """Checks that a learner's view, after adopting a record, is the aggregator's, bit for bit."""
        learner, fragment, digest = life.learner, ready.fragment, ready.view_digest
        self.adopted[learner, life.incarnation, fragment] = digest
        if shards.digest(view) != digest:
            about = f"{learner} fragment {fragment}"
            self._world.fail(Violation("view", about, f"is not {digest}"))
        if fragment in self.let_go and life.epoch == self.epoch:
            self.let_go[fragment].adopt(life, ready, position)

    def on_trained(self, life: Life, position: int, tokens: int) -> None:
        """Note how many tokens a life of several slices trains in the step at this data position."""
        self.trained[life.learner, life.incarnation][position] = tokens

    def on_stepped(self, learner: str, waited_s: float) -> None:
        """Checks that a learner's step did not wait for any other process."""
        if waited_s > 1e-6:
            self._world.fail(Violation("waits", learner, f"{waited_s:.3f} s"))

    # The end

    def check_resolved(self) -> None:
        """Checks that the run has ended, and that no update sent before its end is unanswered."""
        hold(bool(self.end_seq), "end", "run", "has no end")
        for chain in self.chains:
            late = [u for u, seq in chain.unresolved.items() if seq < self.end_seq]
            hold(not late, "resolved", chain.about, f"never resolved: {late}")

    def check_what_is_left(self) -> None:
        """Checks that a new oracle is silent on the messages that collection has left.

        `diloco doctor` has no others. The oracle that reads along knows the whole tape, so it finds
        no fault of the rules for a tape whose beginning is trimmed.
        """
        world = self._world
        oracle = OracleOfTapes(world.layout, light=isinstance(world.tensors, Light))
        for message in world.broker.log_of(names.tape_stream(world.run_name)):
            self._ask(oracle, message)

    def fates(self) -> Counter[str]:
        """Returns the numbers of updates by fate, over all fragments."""
        total = Counter(self.past)
        for chain in self.chains:
            total.update(chain.fates)
            total["in_flight"] += len(chain.unresolved)
            total["versions"] += len(chain.digests)
            total["restores"] += chain.restores
        return total
