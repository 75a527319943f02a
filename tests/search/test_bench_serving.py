"""`hnclip bench serving`: what its clients count is what a server does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from serve_helpers import listening, make_index, records

from hnclip.bench import open_benchmark

MODULE = open_benchmark("serving")


def test_clients_count_what_they_see(tmp_path: Path) -> None:
    path = make_index(tmp_path, 4)
    texts = [record.captions[0] for record in records()[:3]]
    pictures = [file.read_bytes() for file in (tmp_path / "pictures").glob("*.png")]
    options = MODULE.Options(clients=3, seconds=1.0, images=3, k=2)
    with listening(path) as (port, service):
        first = MODULE._first_answers(port, 0.0, texts[0])
        assert first["healthz"] <= first["index"] <= first["search"]
        seen, memory = MODULE._load(os.getpid(), port, options, texts, [*pictures, b"no picture"])
        assert min(memory) > 10e6
        service.searches.close()  # from here on there is no room
        refused, _ = MODULE._load(os.getpid(), port, options, texts, pictures)
    counted = [MODULE._row(kind, seen, options.seconds) for kind in ("text", "picture")]
    assert all(row["answers"] > 0 and 0 < row["p50"] <= row["p95"] <= row["p99"] for row in counted)
    assert counted[0]["failed"] == counted[0]["busy"] == 0
    assert counted[1]["failed"] > 0
    assert {name for client in seen for name in client.failed} == {"picture: 422"}
    with pytest.raises(RuntimeError, match="picture: 422"):
        MODULE.check(counted, seen)
    busy = [MODULE._row(kind, refused, 1.0) for kind in ("text", "picture")]
    assert sum(row["busy"] for row in busy) >= 3
    assert [row["answers"] for row in busy] == [0, 0]
    with pytest.raises(RuntimeError, match="no question was answered of the kind text, picture"):
        MODULE.check(busy, refused)
    MODULE.check(counted[:1], refused)  # busy is no failure
    gone, _ = MODULE._load(os.getpid(), port, options, texts, pictures)
    assert {name.partition(": ")[2] for client in gone for name in client.failed} == {"ConnectionRefusedError"}


def test_options_that_make_no_sense() -> None:
    for wrong in ({"rows": 0}, {"clients": 0}, {"seconds": 0.0}, {"images": -1}):
        with pytest.raises(ValueError):
            MODULE.Options(**wrong)
