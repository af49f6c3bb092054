"""The owner of one fragment: it feeds events to the machine of `core`, and performs the effects."""
