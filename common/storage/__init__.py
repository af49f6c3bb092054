"""Storage of a run outside of any process: tape, objects, and bundles (a run in one file)."""
