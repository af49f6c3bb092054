"""Google Cloud Storage as an object store: `gs://bucket/prefix`.

- Create-only: every upload has the condition "generation 0". A 412 answer may mean that an earlier
  attempt was stored and its answer lost, so what is there is compared by size and crc32c.
- Large objects go up in one resumable session, which asks after a broken connection how much has
  arrived and sends the rest; they come down as ranges on several threads, into one buffer.
- Checked from end to end: the service compares each upload with our crc32c, we each download of a
  whole object. It knows no checksum of a range: who reads ranges checks what they hold.
- Transient faults (408, 429, 5xx, broken connections, time-outs) are retried with exponential
  backoff and full jitter, once at least, but only for `RETRY_S` after the first failure without a
  byte of progress: callers wait out long outages with `Runtime.retry`, which tells the operator.

The only package that imports google.cloud, and requests under it.
"""

from diloco.common.storage.store.gcs.bucket import PART_BYTES
from diloco.common.storage.store.gcs.store import GcsStore, open_gcs
