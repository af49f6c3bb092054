"""The parts that every process of a run has: configuration, log, metrics, health, credentials."""
