"""The daemons as commands: `diloco aggregator` and `diloco learner`."""
