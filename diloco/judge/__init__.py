"""Judges a run's health: compares tape and store with the protocol's rules, for `diloco doctor`.

Of the other rooms it may import `common/protocol`, `common/process`, `common/storage`, `aggregator`
and `diloco/run` alone.
"""
