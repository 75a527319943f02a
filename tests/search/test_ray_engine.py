"""The ray engine: what an actor runs, without Ray; and where Ray is installed, all of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from encode_helpers import contents, options, write_table

from hnclip.search.encode import encode
from hnclip.search.ray_engine import ShardMaker, _share
from hnclip.search.shards import claim


def test_an_actor_makes_what_a_process_makes(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_table(tmp_path / "data", 12)
    monkeypatch.chdir(tmp_path)
    encode(options(data.relative_to(tmp_path), model_directory, Path("local")))
    given = options(data.relative_to(tmp_path), model_directory, Path("actors"), engine="ray")
    monkeypatch.chdir("/")
    for numbers in ([2], [0, 1]):
        actor = ShardMaker(given, str(tmp_path))
        assert Path.cwd() == tmp_path
        claim(given.out, actor.encoder.job)  # as the driver does before
        made = actor({"shard": np.array(numbers)})
        assert list(made["shard"]) == numbers
        assert made["error"] == [""] * len(numbers)
    actor.encoder.finish()
    assert contents(tmp_path / "actors") == contents(tmp_path / "local")


def test_an_error_of_an_actor_is_a_row(model_directory: Path, tmp_path: Path) -> None:
    data = write_table(tmp_path / "data", 12)
    (data.parent / "06.png").write_bytes(b"no picture")
    actor = ShardMaker(options(data, model_directory, tmp_path / "out"), os.getcwd())
    claim(tmp_path / "out", actor.encoder.job)
    made = actor({"shard": np.array([0, 1])})
    assert made["error"][0] == ""
    assert "1 of 12 records" in made["error"][1]


def test_ray_that_is_not_installed_is_named(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    data = write_table(tmp_path / "data", 3)
    with pytest.raises(ValueError, match=r"pip install 'hnclip\[scale\]'"):
        encode(options(data, model_directory, tmp_path / "out", engine="ray"))
    encode(options(data, model_directory, tmp_path / "out"))  # what was begun can be finished without


@pytest.mark.parametrize(
    ("resources", "changed", "shared"),
    [
        ({"CPU": 16.0}, {"threads": 0}, (4, 4, 0)),
        ({"CPU": 16.0}, {"threads": 2}, (8, 2, 0)),
        ({"CPU": 2.0}, {"threads": 0}, (1, 2, 0)),
        ({"CPU": 2.0}, {"threads": 0, "workers": 2}, (2, 1, 0)),
        ({"CPU": 16.0, "GPU": 2.0}, {"threads": 0, "device": "auto"}, (2, 8, 1)),
        ({"CPU": 16.0, "GPU": 2.0}, {"threads": 0, "device": "cpu"}, (4, 4, 0)),
        ({"CPU": 64.0}, {"threads": 1, "workers": 64}, (9, 1, 0)),
    ],
)
def test_actors_share_the_processors(resources: dict[str, float], changed: dict, shared: tuple[int, int, int]) -> None:
    given = options("data", Path("model"), Path("out"), engine="ray", **changed)
    assert _share(resources, given, 9) == shared


@pytest.mark.filterwarnings("default")  # Ray's own are not ours
def test_ray_writes_what_one_process_writes(model_directory: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="pip install 'hnclip[scale]'")
    data = write_table(tmp_path / "data", 23)
    encode(options(data, model_directory, tmp_path / "local"))
    encode(options(data, model_directory, tmp_path / "ray", partition="1/3"))
    given = options(data, model_directory, tmp_path / "ray", engine="ray", workers=2)
    result = encode(given)
    assert (result.encoded, result.kept) == (3, 2)
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
