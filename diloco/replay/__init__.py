"""Recomputes a run's past: verifies it, decides it again, or merges it under other settings.

Of the other rooms it may import `common/protocol`, `common/process`, `common/storage`, `learner`,
`aggregator`, `diloco/run`, `diloco/judge`, `diloco/show` and `diloco/operate` alone.
"""
