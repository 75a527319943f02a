"""The Ray engine: the work of an actor without Ray, and with Ray if it is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from encode_helpers import contents, run, write_table
from hnclip.encode.ray_engine import ShardActor, divide_resources
from hnclip.encode.shards import EncodeSettings


def test_an_actor_writes_what_a_process_writes(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path / "data", 12)
    monkeypatch.chdir(tmp_path)
    run("data/pairs.csv", model_directory, Path("local"))
    monkeypatch.chdir("/")
    settings = EncodeSettings(
        "data/pairs.csv", Path("actors"), str(model_directory), shard_size=5, batch=4, threads=1, device="cpu"
    )
    for numbers in ([2], [0, 1]):
        actor = ShardActor(settings, str(tmp_path))
        done = actor({"shard": np.array(numbers)})
        assert (list(done["shard"]), done["error"]) == (numbers, [""] * len(numbers))
    assert actor.encoder.finish()[0] == ()
    assert contents(tmp_path / "actors") == contents(tmp_path / "local")
    (tmp_path / "data/06.png").write_bytes(b"no image")  # errors are rows
    assert "1 of 12 records" in actor({"shard": np.array([1])})["error"][0]
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"hnclip\[scale\]"):
        run(tmp_path / "data/pairs.csv", model_directory, tmp_path / "out", engine="ray")


@pytest.mark.parametrize(
    ("resources", "threads", "workers", "device", "expected"),
    [
        ({"CPU": 16.0}, 0, None, "cpu", (4, 4, 0)),
        ({"CPU": 16.0}, 2, None, "cpu", (8, 2, 0)),
        ({"CPU": 2.0}, 0, None, "cpu", (1, 2, 0)),
        ({"CPU": 2.0}, 0, 2, "cpu", (2, 1, 0)),
        ({"CPU": 16.0, "GPU": 2.0}, 0, None, "auto", (2, 8, 1)),
        ({"CPU": 16.0, "GPU": 2.0}, 0, None, "cpu", (4, 4, 0)),
        ({"CPU": 64.0}, 1, 64, "cpu", (9, 1, 0)),
    ],
)
def test_actors_share_the_resources(
    resources: dict[str, float], threads: int, workers: int | None, device: str, expected: tuple[int, int, int]
) -> None:
    settings = EncodeSettings("data", Path("out"), threads=threads, device=device)
    assert divide_resources(resources, settings, workers, 9) == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Ray's own
def test_ray_writes_what_one_process_writes(model_directory: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="pip install 'hnclip[scale]'")
    data = write_table(tmp_path / "data", 23)
    run(data, model_directory, tmp_path / "local")
    run(data, model_directory, tmp_path / "ray", partition=(0, 3))
    result = run(data, model_directory, tmp_path / "ray", engine="ray", workers=2)
    assert (result.encoded, result.kept) == (3, 2)
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
