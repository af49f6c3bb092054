"""Tokenizes documents into folders of token files: `diloco data`.

`sources` finds files, `documents` and `token_files` read documents from these files, `tokenizer`
encodes the documents, and `prepare` runs these steps and stores shards. `folder` shows, verifies
and copies the resulting folder; `manifest` defines its manifest.
"""
