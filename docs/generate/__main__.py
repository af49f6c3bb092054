"""Rewrites the generated blocks of every page."""

from docs.generate import blocks, filled, pages

made = blocks()
for path in pages():
    path.write_text(filled(path.read_text(), made))
