"""Buckets of S3 and Azure, and of servers that speak as they do (R2, MinIO), by `obstore`.

Where they are and who asks is read from the environment, as their own tools do: `AWS_...` and
`AZURE_...`. Google's buckets have a client of their own (`diloco.common.store.gcs`).
"""

from diloco.common.store.buckets.store import BucketStore, open_bucket

__all__ = ["BucketStore", "open_bucket"]
