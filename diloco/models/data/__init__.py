"""Documents become tokens: `diloco data`.

The walk of a document: `sources` finds its file, `documents` reads it, `tokenizer` encodes it,
`shards` stores its tokens, `prepare` goes from the first to the last. `whole` shows, checks and
copies the result, of which `diloco/models/data/manifest.py` is what it says of itself.
"""
