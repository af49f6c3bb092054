"""Documents become tokens: `diloco data`.

The walk of a document: `sources` finds its file, `plan` puts it into a piece, `documents` reads it,
`tokenizer` encodes it, `shards` keeps its tokens, `piece` does this for one piece in one process,
`prepare` for all of them. `common/token_manifest.py` is what the result says of itself.
"""
