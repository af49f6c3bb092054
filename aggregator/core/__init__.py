"""The aggregator's core: what it decides, without IO, clock, randomness, threads or logging.

policy.py     the numbers: weights, discounts, pace, quorum, grace, what is well formed, and
              which fragments an aggregator takes and gives up
state.py      what the machine of one fragment knows
members.py    the learners in it, what they say together, and which lives are heard of
updates.py    the updates that it has in hand
persistent.py collections that are replaced, never changed
events.py     what it can be told, and what it can ask for
machine.py    step(rules, state, event) -> (state, effects)
admission.py  which updates it takes, and from whom; what is believed of their steps, tokens,
              weight and norm
rounds.py     when a round opens and closes, and when the machine wants a timer
memory.py     what outlives it, in records
decisions.py  what a record says of a decision, and the same decisions made again
garbage.py    what of a fragment nobody needs any more

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
