"""The owner of a fragment: feeds events to the state machine of `core`, carries out its effects."""
