"""The kinds of problems of data, with a description and advice for each."""

from __future__ import annotations

# The record is invalid: it is skipped and listed, and `hnclip data check` fails.
ERRORS = {
    "unreadable row": "a row that is not valid in its format",
    "no image": "a row without an image",
    "no caption": "an image without a caption",
    "empty caption": "a caption without a word",
    "bad text": "a caption or file that is not UTF-8, or holds half of a surrogate pair",
    "missing image": "the image does not exist",
    "corrupt image": "the file is damaged, or not in a format that Pillow reads",
    "truncated image": "the file ends before the image does",
    "oversized image": "more pixels than are decoded: a decompression bomb, or a scan to be reduced first",
    "unusual image": "an image whose mode or values have no standard conversion to 8 bits",
    "repeated id": "two records with the same id",
    "shared image": "the same image in two splits",
}

# Worth knowing before training; nothing is skipped.
WARNINGS = {
    "matched by name": "images found by their file name, because their path does not exist (--read.match name)",
    "no image found": "a table of which none of the first images exists",
    "other encoding": "text that is not UTF-8 and was read in another encoding",
    "other count": "a split of a benchmark with another number of records than its paper states",
    "unread table": "a table in a folder of images with .txt captions",
    "shared caption": "the same caption in two splits",
    "same caption": "captions that are equal word for word: no model can distinguish their images by them",
    "similar caption": "captions that share nearly all their words",
    "same image": "one image under several names in one split",
    "similar image": "images that look nearly the same",
    "garbled caption": "characters that were lost (U+FFFD) or decoded wrongly (â€™ for ’)",
    "cut caption": "captions longer than the model's context",
    "small image": "images smaller than the model's input",
}

# What to do about each kind.
ADVICE = {
    "unreadable row": "correct the rows, or export the table again",
    "no image": "add the images' paths, or remove the rows",
    "no caption": "write captions, or remove the images",
    "empty caption": "write captions, or remove the rows",
    "bad text": "save the files as UTF-8",
    "missing image": "name their directory (--read.images), or search by file name (--read.match name)",
    "corrupt image": "copy or download the files again, or remove the records",
    "truncated image": "copy or download the files again",
    "oversized image": "resize the images, or remove the records",
    "unusual image": "convert the images to 8-bit RGB or greyscale",
    "repeated id": "give each record a unique id",
    "shared image": "keep the image in one split: a model must not be tested on its training images",
    "matched by name": "make sure that these are the images that the table means",
    "no image found": "name the directory of the images (--read.images), or search by file name (--read.match name)",
    "other encoding": "check that accents and quotes are right, or save the files as UTF-8",
    "other count": "compare your files with those of the data set's page (docs/benchmarks.md)",
    "unread table": "name the table itself to read it",
    "shared caption": "keep the images in one split if they show the same",
    "same caption": "write captions that distinguish the images, or keep one of them",
    "similar caption": "describe what differs, or give the images one group (--read.group-column)",
    "same image": "keep one, with all the captions",
    "similar image": "keep one, or give them one group (--read.group-column), so that they stay in one split",
    "garbled caption": "export the table again from its source, in UTF-8",
    "cut caption": "use a model with a longer context (docs/models.md), or put the important details first",
    "small image": "use larger images if there are any",
}
