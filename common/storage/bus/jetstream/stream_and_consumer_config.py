"""The configurations of streams, and of the consumers that read them.

`diloco/operate/make_streams.py` has the streams of a run, with their subjects and limits.
"""

import secrets

from nats.js import api

from diloco.common.storage.bus.protocol import StreamLimits, stream_settings

# The server removes a consumer that was not pulled from for this long.
CONSUMER_IDLE_S = 30.0


def stream_config(
    stream: str, subjects: list[str], limits: StreamLimits, first_seq: int, most_readers: int
) -> api.StreamConfig:
    """Returns a stream's configuration for nats-py.

    Args:
        stream: the stream's name.
        subjects: subject patterns of its messages.
        limits: its limits.
        first_seq: the sequence of its first message.
        most_readers: the greatest number of consumers; -1: the server's default.
    """
    bounded = (limits.max_age_s > 0 or limits.max_bytes > 0) and not limits.keep_old
    return api.StreamConfig(
        name=stream,
        subjects=subjects,
        storage=api.StorageType.FILE,
        discard=api.DiscardPolicy.OLD if bounded else api.DiscardPolicy.NEW,
        max_age=limits.max_age_s,
        max_bytes=limits.max_bytes or -1,
        max_msg_size=limits.max_message_bytes or -1,
        max_consumers=most_readers,
        # For durable consumers too, which could else outlive their reader's credentials.
        consumer_limits=api.StreamConsumerLimits(inactive_threshold=CONSUMER_IDLE_S),
        duplicate_window=limits.duplicate_window_s,
        num_replicas=limits.replicas,
        first_seq=first_seq,
        allow_direct=True,
        # These settings make NATS's own tools show the stream as a key-value bucket.
        max_msgs_per_subject=1 if limits.last_only else -1,
        allow_msg_ttl=limits.last_only,
        allow_rollup_hdrs=limits.last_only,
        deny_delete=limits.last_only,
    )


def settings_of(config: api.StreamConfig) -> dict[str, object]:
    """Returns an existing stream's settings under the names that `stream_settings` uses."""
    return stream_settings(
        config.subjects or [],
        StreamLimits(
            max_age_s=config.max_age or 0.0,
            max_bytes=max(config.max_bytes or 0, 0),
            max_message_bytes=max(config.max_msg_size or 0, 0),
            duplicate_window_s=config.duplicate_window,
            replicas=config.num_replicas or 1,
            last_only=config.max_msgs_per_subject == 1,
            keep_old=(config.max_bytes or 0) > 0 and config.discard == api.DiscardPolicy.NEW,
        ),
    )


def consumer_config(consumer: str, subjects: list[str], position: int) -> api.ConsumerConfig:
    """Returns the configuration of a consumer of `subjects` from the sequence `position` on."""
    return api.ConsumerConfig(
        name=consumer,
        # Makes each request differ; else the server gives two processes the same consumer.
        description=secrets.token_hex(8),
        deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=position,
        ack_policy=api.AckPolicy.NONE,
        filter_subject=subjects[0] if len(subjects) == 1 else None,
        filter_subjects=subjects if len(subjects) > 1 else None,
        inactive_threshold=CONSUMER_IDLE_S,
        mem_storage=True,
        num_replicas=1,
    )
