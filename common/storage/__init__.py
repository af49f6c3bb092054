"""What a run consists of outside any process: tape, objects, and both in one file."""
