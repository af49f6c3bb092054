"""What operators install besides the daemons: releases, units, NATS, machines of Google Cloud.

Of the other rooms it may import `common/protocol`, `common/process`, `learner`, `diloco/run`,
`diloco/show`, `diloco/operate` and `diloco/plan` alone.
"""
