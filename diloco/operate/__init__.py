"""An operator's commands on a run: create, change, delete, collect garbage, install units."""
