"""The parts that every process of a run uses: configuration, log, metrics, health, credentials."""
