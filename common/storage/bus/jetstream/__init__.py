"""The bus on NATS JetStream; the only package that imports nats.

Rules:
- nats-py's own reconnecting is off. A `Link` is one connection, used until it is lost; then a
  task makes new ones, for ever, with backoff and jitter, and reads the credentials anew. So no
  message waits in a client's buffer to be sent long after its caller gave up, and a connection
  that the server closed for good (where nats-py would stay closed) is replaced as well.
- A call that gets no answer in `CALL_TIMEOUT_S`, or whose link is lost, raises
  `BusUnavailableError`; nothing here repeats a publish.
- A reader keeps its position itself. Whatever happens to its consumer, it makes a new consumer at
  the last delivered sequence + 1; a consumer's own numbering shows gaps in what it delivers.
- The server reports a missing permission separately from the call, which then times out: `Link`
  remembers what was denied, and the time-out becomes a `BusError` with the subject.
- A reader of a single subject puts it into the subject of its request for a consumer, and so does
  `last` with `direct_reads`: so the server can permit or refuse requests by subject.

Permissions a client needs: publish on its own subjects; `<api>.STREAM.INFO.<stream>` and
`<api>.STREAM.MSG.GET.<stream>` (or `<api>.DIRECT.GET.<stream>.<subject>` with `direct_reads`);
`<api>.CONSUMER.CREATE.<stream>.*.<subject>` for each subject it reads alone, without the subject
to read several in one order; `<api>.CONSUMER.{MSG.NEXT,DELETE}.<stream>.*` (of learners and
readers, whose consumers have the names of their credentials, in place of each `*`); subscribe on
`<inbox_prefix>.>`. `<api>` is `$JS.API`, or what the credentials say.
`diloco/operate/auth/permissions.py` grants this.
"""

from diloco.common.storage.bus.jetstream.link import CALL_TIMEOUT_S, check_url
from diloco.common.storage.bus.jetstream.nats_bus import NatsBus, connect, connect_or_wait
