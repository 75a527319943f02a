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
    "same caption": "captions that are equal word for word: no model can tell their pictures apart by them",
    "similar caption": "captions that share nearly all their words",
    "same image": "one picture under several names in one split",
    "similar image": "pictures that look nearly the same",
    "shared caption": "the same caption in two splits",
    "cut caption": "captions longer than the model's context",
    "small image": "pictures smaller than the model's input",
    "unused file": "a file beside the data that no record refers to",
}
