"""Tasks for models: bytes, published decoders, other libraries' models; and their data.

Of the other rooms it may import `common/protocol`, `common/process`, `common/storage`, `learner`,
`diloco/run` and `diloco/operate` alone.
"""
