"""The code that all commands share: naming a run, settings on the command line."""
