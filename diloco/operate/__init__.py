"""An operator's hand on a run: create, change, collect, install."""
