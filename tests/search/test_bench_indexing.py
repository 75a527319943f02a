"""The benchmark of `hnclip index`, on few pictures and with a tiny model."""

from __future__ import annotations

import json

import pytest

from hnclip.cli import main

SMALL = ["--pictures", "9", "--layers", "1", "--width", "32", "--batch", "4", "--turns", "1", "--threads", "1"]


def test_indexing_beside_the_encoder_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "indexing", *SMALL, "--tokens", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ways = [row["way"] for row in found["rows"]]
    assert ways == [
        "the encoder alone, pixels ready",
        "hnclip index, JPEG files",
        "hnclip index again, nothing to do",
    ]
    encoder, index, again = (row["seconds"]["seconds"][0] for row in found["rows"])
    assert found["rows"][0]["share"]["median"] == 1
    assert found["rows"][1]["share"]["median"] == pytest.approx(encoder / index)
    assert found["rows"][2]["pictures"]["median"] == pytest.approx(9 / again)
    assert "9 pictures in batches of 4" in found["notes"][0]
