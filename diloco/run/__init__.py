"""Folds over a run's tape (`common/storage/tape`): whole, as columns, and as of now.

The packages that show, check, report and replay build on these; nothing here imports them.
"""
