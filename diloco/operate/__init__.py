"""An operator's commands on a run: create, change, delete, collect garbage, install units.

Of the other rooms it may import `common/protocol`, `common/process`, `common/storage`, `learner`,
`aggregator`, `diloco/run` and `diloco/show` alone.
"""
