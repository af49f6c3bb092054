"""An operator's commands on a run: create, change, collect garbage, install units."""
