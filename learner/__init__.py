"""The learner: trains on its own, sends outer gradients, adopts new versions.

Of the other rooms it may import `common/protocol`, `common/process` and `common/storage` alone.
"""
