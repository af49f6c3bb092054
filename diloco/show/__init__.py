"""Shows a run to people: on a terminal, on a web page, in trackers, and by alerts.

Of the other rooms it may import `common/protocol`, `common/process`, `common/storage`, `diloco/run`
and `diloco/judge` alone.
"""
