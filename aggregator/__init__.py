"""The aggregator: merges the learners' updates and commits new versions."""
