"""The global model of a run: read, scored, sampled, written to files."""
