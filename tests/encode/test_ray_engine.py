"""The Ray engine: the work of an actor without Ray, and with Ray if it is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from encode_helpers import contents, options, write_table
from hnclip.encode.ray_engine import ShardActor, divide_resources
from hnclip.encode.shards import encode


def test_an_actor_writes_what_a_process_writes(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_table(tmp_path / "data", 12)
    monkeypatch.chdir(tmp_path)
    encode(options(data.relative_to(tmp_path), model_directory, Path("local")))
    given = options(data.relative_to(tmp_path), model_directory, Path("actors"), engine="ray")
    monkeypatch.chdir("/")
    for numbers in ([2], [0, 1]):
        actor = ShardActor(given, str(tmp_path))
        done = actor({"shard": np.array(numbers)})
        assert (list(done["shard"]), done["error"]) == (numbers, [""] * len(numbers))
    assert actor.encoder.finish()[0] == ()
    assert contents(tmp_path / "actors") == contents(tmp_path / "local")
    (data.parent / "06.png").write_bytes(b"no image")  # errors are rows
    assert "1 of 12 records" in actor({"shard": np.array([1])})["error"][0]


def test_ray_that_is_not_installed_is_named(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'hnclip\[scale\]'"):
        encode(options(write_table(tmp_path / "data", 3), model_directory, tmp_path / "out", engine="ray"))


@pytest.mark.parametrize(
    ("resources", "changed", "expected"),
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
def test_actors_share_the_resources(resources: dict[str, float], changed: dict, expected: tuple[int, int, int]) -> None:
    given = options("data", Path("model"), Path("out"), engine="ray", **changed)
    assert divide_resources(resources, given, 9) == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Ray's own
def test_ray_writes_what_one_process_writes(model_directory: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="pip install 'hnclip[scale]'")
    data = write_table(tmp_path / "data", 23)
    encode(options(data, model_directory, tmp_path / "local"))
    encode(options(data, model_directory, tmp_path / "ray", partition="1/3"))
    result = encode(options(data, model_directory, tmp_path / "ray", engine="ray", workers=2))
    assert (result.encoded, result.kept) == (3, 2)
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
