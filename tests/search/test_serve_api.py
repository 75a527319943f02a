"""What the server answers: the same as the library, whoever asks at the same time."""

from __future__ import annotations

import io
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from serve_helpers import Served, ask, listening, make_index, model, records, served
from small_index import small_index

from hnclip.search.engines import Candidates
from hnclip.search.engines.open import make_engine
from hnclip.search.explain import explain
from hnclip.search.find import Finder
from hnclip.search.index.changes import Change
from hnclip.search.index.opening import open_writer
from hnclip.search.rerank import rerank
from hnclip.search.serve.answers import answer_searches
from hnclip.search.serve.questions import Search
from hnclip.search.twins import separators, twin_groups


@pytest.fixture(scope="module")
def park(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(make_index(tmp_path_factory.mktemp("api"))) as found:
        yield found


@pytest.fixture(scope="module")
def finder(park: Served) -> Finder:
    with park.service.keeper.borrow() as view:
        assert view.finder is not None
        return view.finder


def text_of(number: int) -> str:
    return records()[number].captions[0]


def test_pictures_are_found_by_a_description_as_the_library_finds_them(park: Served, finder: Finder) -> None:
    answer = park.client().post("/api/search", json={"text": text_of(3), "k": 5}).json()
    (hits,) = finder.images(finder.text_vectors([text_of(3)]), 5)
    assert [found["id"] for found in answer["results"]] == [hit.item.id for hit in hits]
    assert [found["score"] for found in answer["results"]] == pytest.approx([hit.score for hit in hits], abs=1e-5)
    first = answer["results"][0]
    assert first["captions"] == list(hits[0].item.captions)
    assert (first["width"], first["height"], first["name"]) == (*hits[0].item.shape, hits[0].item.name)
    assert answer["cut"] is False
    assert answer["captions"] == []
    assert len(park.client().post("/api/search", json={"text": "x", "k": 5.0}).json()["results"]) == 5
    assert all(found["tokens"] is None for found in answer["results"])


def test_near_twins_are_named_with_what_their_captions_differ_in(park: Served, finder: Finder) -> None:
    answer = park.client().post("/api/search", json={"text": text_of(0), "k": 12}).json()
    (hits,) = finder.images(finder.text_vectors([text_of(0)]), 12)
    groups = twin_groups(finder, hits)
    assert groups  # scenes come in families
    assert [group["ids"] for group in answer["groups"]] == [[item.id for item in group.items] for group in groups]
    for number, group in enumerate(groups):
        members = {found["id"] for found in answer["results"] if found["group"] == number}
        assert members == {item.id for item in group.items}
        told = [(one["id"], [tuple(piece) for piece in one["pieces"]]) for one in answer["groups"][number]["captions"]]
        assert told == [(said.item.id, list(said.passage)) for said in group.captions]


def test_captions_are_found_with_their_pictures_and_the_pictures_own_scores(park: Served, finder: Finder) -> None:
    answer = park.client().post("/api/search", json={"text": text_of(2), "k": 4, "find": "captions"}).json()
    query = finder.text_vectors([text_of(2)])
    (hits,) = finder.captions(query, 4)
    assert [found["text"] for found in answer["captions"]] == [hit.caption.text for hit in hits]
    assert answer["captions"][0]["text"] == text_of(2)
    for found, hit in zip(answer["captions"], hits):
        rows = finder.index.vectors("images").rows(np.array([item.row for item in hit.caption.items]))  # [n, D]
        assert [shown["id"] for shown in found["pictures"]] == [item.id for item in hit.caption.items]
        assert [shown["score"] for shown in found["pictures"]] == pytest.approx(list(rows @ query[0]), abs=1e-5)
    assert answer["results"] == []


def test_a_picture_finds_itself(park: Served) -> None:
    content = (park.service.options.index.parent / "pictures").glob("*.png")
    for path in sorted(content)[:3]:
        answer = park.client().post(
            "/api/search/image?k=2", content=path.read_bytes(), headers={"content-type": "image/png"}
        )
        assert answer.json()["results"][0]["name"] == path.name
        assert answer.json()["results"][0]["score"] == pytest.approx(1, abs=0.01)
        captions = park.client().post(
            "/api/search/image?k=1&find=captions", content=path.read_bytes(), headers={"content-type": "image/png"}
        )
        assert len(captions.json()["captions"]) == 1


def test_re_ranked_results_are_those_of_the_library(park: Served, finder: Finder) -> None:
    text = text_of(5)
    answer = park.client().post("/api/search", json={"text": text, "k": 6, "rerank": True}).json()
    (hits,) = finder.images(finder.text_vectors([text]), 100)
    wanted = rerank(finder, text, hits)[:6]
    assert [found["id"] for found in answer["results"]] == [hit.item.id for hit in wanted]
    assert [found["tokens"] for found in answer["results"]] == pytest.approx([hit.tokens for hit in wanted], abs=1e-5)
    captions = park.client().post("/api/search", json={"text": text, "rerank": True, "find": "captions", "k": 3})
    assert len(captions.json()["captions"]) == 3  # are not re-ranked


def test_explanations_and_separators_are_those_of_the_library(park: Served, finder: Finder) -> None:
    items = [finder.index.item(number) for number in (1, 2)]
    assert items[0] is not None
    assert items[1] is not None
    found = park.client().post("/api/explain", json={"text": text_of(0), "id": 1}).json()
    (wanted,) = explain(finder, text_of(0), [items[0]])
    assert (found["id"], found["text"], found["rows"], found["columns"]) == (
        1,
        wanted.text,
        wanted.rows,
        wanted.columns,
    )
    assert [word["text"] for word in found["words"]] == [word.text for word in wanted.words]
    assert found["words"][4]["patches"] == pytest.approx(list(wanted.words[4].patches), abs=1e-5)
    assert found["box"] == pytest.approx(list(wanted.box))
    told = park.client().post("/api/separate", json={"text": text_of(0), "ids": [1, 2]}).json()["separators"]
    assert [one["word"] for one in told] == [one.word for one in separators(finder, text_of(0), [items[0], items[1]])]


def test_searches_that_are_answered_together_get_what_each_gets_alone(finder: Finder) -> None:
    picture = records()[1].image.load()
    pixels = finder.model.preprocess_images([picture])[0]
    searches = [
        Search(k=3, find="images", text=text_of(0)),
        Search(k=7, find="captions", text="a red tent"),
        Search(k=2, find="images", text="\u0000"),  # no word
        Search(k=1, find="images", pixels=pixels),
        Search(k=9, find="images", text="word " * 400),
        Search(k=2, find="captions", pixels=pixels),
    ]
    together = answer_searches(finder, searches)
    assert not isinstance(together[2], Exception)
    assert together[2].results == []
    for number in (0, 1, 3, 4, 5):
        (alone,) = answer_searches(finder, [searches[number]])
        both = together[number]
        assert not isinstance(alone, Exception)
        assert not isinstance(both, Exception)
        assert [found.id for found in both.results] == [found.id for found in alone.results]
        assert [found.text for found in both.captions] == [found.text for found in alone.captions]
        assert len(both.results) + len(both.captions) == searches[number].k
        assert both.cut == (number == 4)


def test_what_fails_for_some_searches_does_not_fail_for_others(finder: Finder, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = finder.model.preprocess_images([records()[1].image.load()])[0]
    searches = [
        Search(k=2, find="images", text=text_of(0)),
        Search(k=2, find="captions", text=text_of(0)),
        Search(k=2, find="images", pixels=pixels),
    ]

    def failed(name: str, of: object) -> list[int]:
        def fails(*given: object) -> None:
            raise RuntimeError(name)

        with monkeypatch.context() as broken:
            broken.setattr(of, name, fails)
            answers = answer_searches(finder, searches)
        assert all(str(answer) == name for answer in answers if isinstance(answer, Exception))
        return [number for number, answer in enumerate(answers) if isinstance(answer, Exception)]

    assert failed("captions", finder) == [1]
    assert failed("images", finder) == [0, 2]
    assert failed("encode_texts", finder.model) == [0, 1]
    assert failed("encode_images", finder.model) == [2]


class FirstRows(Candidates):
    """An engine that takes the first rows for the nearest."""

    covered = 16

    def propose(self, queries: np.ndarray, count: int) -> np.ndarray:
        return np.tile(np.arange(count), (len(queries), 1))


def test_an_approximate_answer_does_not_depend_on_who_else_asks(park: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hnclip.search.engines.gallery.LEAST", 1)
    monkeypatch.setattr("hnclip.search.find.open_candidates", lambda *_: FirstRows())
    with park.service.keeper.borrow() as view:
        searches = [Search(k=k, find="images", text=text_of(15)) for k in (4, 1, 4, 2)]
        finder = Finder(view.index, model())
        together = answer_searches(finder, searches)
        alone = [answer_searches(finder, [search])[0] for search in searches]
    found = [[result.id for result in answer.results] for answer in together]  # type: ignore[union-attr]
    assert found == [[result.id for result in answer.results] for answer in alone]  # type: ignore[union-attr]
    assert found[0][:1] != found[1]  # who asks for more finds a better one


def test_without_a_word_there_is_nothing_to_find(park: Served) -> None:
    client = park.client()
    assert client.post("/api/search", json={"text": "\u0000"}).json()["results"] == []
    assert client.post("/api/explain", json={"text": "?!", "id": 1}).json()["words"] == []
    assert client.post("/api/separate", json={"text": "?!", "ids": [1, 2]}).json()["separators"] == []
    assert len(client.post("/api/search", json={"text": "?!", "rerank": True, "k": 2}).json()["results"]) == 2


def test_what_cannot_be_answered_says_why(park: Served) -> None:
    client = park.client()
    for path, asked, status, part in [
        ("/api/search", {"text": "x" * 20_001}, 422, "20,000"),
        ("/api/search", {"text": "x", "k": 201}, 422, "at most 200"),
        ("/api/search", {"text": "x", "k": 0}, 422, "k:"),
        ("/api/search", {"text": "x", "k": "5"}, 422, "k:"),
        ("/api/search", {"text": "x", "k": 5.5}, 422, "k:"),
        ("/api/search", {"text": "x", "k": True}, 422, "k:"),
        ("/api/search", {"text": "x", "k": 1e300}, 422, "k:"),
        ("/api/search", {"text": ""}, 422, "text:"),
        ("/api/search", {}, 422, "text:"),
        ("/api/search", {"text": "x", "limit": 3}, 422, "limit:"),
        ("/api/search", [], 422, "body:"),
        ("/api/explain", {"text": "a tent", "id": 10**6}, 404, "no picture"),
        ("/api/explain", {"text": "a tent", "id": 2**53}, 422, "id:"),
        ("/api/separate", {"text": "a tent", "ids": [1, 10**6]}, 404, "no picture"),
        ("/api/separate", {"text": "a tent", "ids": [1]}, 422, "ids:"),
    ]:
        answer = client.post(path, json=asked)
        assert (answer.status_code, part in answer.json()["error"]) == (status, True), (path, asked, answer.text)
        assert list(answer.json()) == ["error"]


def test_long_words_are_read_in_no_time(park: Served) -> None:
    for text in ("x" * 10_000, "ß" * 20_000, "&amp;" * 4000, "🦊" * 10_000):
        answer = park.client().post("/api/search", json={"text": text, "k": 1})
        assert answer.status_code == 200
        assert answer.json()["seconds"] < 5


def test_pictures_and_thumbnails_are_given_out_and_known_again(park: Served) -> None:
    client = park.client()
    whole = client.get("/api/pictures/1")
    assert whole.headers["content-type"] == "image/png"
    with park.service.keeper.borrow() as view:
        item = view.index.item(1)
        assert item is not None
    assert whole.content == (park.service.options.index.parent / "pictures" / item.name).read_bytes()
    small = client.get("/api/pictures/1/thumbnail")
    assert small.headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(small.content)).format == "JPEG"
    for answer in (whole, small, client.get("/")):
        again = client.get(answer.request.url.path, headers={"if-none-match": f'"other", W/{answer.headers["etag"]}'})
        assert (again.status_code, again.content) == (304, b"")
        head = client.head(answer.request.url.path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(answer.content))


def test_the_index_is_described(park: Served) -> None:
    info = park.client().get("/api/index").json()
    assert (info["name"], info["pictures"], info["captions"]) == ("park", len(records()), len(records()))
    assert info["limits"] == {"k": 200, "text": 20_000, "upload": 20_000_000, "pixels": 50_000_000}
    assert info["ready"] is True
    assert info["model"] == model().source
    assert park.client().get("/healthz").json() == {"ready": True}


def test_the_engine_that_searches_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "park.hnc"
    small_index(path, model(), records()[:4], engine="faiss-hnsw")
    monkeypatch.setattr("hnclip.search.engines.open.FEW", 4)
    with served(path) as found:
        assert found.client().get("/api/index").json()["engine"] == "exact"  # its own is not made yet
        with open_writer(path, None) as writer:
            make_engine(writer, "faiss-hnsw")
        found.service.keeper.look()
        assert found.client().get("/api/index").json()["engine"] == "faiss-hnsw"


def test_a_version_that_cannot_be_searched_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engines too: of some, a file that is not closed can be opened by nobody else."""
    with served(make_index(tmp_path, 3)) as found:
        make_index(tmp_path, 4)
        closed: list[int] = []

        def fails(finder: Finder, searches: object) -> None:
            raise OSError("no answer")

        with monkeypatch.context() as broken:
            broken.setattr("hnclip.search.serve.answers.answer_searches", fails)
            broken.setattr(Finder, "close", lambda self: closed.append(self.index.count()))
            found.service.keeper.look()
        assert closed == [4]
        assert found.client().get("/api/index").json()["pictures"] == 3


def test_before_the_model_is_there_all_but_searches_is_answered(tmp_path: Path) -> None:
    with served(make_index(tmp_path, 3), loaded=False, timeout=0.3) as found:
        client = found.client()
        assert client.get("/healthz").json() == {"ready": False}
        assert client.get("/api/index").json()["ready"] is False
        assert client.get("/api/pictures/1/thumbnail").status_code == 200
        png = (tmp_path / "pictures").glob("*.png").__next__().read_bytes()
        for answer in (
            client.post("/api/search", json={"text": "a tent"}),
            client.post("/api/search/image", content=png, headers={"content-type": "image/png"}),
        ):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert "loaded" in answer.json()["error"]


def test_a_newer_version_takes_over_and_who_uses_the_old_one_may_finish(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_index(tmp_path, 4)
    with served(path) as found:
        keeper, client = found.service.keeper, found.client()
        keeper.look()
        with keeper.borrow() as old:
            make_index(tmp_path, 9)
            keeper.look()
            assert old.index.count() == 4  # still open
            assert client.get("/api/index").json()["pictures"] == 9
            with keeper.borrow() as new:
                assert new is not old
        with pytest.raises(ValueError):  # closed with its last user
            old.index.count()
        answer = client.post("/api/search", json={"text": records()[8].captions[0], "k": 20}).json()
        assert len(answer["results"]) == 9
        with open_writer(path, new.index.about) as writer:
            writer.commit(Change(gone=[answer["results"][0]["name"]]))
        keeper.look()
        gone = answer["results"][0]["id"]
        assert client.get(f"/api/pictures/{gone}/thumbnail").status_code == 404
        assert len(client.post("/api/search", json={"text": "a tent", "k": 20}).json()["results"]) == 8
        assert caplog.messages == []


def test_a_broken_index_does_not_end_the_service_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_index(tmp_path, 4)
    with served(path) as found:
        keeper, client = found.service.keeper, found.client()
        shutil.move(path, tmp_path / "elsewhere")
        for _ in range(4):
            keeper.look()
        assert len(caplog.messages) == 1
        assert caplog.records[0].levelname == "WARNING"
        assert "does not exist" in caplog.messages[0]
        assert len(client.post("/api/search", json={"text": "a tent"}).json()["results"]) == 4
        assert client.get("/api/pictures/1/thumbnail").status_code == 200
        shutil.move(tmp_path / "elsewhere", path)
        make_index(tmp_path, 6)
        keeper.look()
        assert client.get("/api/index").json()["pictures"] == 6
        assert len(caplog.messages) == 1


def test_whatever_is_wrong_with_an_index_is_told_and_the_keeper_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with served(make_index(tmp_path, 3)) as found:
        keeper = found.service.keeper
        make_index(tmp_path, 4)
        with monkeypatch.context() as broken:
            broken.setattr("hnclip.search.serve.keeper.View", lambda index: 1 / 0 if index else None)
            for _ in range(3):
                keeper.look()
        with monkeypatch.context() as broken:
            broken.setattr("hnclip.search.serve.keeper._engines", lambda index: next(iter(())))
            for _ in range(3):
                keeper.look()
        assert [said.rpartition(": ")[2] for said in caplog.messages] == ["division by zero", "StopIteration"]
        assert found.client().get("/api/index").json()["pictures"] == 3
        keeper.look()
        assert found.client().get("/api/index").json()["pictures"] == 4


def test_a_version_whose_first_search_fails_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(make_index(tmp_path, 3)) as found:
        make_index(tmp_path, 4)
        closed: list[int] = []
        close = Finder.close

        def fails(*given: object) -> None:
            raise KeyError("no twins")

        def counted(finder: Finder) -> None:
            closed.append(finder.index.count())
            close(finder)

        monkeypatch.setattr(Finder, "close", counted)
        with monkeypatch.context() as broken:
            broken.setattr("hnclip.search.serve.answers.twin_groups", fails)
            found.service.keeper.look()
        assert closed == [4]
        client = found.client()
        assert client.get("/api/index").json()["pictures"] == 3
        assert len(client.post("/api/search", json={"text": "a tent"}).json()["results"]) == 3


def test_searches_while_the_index_changes_all_succeed(tmp_path: Path) -> None:
    path = make_index(tmp_path, 3)
    with listening(path, waiting=64) as (port, service):
        stop = threading.Event()

        def search(number: int) -> set[int]:
            statuses = set()
            while not stop.is_set():
                asked = {"text": text_of(number), "k": 20, "find": ("images", "captions")[number % 2]}
                statuses.add(ask(port, "/api/search", asked)[0])
                statuses.add(ask(port, "/api/index")[0])
            return statuses

        with ThreadPoolExecutor(3) as pool:
            asking = [pool.submit(search, number) for number in range(3)]
            for count in (5, 8, 12):
                make_index(tmp_path, count)
                service.keeper.look()
            stop.set()
            assert [future.result(60) for future in asking] == [{200}] * 3
        assert ask(port, "/api/index")[1]["pictures"] == 12
