"""The kinds of problems that data have, in one place, so that every reader calls the same thing by the same name."""

from __future__ import annotations

# The record cannot be used. Training leaves it out and lists it; `hnclip data check` fails.
ERRORS = {
    "unreadable row": "a row that is not valid in its format",
    "no image": "a row that names no picture",
    "no caption": "a picture without any caption",
    "empty caption": "a caption without a word",
    "bad text": "a caption or file that is not UTF-8, or holds half of a surrogate pair",
    "missing image": "the picture is not where the record says",
    "corrupt image": "the file is no picture that Pillow knows, or damaged",
    "truncated image": "the file ends before the picture does",
    "oversized image": "more pixels than are decoded: a decompression bomb, or a scan to be reduced first",
    "unusual image": "a picture whose mode or values have no agreed meaning in 8 bits",
    "repeated id": "two records of one name",
    "shared image": "the same picture in two splits",
}

# Worth knowing before training; nothing is left out because of it.
WARNINGS = {
    "matched by name": "images found by their file name, because their path does not exist (--read.match name)",
    "no image found": "a table of which none of the first images exists",
    "other encoding": "text that is not UTF-8 and was read in another encoding",
    "other count": "a split of a benchmark with another number of records than its paper states",
    "unread table": "a table in a folder of images with .txt captions",
    "shared caption": "the same caption in two splits",
    "same caption": "captions that are equal word for word: no model can tell their pictures apart by them",
    "similar caption": "captions that share nearly all their words",
    "same image": "one picture under several names in one split",
    "similar image": "pictures that look nearly the same",
    "garbled caption": "letters that were lost (U+FFFD) or read in the wrong encoding (â€™ for ’)",
    "cut caption": "captions longer than the model's context",
    "small image": "pictures smaller than the model's input",
}

# What can be done about each kind.
ADVICE = {
    "unreadable row": "mend the rows, or write the table anew with a program that knows its format",
    "no image": "add the pictures' names, or remove the rows",
    "no caption": "write captions, or remove the pictures",
    "empty caption": "write captions, or remove the rows",
    "bad text": "save the files as UTF-8",
    "missing image": "name their directory (--read.images), or search by file name (--read.match name)",
    "corrupt image": "copy or download the files again, or remove the records",
    "truncated image": "copy or download the files again",
    "oversized image": "make the pictures smaller, or remove the records",
    "unusual image": "convert the pictures to RGB or grey in 8 bits",
    "repeated id": "give each record an id of its own",
    "shared image": "keep the picture in one split: a model that was trained on it cannot be tested on it",
    "matched by name": "make sure that these are the images that the table means",
    "no image found": "name the directory of the images (--read.images), or search by file name (--read.match name)",
    "other encoding": "check that accents and quotes are right, or save the files as UTF-8",
    "other count": "compare your files with those of the data set's page (docs/benchmarks.md)",
    "unread table": "name the table itself to read it",
    "shared caption": "keep the pictures in one split if they show the same",
    "same caption": "write captions that tell the pictures apart, or keep one of them",
    "similar caption": "let the captions say what differs, or give the pictures one group (--read.group-column)",
    "same image": "keep one, with all the captions",
    "similar image": "keep one, or give them one group (--read.group-column), so that they stay in one split",
    "garbled caption": "make the table anew from its source, in UTF-8",
    "cut caption": "use a model with a longer context (docs/models.md), or write the important things first",
    "small image": "use larger pictures if there are any",
}
