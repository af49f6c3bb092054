"""What a learner sends and receives beside training: updates, versions, claims, checkpoints."""
