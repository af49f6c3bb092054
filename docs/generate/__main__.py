"""Writes every page that has generated blocks anew."""

from docs.generate import blocks, filled, pages

made = blocks()
for path in pages():
    path.write_text(filled(path.read_text(), made))
