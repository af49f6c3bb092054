"""The oracle: compares a tape with what the rules alone make of it.

The oracle imports nothing of the aggregator, whose decisions it judges, and is written from
docs/design/design.md: both compute the same values by separate code. A change of a rule must be
made here as well. Pure: messages come in, findings come out.

    run.py            a whole tape: settings, stop, end, quarantines
    fragment_walk.py  one fragment's records, each against the one before it
    life.py           an owner's knowledge between two records
    hearing.py        the events that reach the owner from the tape, and its answers to updates
    watching.py       the events that reach the owner beside the tape: observations
    rounds.py         when a round opens, is cut and closes
    compare_with_previous.py  a record, field by field
    memory.py         the owner's memory of learners
    data.py           data positions, and one answer for every update
    shares.py         which shares of the data are merged
    remake.py         the merge, the outer step and the delta, from objects
    centering.py      centered clipping, a part of `remake.py`
    credit.py         the steps and tokens that an update is credited with
    numbers.py        weights, discounts, pace, grace, clocks
    finding.py        the oracle's findings
"""

from diloco.judge.oracle.finding import RULES, Violation
from diloco.judge.oracle.remake import Remaker
from diloco.judge.oracle.run import Oracle

__all__ = ["RULES", "Oracle", "Remaker", "Violation"]
