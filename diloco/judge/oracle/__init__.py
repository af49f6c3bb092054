"""The oracle: recomputes what the protocol's rules demand of a tape, and compares the tape with it.

The oracle imports nothing of the aggregator, whose decisions it judges, and is written from
docs/design/design.md: both compute the same values by separate code. A change of a rule must be
made here as well. The oracle is pure: messages come in, findings come out.

In these files the *owner* of a fragment is the aggregator that makes its records. An owner's *life*
begins when it recovers the fragment's state from a record. It is separate from a learner's life,
which is named by its incarnation. A record *answers* an update, or *resolves* it, if it has the
update's verdict.

    run.py                     a whole tape: settings, stop, end, quarantines
    fragment_walk.py           one fragment's records, each against the one before it
    life.py                    an owner's state between two records
    apply_messages.py          the messages of the tape that an owner reads, and their verdicts
    apply_observations.py      the events that an owner learns of elsewhere: observations
    rounds.py                  when a round opens, is cut and closes
    compare_with_previous.py   a record, field by field
    memory.py                  the owner's memory of learners
    data.py                    data positions, and one verdict for every update
    shares.py                  which shares of the data are merged
    remake.py                  the merge, the outer step and the delta, from objects
    centering.py               centered clipping, a part of `remake.py`
    credit.py                  the steps and tokens that an update is credited with
    numbers.py                 weights, discounts, pace, grace, clocks
    finding.py                 the oracle's findings
"""

from diloco.judge.oracle.finding import RULES, Violation
from diloco.judge.oracle.remake import Remaker
from diloco.judge.oracle.run import Oracle

__all__ = ["RULES", "Oracle", "Remaker", "Violation"]
