"""Folds over a run's tape (`common/storage/tape`): whole, as columns, and as of now.

The rooms that look, check, report and replay build on these; nothing here imports one of them.
"""
