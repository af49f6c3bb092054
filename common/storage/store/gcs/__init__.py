"""Google Cloud Storage as an object store: `gs://bucket/prefix`.

- Never overwrites: every upload has the condition "generation 0". A 412 answer may mean that an
  earlier attempt was stored and its answer lost, so the stored size and crc32c are compared.
- Large objects are uploaded in one resumable session, which after a broken connection asks how much
  has arrived and sends the rest. Downloads read ranges on several threads, into one buffer.
- Checked end to end: the service compares each upload with our crc32c, and we compare each download
  of a whole object. The service has no checksum of a range, so readers of ranges check the content.
- Transient faults (408, 429, 5xx, broken connections, time-outs) are retried at least once, with
  exponential backoff and full jitter, for `RETRY_S` after the first failure without progress.
  Callers wait out longer outages with `Runtime.retry`, which tells the operator.

The only package that imports google.cloud, and requests under it.
"""

from diloco.common.storage.store.gcs.bucket import PART_BYTES
from diloco.common.storage.store.gcs.gcs_store import GcsStore, open_gcs
