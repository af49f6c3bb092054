"""The learner's decisions: what is due, in flight and adopted at a step boundary. No IO."""
