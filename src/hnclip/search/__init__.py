"""An index of images on disk, searched by long descriptions: `build_index`, `open_index`, `hnclip serve`.

scan → indexer, update → writer     what has changed is read, encoded and committed
query_encoder → searcher → reader   a query is encoded, engines propose rows, stored vectors decide
"""
