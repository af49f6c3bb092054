"""The parts that every process of a run uses: configuration, log, metrics, health, credentials.

Of the other rooms it may import `common/protocol` alone.
"""
