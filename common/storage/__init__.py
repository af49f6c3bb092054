"""Storage of a run outside of any process: its tape, its objects, and bundles of both."""
