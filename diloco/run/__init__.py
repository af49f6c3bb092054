"""Reads a run: its tape, its present state and its global model; and what all commands share.

`history.py` has the whole tape, `timeseries.py` columns of numbers, `observed.py` the present
state, `health_findings.py` the findings on that state. The packages that show, judge and replay a
run import this one, which imports none of them.

Of the other rooms it may import `common/protocol`, `common/process`, `common/storage`, `learner`
and `aggregator` alone.
"""
