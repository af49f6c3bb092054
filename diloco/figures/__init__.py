"""Figures: how all of them look."""
