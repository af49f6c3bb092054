"""The aggregator: merges the learners' updates and commits new versions.

Of the other rooms it may import `common/protocol`, `common/process` and `common/storage` alone.
"""
