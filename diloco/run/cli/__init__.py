"""The code that all commands share: opening a run, options, settings, output, failures."""
