"""The aggregator's core: what it decides, without IO, clock, randomness, threads or logging.

policy.py     the numbers: weights, discounts, pace, quorum, grace, what is believed
state.py      what the machine of one fragment knows
events.py     what it can be told
effects.py    what it can ask for
machine.py    step(rules, state, event) -> (state, effects)
admission.py  which updates it takes, and from whom
rounds.py     when a round opens and closes, and when the machine wants a timer
memory.py     what outlives it, in records
decisions.py  what a record says of a decision, and the same decisions made again
garbage.py    what of a fragment nobody needs any more
division.py   which fragments an aggregator takes and gives up
"""
