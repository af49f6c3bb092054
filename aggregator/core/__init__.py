"""The aggregator's core: its decisions, without IO, clock, randomness, threads or logging.

For each fragment there is a state machine. The *driver* of a machine gives it events and carries
out the effects that it returns; in an aggregator the driver is the fragment's owner (`owner/`).

round_and_weight_formulas.py
                         weight, discount, quorum, pace, grace, moving averages
state.py                 the state of a machine
members.py               the learners in a state, medians over them, and liveness from heartbeats
updates.py               the waiting, merged and rejected updates in a state
immutable_collections.py maps, sorted values and counts that change at little cost
events.py                a machine's inputs (events), and what it asks its driver to do (effects)
machine.py               step(rules, state, event) -> (state, effects)
admission_and_credit.py  which updates are merged, and from whom; their credited steps and tokens
rounds.py                when a round opens and closes, and when the machine wants a timer
memory.py                the part of a state that records carry to the next owner
decisions.py             decisions as a record states them, and deciding again from a tape
garbage.py               which messages and objects of a fragment can be removed
ownership_division.py    which fragments an aggregator acquires and releases

Comments in these files say why a rule is there, and name the invariant that it keeps:

1. Versions of a fragment are 0, 1, 2 ... without gap or fork.
2. Every well-formed update ends in exactly one record: merged once, or rejected once with a reason.
3. No kill changes a published version: recovery reproduces its digest.
4. Per fragment, tokens sent = merged + rejected + in flight; each step's progress enters exactly
   one update.
5. Replaying a tape gives the same digests.
6. No learner's step waits for a peer, the aggregator, NATS or the store.
7. In lockstep with identical learners the system equals synchronous DiLoCo.

"P" with a section is the paper (arXiv 2604.21428).
"""
