"""An index of pictures on disk: what it holds, how it is written without ever being broken, how it is read.

`photos.hnc` is a directory. `index.json` names the generation that counts, a directory beside it:

    catalogue.sqlite      pictures, captions, items, and which version of the index knows them (index/catalogue.py)
    images.*, captions.*  vectors, a row each, only ever appended to (index/vectors.py)
    tokens.bf16           patch vectors, if they were asked for
    thumbnails            small pictures, one behind the other
    engines/              what approximate engines made of the vectors (search/engines/)

Rows are written and flushed before a transaction of the catalogue names them, so a killed writer leaves bytes that
nobody looks at. A reader keeps the version that it opened: items are born and die with a version and never change, and
a new generation, which leaves out what is dead, takes its place by one rename.
"""
