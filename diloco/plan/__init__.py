"""`diloco plan`: forecasts the training of a fleet.

Of the other rooms it may import `common/protocol`, `common/process`, `learner`, `aggregator`,
`diloco/run` and `diloco/show` alone.
"""
