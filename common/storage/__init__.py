"""The storage of a run outside any process: tape, objects, and both in one file."""
