"""Tokenizes documents into folders of token files: `diloco data`.

`sources` finds files, `documents` and `token_files` read documents from them, `tokenizer` encodes
the documents, `prepare` runs these steps and stores shards. `folder` shows, verifies and copies the
resulting folder, which `manifest` describes.
"""
