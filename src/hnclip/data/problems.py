"""The kinds of problems of data: what each is, and what to do about it."""

from __future__ import annotations

# The record is invalid: it is skipped and listed, and `hnclip data check` fails.
ERRORS = {
    "unreadable row": "not valid in its format → correct the rows, or export the table again",
    "no image": "a row without an image → add the images' paths, or remove the rows",
    "no caption": "an image without a caption → write captions, or remove the images",
    "empty caption": "a caption without a word → write captions, or remove the rows",
    "bad text": "not UTF-8, or half of a surrogate pair → save the files as UTF-8",
    "missing image": "→ name the images' directory (--read.images), or search by file name (--read.match name)",
    "corrupt image": "damaged, or no format that Pillow reads → copy the files again, or remove the records",
    "truncated image": "the file ends before the image does → copy or download the files again",
    "oversized image": "more pixels than are decoded → resize the images, or remove the records",
    "unusual image": "no standard conversion to 8 bits → convert the images to 8-bit RGB or greyscale",
    "repeated id": "two records with the same id → give each record a unique id",
    "shared image": "one image in two splits → keep it in one: no model may be tested on its training images",
}

# Worth knowing before training; nothing is skipped.
WARNINGS = {
    "matched by name": "found by file name, because the path does not exist → make sure that these are meant",
    "no image found": "none of a table's first images exists → name their directory (--read.images)",
    "other encoding": "read in another encoding than UTF-8 → check accents and quotes, or save the files as UTF-8",
    "other count": "not the number of records of the benchmark's paper → compare your files (docs/benchmarks.md)",
    "unread table": "a table in a folder of images with .txt captions → name the table itself to read it",
    "shared caption": "the same caption in two splits → keep the images in one split if they show the same",
    "same caption": "no model can distinguish their images by them → write captions that do, or keep one",
    "similar caption": "nearly the same words → describe what differs, or declare a group (--read.group-column)",
    "same image": "one image under several names in one split → keep one, with all the captions",
    "similar image": "they look nearly the same → keep one, or declare a group, which stays in one split",
    "garbled caption": "lost (U+FFFD) or wrongly decoded (â€™ for ’) letters → export the table again, in UTF-8",
    "cut caption": "longer than the model's context → use a longer one (docs/models.md), or put details first",
    "small image": "smaller than the model's input → use larger images if there are any",
}
ADVICE = {**ERRORS, **WARNINGS}
