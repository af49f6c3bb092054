"""What a run's tape says, as folds over `common/storage/tape`: whole, as columns, and as of now.

The rooms that look, check, report and replay build on these; nothing here imports one of them.
"""
