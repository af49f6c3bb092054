"""Storage of a run outside of any process: tape, objects, and bundles (a run in one file).

Of the other rooms it may import `common/protocol` and `common/process` alone.
"""
