"""`hnclip prepare` as a user calls it: what it writes, says, skips and continues."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from hnclip.cli import main
from hnclip.data.image_cache import load_images
from hnclip.data.records import DataSet
from hnclip.data.scenes import FAMILIES, scene_records
from hnclip.data.sources import open_data
from hnclip.models.load import load
from hnclip.prepare import work
from hnclip.prepare.lines import Entry, Kind, ManifestWriter, open_writer, read_manifest
from hnclip.prepare.manifest import apply_manifest, manifest_path
from hnclip.prepare.proposers import Felzenszwalb, Grid

PICTURES = 6


@pytest.fixture(autouse=True)
def small_scenes(monkeypatch: pytest.MonkeyPatch) -> None:
    for split in FAMILIES:
        monkeypatch.setitem(FAMILIES, split, 4 if split == "train" else 2)


def draw(path: Path, seed: int) -> None:
    """Rectangles of a few colours, so that segments are found."""
    random = np.random.default_rng(seed)
    picture = Image.new("RGB", (96 + 8 * seed, 80), "white")
    canvas = ImageDraw.Draw(picture)
    for _ in range(5):
        x, y = (int(value) for value in random.integers(0, 60, 2))
        canvas.rectangle((x, y, x + 30, y + 18), fill=tuple(int(value) for value in random.integers(0, 256, 3)))
    picture.save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Drawn pictures with captions in text files of the same names."""
    directory = tmp_path / "photos"
    directory.mkdir()
    for number, record in enumerate(scene_records("park", "train", families=2, members=4)[:PICTURES]):
        draw(directory / f"{number}.png", number)
        (directory / f"{number}.txt").write_text(record.captions[0] + "\n", encoding="utf-8")
    return directory


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["prepare", *words, "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return json.loads(said.out)


def regions(folder: Path, model: Path, *more: str) -> list[str]:
    return ["regions", str(folder), "--model", str(model), "--workers", "1", "--batch", "8", "--device", "cpu", *more]


def entries(manifest: str | Path) -> dict[str, Any]:
    return {
        id: (entry.mark, entry.tool, entry.content)
        for id, entry in read_manifest(Path(manifest)).entries["regions"].items()
    }


def test_scenes_bring_the_truth(picture_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "regions", "scenes/shelf"]) == 0
    said = capsys.readouterr()
    assert "regions are those that the data bring along" in said.err
    path = manifest_path(picture_cache, "scenes/shelf")
    assert "regions of scenes/shelf, train: 8 records\n  8 prepared" in said.out
    assert f"manifest: {path}\nnext: hnclip train --objective goal --data scenes/shelf" in said.out
    records = scene_records("shelf", "train", families=4)
    made, prepared = apply_manifest([replace(record, regions=()) for record in records], path)
    assert made == records
    assert prepared.found["regions"] == 8
    before = path.read_bytes()
    again = run(capsys, "regions", "scenes/shelf", "--proposer", "truth")
    assert (again["made"], again["kept"]) == (0, 8)
    assert again["counts"] == {"regions": sum(len(record.regions) for record in records)}
    assert path.read_bytes() == before


def test_a_proposer_that_is_named_takes_the_place_of_the_truth(
    tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.jsonl"
    run(capsys, "regions", "scenes/park", "--out", str(out))
    words = ["--model", str(model_directory), "--proposer", "grid", "--split", "validation", "--out", str(out)]
    found = run(capsys, "regions", "scenes/park", *words)
    assert (found["records"], found["made"], found["tool"]["name"]) == (8, 8, "grid")
    assert "not SAM's" in found["note"]
    assert len(entries(out)) == 16


def test_regions_of_drawn_pictures(folder: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, *regions(folder, model_directory, "--proposer", "felzenszwalb+grid"))
    records = open_data(str(folder)).records
    assert (found["records"], found["made"], found["kept"], found["problems"]) == (PICTURES, PICTURES, 0, [])
    made, prepared = apply_manifest(records, Path(found["manifest"]))
    counts = found["counts"]
    assert counts["regions"] == sum(len(record.regions) for record in made) > 0
    assert counts["sentences"] == counts["regions"] + counts["dropped"]
    assert prepared.found["regions"] == PICTURES
    for record in made:
        width, height = record.image.load().size
        scores = [region.score for region in record.regions]
        assert scores == sorted(scores, reverse=True)
        assert len({region.sentence for region in record.regions}) == len(record.regions)
        for region in record.regions:
            left, top, right, bottom = region.box
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height
            assert region.sentence in record.captions[0]
    tool = found["tool"]
    assert tool["name"] == "felzenszwalb+grid"
    assert tool["sentences"] == "careful"
    assert set(tool["model"]) == {"source", "fingerprint"}
    sources = {region["source"] for _, _, content in entries(found["manifest"]).values() for region in content}
    assert sources <= {"felzenszwalb", "grid"}


def test_only_what_has_changed_is_made_again(
    folder: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = regions(folder, model_directory, "--proposer", "grid")
    first = run(capsys, *words)
    content = Path(first["manifest"]).read_bytes()
    again = run(capsys, *words)
    assert (again["made"], again["kept"], again["counts"]) == (0, PICTURES, first["counts"])
    assert Path(first["manifest"]).read_bytes() == content
    (folder / "1.txt").write_text("A car. A tree.\n", encoding="utf-8")
    draw(folder / "2.png", 77)
    changed = run(capsys, *words)
    assert (changed["made"], changed["kept"]) == (2, PICTURES - 2)
    assert run(capsys, *words, "--sentences", "dots")["made"] == PICTURES  # another way to do it


def test_unusable_records_are_listed_and_skipped(
    folder: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "0.png").write_bytes(b"not a picture")
    whole = (folder / "1.png").read_bytes()
    (folder / "1.png").write_bytes(whole[: len(whole) // 2])
    (folder / "2.txt").write_text("\n", encoding="utf-8")
    found = run(capsys, *regions(folder, model_directory, "--proposer", "grid"))
    kinds = {problem["where"]: problem["kind"] for problem in found["problems"]}
    assert kinds == {"0": "corrupt image", "1": "truncated image"}
    assert (found["records"], found["made"]) == (PICTURES - 1, PICTURES - 3)
    edges = run(capsys, "edges", str(folder), "--model", str(model_directory))
    assert {problem["where"] for problem in edges["problems"]} == {"0", "1"}
    assert edges["made"] == PICTURES - 3
    assert main(["prepare", *regions(folder, model_directory, "--proposer", "grid")]) == 0
    assert "2 problems; what has one is skipped:\n    corrupt image: 0:" in capsys.readouterr().out
    for picture in folder.glob("*.png"):
        picture.write_bytes(b"")
    assert main(["prepare", *regions(folder, model_directory, "--proposer", "grid")]) == 1
    assert "nothing of" in capsys.readouterr().err


def test_edge_maps_are_in_the_cache_where_training_looks(
    folder: Path, model_directory: Path, picture_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(capsys, "edges", str(folder), "--model", str(model_directory), "--method", "canny:50,150")
    assert (found["made"], found["counts"], found["tool"]["name"]) == (PICTURES, {"maps": PICTURES}, "canny:50,150")
    made, prepared = apply_manifest(open_data(str(folder)).records, Path(found["manifest"]))
    assert prepared.found["edges"] == PICTURES

    def nothing_left(images: range) -> Any:
        raise AssertionError(f"{len(images)} maps are not in the cache")

    maps = [record.edges for record in made if record.edges is not None]
    transform = load(model_directory).image_transform
    loaded = load_images(maps, transform, cache=picture_cache, progress=nothing_left)
    assert len(loaded.kept) == PICTURES
    assert [int(pixels.max()) > 100 and int(pixels.min()) == 0 for pixels in loaded.pixels[:]] == [True] * PICTURES
    again = run(capsys, "edges", str(folder), "--model", str(model_directory), "--method", "canny:50,150")
    assert (again["made"], again["kept"]) == (0, PICTURES)


def test_filtered_captions(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "text", str(folder))
    records = open_data(str(folder)).records
    made, _ = apply_manifest(records, Path(found["manifest"]))
    assert all(len(record.filtered) == 1 for record in made)
    changed = sum(record.filtered != record.captions for record in made)
    assert found["counts"] == {"captions": PICTURES, "changed": changed}
    assert changed > 0
    assert run(capsys, "text", str(folder))["made"] == 0


def test_a_filter_of_ones_own_that_fails_loses_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "calls = []\ndef strict(caption):\n    calls.append(caption)\n"
    code += "    if len(calls) == 4: raise RuntimeError('busy')\n    return caption.upper()\n"
    code += "def wrong(caption): return 3\n"
    (tmp_path / "own_filters.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["prepare", "text", str(folder), "--filter", "own_filters:strict"]) == 1
    assert "failed on a caption of 3 (RuntimeError: busy); what was done before is kept" in capsys.readouterr().err
    found = run(capsys, "text", str(folder), "--filter", "own_filters:strict", "--workers", "2")
    assert (found["made"], found["kept"], found["counts"]["changed"]) == (PICTURES - 3, 3, PICTURES)
    assert main(["prepare", "text", str(folder), "--filter", "own_filters:wrong"]) == 1
    assert "the filter own_filters:wrong failed on a caption of 0" in capsys.readouterr().err


def test_regions_that_the_data_bring_along_are_left_to_them(
    folder: Path, model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = scene_records("park", "train", families=1, members=4)
    monkeypatch.setattr(work, "open_data", lambda source, read, splits: DataSet(source, tuple(own)))
    found = run(capsys, *regions(folder, model_directory))
    assert (found["own"], found["made"], found["counts"]) == (4, 0, {})
    assert not Path(found["manifest"]).exists()
    assert main(["prepare", *regions(folder, model_directory)]) == 0
    said = capsys.readouterr().out
    assert "4 records with regions of the data's own: nothing to prepare\n  name a --proposer" in said
    assert main(["prepare", *regions(folder, model_directory, "--weights", str(folder))]) == 1
    assert "--weights are of no use" in capsys.readouterr().err
    # Where some lack them, these alone are prepared; by name all of them.
    own[0] = replace(own[0], regions=())
    assert main(["prepare", *regions(folder, model_directory, "--proposer", "truth")]) == 1
    assert "1 of 4 records" in capsys.readouterr().err
    some = run(capsys, *regions(folder, model_directory))
    assert (some["own"], some["made"], some["tool"]["name"]) == (3, 1, "felzenszwalb+grid")
    assert run(capsys, *regions(folder, model_directory, "--proposer", "grid"))["made"] == 4


def test_after_an_end_in_the_middle_the_same_command_goes_on(
    folder: Path,
    model_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended, whole = tmp_path / "ended.jsonl", tmp_path / "whole.jsonl"
    words = regions(folder, model_directory, "--proposer", "grid")
    monkeypatch.setattr("hnclip.prepare.regions.CROPS", 1)  # each record by itself, whoever was there before
    add, calls = ManifestWriter.add, []

    def sometimes(writer: ManifestWriter, kind: Kind, found: Sequence[Entry]) -> None:
        calls.append(found)
        if len(calls) == 3:
            raise RuntimeError("the machine is gone")
        add(writer, kind, found)

    with monkeypatch.context() as patch:
        patch.setattr(ManifestWriter, "add", sometimes)
        assert main(["prepare", *words, "--out", str(ended)]) == 1
    assert "the machine is gone" in capsys.readouterr().err
    done = len(read_manifest(ended).entries["regions"])
    assert 2 <= done < PICTURES
    with ended.open("ab") as file:
        file.write(b'{"kind": "regions", "id": "half')
    found = run(capsys, *words, "--out", str(ended))
    assert (found["made"], found["kept"]) == (PICTURES - done, done)
    run(capsys, *words, "--out", str(whole))
    assert entries(ended) == entries(whole)


def test_where_to_write_is_carried_on(
    folder: Path, model_directory: Path, tmp_path: Path, picture_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my views.jsonl"
    found = run(capsys, "text", str(folder), "--out", str(out))
    assert found["manifest"] == str(out)
    assert found["next"] == f"hnclip train --objective structxlip --data {folder} --read.prepared '{out}'"
    edges = run(capsys, "edges", str(folder), "--model", str(model_directory), "--out", str(out))
    assert edges["next"] == f"hnclip prepare text {folder} --out '{out}'"
    # Where training would look, preparing writes; but --out goes before.
    again = run(capsys, "text", str(folder), "--read.prepared", str(out))
    assert (again["manifest"], again["made"], again["next"]) == (str(out), 0, found["next"])
    other = tmp_path / "other.jsonl"
    assert run(capsys, "text", str(folder), "--read.prepared", str(out), "--out", str(other))["manifest"] == str(other)
    assert run(capsys, "text", str(folder))["next"] == f"hnclip train --objective structxlip --data {folder}"


def test_a_home_directory_is_found(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run(capsys, "text", str(folder), "--out=~/mine.jsonl")["manifest"] == str(tmp_path / "mine.jsonl")
    assert (tmp_path / "mine.jsonl").exists()


def test_without_a_name_the_work_of_others_is_kept(
    folder: Path, model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Felzenszwalb, "__call__", lambda self, image: [])  # which takes its time
    run(capsys, *regions(folder, model_directory, "--proposer", "grid"))
    (folder / "1.txt").write_text("A car. A tree.\n", encoding="utf-8")  # its regions are stale, and made by anyone
    found = run(capsys, *regions(folder, model_directory))
    assert (found["made"], found["kept"]) == (1, PICTURES - 1)
    note = f"regions of {PICTURES - 1} records by grid are kept; name --proposer to make them again"
    assert found["note"].startswith(note)
    tools = read_manifest(Path(found["manifest"])).tools
    assert [tools[tool]["name"] for _, tool, _ in entries(found["manifest"]).values()].count("grid") == PICTURES - 1
    assert main(["prepare", *regions(folder, model_directory)]) == 0
    assert note in capsys.readouterr().err  # before the work begins
    named = run(capsys, *regions(folder, model_directory, "--proposer", "felzenszwalb+grid"))
    assert (named["made"], named["kept"]) == (PICTURES - 1, 1)
    assert f"regions of {PICTURES - 1} records by grid are replaced" in named["note"]

    run(capsys, "text", str(folder), "--filter", "blunt")
    text = run(capsys, "text", str(folder))
    assert (text["made"], text["kept"]) == (0, PICTURES)
    assert text["note"] == f"text of {PICTURES} records by blunt are kept; name --filter to make them again"
    assert run(capsys, "text", str(folder), "--filter", "lexicon")["made"] == PICTURES

    words = ["edges", str(folder), "--model", str(model_directory)]
    run(capsys, *words, "--method", "canny:50,150")
    edges = run(capsys, *words)
    assert (edges["made"], edges["kept"]) == (0, PICTURES)
    assert edges["note"] == f"edges of {PICTURES} records by canny:50,150 are kept; name --method to make them again"
    assert run(capsys, *words, "--method", "canny")["made"] == PICTURES
    assert run(capsys, *words)["note"] == ""


def test_scenes_keep_what_was_asked_for_by_name(model_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "regions", "scenes/park", "--model", str(model_directory), "--proposer", "grid")
    found = run(capsys, "regions", "scenes")
    assert (found["made"], found["kept"]) == (0, 8)
    assert "by grid are kept" in found["note"]
    assert run(capsys, "regions", "scenes", "--proposer", "truth")["made"] == 8


def test_maps_that_the_data_bring_along_are_left_to_them(
    folder: Path, model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = list(open_data(str(folder)).records)
    own = [replace(record, edges=records[0].image) for record in records]
    monkeypatch.setattr(work, "open_data", lambda source, read, splits: DataSet(source, tuple(own)))
    words = ["edges", str(folder), "--model", str(model_directory)]
    found = run(capsys, *words)
    assert (found["own"], found["made"], found["note"]) == (
        PICTURES,
        0,
        "name a --method to prepare others in their place",
    )
    assert not Path(found["manifest"]).exists()
    own[2] = records[2]
    some = run(capsys, *words)
    assert (some["own"], some["made"], some["counts"]) == (PICTURES - 1, 1, {"maps": 1})
    made, prepared = apply_manifest(own, Path(some["manifest"]))
    assert (prepared.own["edges"], prepared.found["edges"]) == (PICTURES - 1, 1)
    assert made[0].edges == own[0].edges
    assert run(capsys, *words, "--method", "canny")["made"] == PICTURES - 1


def test_no_regions_at_all_are_told(
    folder: Path, model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Grid, "__call__", lambda self, image: [])
    found = run(capsys, *regions(folder, model_directory, "--proposer", "grid"))
    assert found["counts"]["regions"] == 0
    assert "try another --model or --proposer" in found["note"]


def test_a_folder_called_scenes_is_a_folder(
    folder: Path, model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Felzenszwalb, "__call__", lambda self, image: [])  # which takes its time
    (folder.parent / "scenes").mkdir()
    folder.rename(folder.parent / "scenes" / "mine")
    monkeypatch.chdir(folder.parent)
    found = run(capsys, *regions(Path("scenes/mine"), model_directory, "--proposer", "auto"))
    assert (found["made"], found["tool"]["name"]) == (PICTURES, "felzenszwalb+grid")


def test_wrong_calls_are_answered(
    folder: Path, model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", "--help"]) == 0
    assert "regions      parts of the pictures" in capsys.readouterr().out
    assert main(["prepare", "sounds", "scenes/park"]) == 2
    assert "there is no kind 'sounds'" in capsys.readouterr().err
    out = tmp_path / "mine.jsonl"
    with open_writer(out, "mine"):
        assert main(["prepare", "regions", "scenes/park", "--out", str(out)]) == 1
    assert f"hnclip prepare: another process is writing {out}" in capsys.readouterr().err
    with out.open("ab") as file:
        file.write(b'{"kind": "reg\n')
    assert main(["prepare", "regions", "scenes/park", "--out", str(out)]) == 1
    assert f"line 2 of {out} is damaged" in capsys.readouterr().err
    for words, message in (
        (["regions", str(folder), "--proposer", "nobody"], "felzenszwalb+grid or truth"),
        (["regions", "scenes/park", "--weights", str(tmp_path)], "--weights are of no use"),
        (["regions", "scenes/park", "--proposer", "truth", "--weights", str(tmp_path)], "--weights are of no use"),
        (["regions", str(folder), "--out", str(tmp_path)], f"{tmp_path} is a directory: name the file"),
        (["text", str(folder), "--out", str(folder / "0.txt" / "m")], f"{folder / '0.txt'} is not a directory"),
        (["regions", str(folder), "--proposer", "truth"], f"{PICTURES} of {PICTURES} records"),
        (["regions", str(folder), "--out", str(folder / "0.txt")], "is not a manifest"),
        (["edges", str(folder), "--method", "nothing"], "no edge method is called 'nothing'"),
        (["text", str(folder), "--filter", "nothing"], "there is no filter 'nothing'"),
        (["text", str(folder), "--split", "test"], "no split 'test'"),
        (["text", str(tmp_path / "nowhere.csv")], "no such file"),
    ):
        assert main(["prepare", *words]) == 1
        assert message in capsys.readouterr().err
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}.lock"))
    with pytest.raises(SystemExit, match="2"):
        main(["prepare", "regions", str(folder), "--batch", "0"])
    assert "--batch must be at least 1" in capsys.readouterr().err
