"""The learner's traffic beside training: updates, versions, claims, checkpoints."""
