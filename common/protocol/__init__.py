"""The protocol between the parties of a run, as bytes and names. Pure: no IO, clock or log.

It may import no other room.
"""
