"""Answers to questions, computed: several searches share an encoder's batch and a scan of the vectors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import numpy as np
import torch

from hnclip.data.batching import pad_texts
from hnclip.search.description import read_description
from hnclip.search.engines.exact import score_rows
from hnclip.search.explain import explain
from hnclip.search.find import CaptionHit, Finder, Hit
from hnclip.search.index.layout import Kind
from hnclip.search.index.reader import Item
from hnclip.search.rerank import rerank
from hnclip.search.serve.failures import Refused
from hnclip.search.serve.questions import Explain, Search, Separate
from hnclip.search.serve.schema import (
    CaptionResult,
    Explanation,
    Result,
    SearchAnswer,
    SeparateAnswer,
    Separator,
    TwinCaption,
    TwinGroup,
    Word,
)
from hnclip.search.twins import separators, twin_groups

RERANKED = 100  # pictures that are put into another order
PICTURES = 20  # of a caption's that are shown


def answer_searches(finder: Finder, searches: Sequence[Search]) -> list[SearchAnswer | Exception]:
    """The answer to each search, or why it has none; one that fails does not disturb the others."""
    answers: list[SearchAnswer | Exception] = [Refused(500) for _ in searches]
    vectors, cut = _encode(finder, searches, answers)
    together: dict[tuple[Kind, int], list[int]] = {}
    for number in vectors:
        search = searches[number]
        most = max(search.k, RERANKED) if search.rerank else search.k
        together.setdefault((search.find, most), []).append(number)
    # What an approximate engine finds depends on how much it is asked for: others' k must not change an answer.
    for (find, most), chosen in together.items():
        with _failing(answers, chosen):
            _find(finder, searches, find, most, chosen, vectors, cut, answers)
    return answers


def answer_detail(finder: Finder, question: Explain | Separate) -> Explanation | SeparateAnswer:
    """
    Raises:
        Refused: there is no such picture any more.
    """
    if isinstance(question, Explain):
        return _explain(finder, question)
    items = [_item(finder, number) for number in question.ids]
    found = separators(finder, question.text, items) if _has_words(finder, question.text) else []
    return SeparateAnswer(separators=[Separator(word=one.word, scores=list(one.scores)) for one in found])


def _encode(
    finder: Finder, searches: Sequence[Search], answers: list[SearchAnswer | Exception]
) -> tuple[dict[int, np.ndarray], dict[int, bool]]:
    """Vectors [D] of searches by number, and whether their text was cut; errors go to the answers."""
    texts: dict[int, np.ndarray] = {}
    cut: dict[int, bool] = {}
    for number, search in enumerate(searches):
        if search.text is not None:
            try:
                read = finder.model.text_transform([search.text])  # one by one: only this one is at fault
            except ValueError:  # there is no word in it, so there is nothing to find
                seconds = perf_counter() - search.asked
                answers[number] = SearchAnswer(results=[], captions=[], groups=[], cut=False, seconds=seconds)
            else:
                texts[number], cut[number] = read[0], read.truncated > 0
    pixels = {number: search.pixels for number, search in enumerate(searches) if search.pixels is not None}
    model, found = finder.model, dict[int, np.ndarray]()
    with torch.no_grad():
        if texts:
            with _failing(answers, texts):
                batch = pad_texts(list(texts.values()), model.text_transform.pad).to(model.device)
                vectors = model.encode_texts(batch).vectors.float().cpu().numpy()  # [T, D]
                found.update(zip(texts, vectors))
        if pixels:
            with _failing(answers, pixels):
                together = torch.stack(list(pixels.values())).to(model.device)  # [P, 3, H, W]
                vectors = model.encode_images(together).vectors.float().cpu().numpy()  # [P, D]
                found.update(zip(pixels, vectors))
    return found, cut


@contextmanager
def _failing(answers: list[SearchAnswer | Exception], numbers: Iterable[int]) -> Iterator[None]:
    """What goes wrong here is the answer to these searches, and to no others."""
    try:
        yield
    except Exception as error:
        for number in numbers:
            answers[number] = error


def _find(
    finder: Finder,
    searches: Sequence[Search],
    find: Kind,
    most: int,
    chosen: Sequence[int],
    vectors: dict[int, np.ndarray],
    cut: dict[int, bool],
    answers: list[SearchAnswer | Exception],
) -> None:
    queries = np.stack([vectors[number] for number in chosen])  # [Q, D]
    images = finder.images(queries, most) if find == "images" else [[] for _ in chosen]
    captions = finder.captions(queries, most) if find == "captions" else [[] for _ in chosen]
    for number, query, pictures, texts in zip(chosen, queries, images, captions):
        search = searches[number]
        with _failing(answers, [number]):
            made = _pictures(finder, search, pictures) if find == "images" else _captions(finder, search, query, texts)
            answers[number] = made.model_copy(
                update={"cut": cut.get(number, False), "seconds": perf_counter() - search.asked}
            )


def _pictures(finder: Finder, search: Search, hits: list[Hit]) -> SearchAnswer:
    if search.rerank and search.text is not None and _has_words(finder, search.text):
        hits = rerank(finder, search.text, hits, most=RERANKED)
    hits = hits[: search.k]
    groups = twin_groups(finder, hits)
    group_of = {item.id: number for number, group in enumerate(groups) for item in group.items}
    return SearchAnswer(
        results=[_result(hit.item, hit.score, hit.tokens, group_of.get(hit.item.id)) for hit in hits],
        captions=[],
        groups=[
            TwinGroup(
                ids=[item.id for item in group.items],
                similarity=group.similarity,
                captions=[TwinCaption(id=said.item.id, pieces=list(said.passage)) for said in group.captions],
            )
            for group in groups
        ],
        cut=False,
        seconds=0.0,
    )


def _captions(finder: Finder, search: Search, query: np.ndarray, hits: list[CaptionHit]) -> SearchAnswer:
    hits = hits[: search.k]
    items = {item.row for hit in hits for item in hit.caption.items[:PICTURES]}
    rows = torch.tensor(sorted(items), dtype=torch.int64)  # [n]
    scores = score_rows(finder.galleries["images"].vectors, torch.from_numpy(query), rows)  # [n]
    score_of = dict(zip(rows.tolist(), scores.tolist()))
    return SearchAnswer(
        results=[],
        captions=[
            CaptionResult(
                text=hit.caption.text,
                score=hit.score,
                pictures=[_result(item, score_of[item.row]) for item in hit.caption.items[:PICTURES]],
            )
            for hit in hits
        ],
        groups=[],
        cut=False,
        seconds=0.0,
    )


def _explain(finder: Finder, question: Explain) -> Explanation:
    item = _item(finder, question.id)
    if not _has_words(finder, question.text):
        return Explanation(id=item.id, text="", words=[], rows=0, columns=0, box=(0, 0, 1, 1), approximate=False)
    try:
        (found,) = explain(finder, question.text, [item])
    except ValueError as error:  # the model's patches have no place in a picture
        raise Refused(422, str(error)) from error
    return Explanation(
        id=item.id,
        text=found.text,
        words=[
            Word(text=word.text, start=word.start, stop=word.stop, score=word.score, patches=list(word.patches))
            for word in found.words
        ],
        rows=found.rows,
        columns=found.columns,
        box=found.box,
        approximate=found.approximate,
    )


def _has_words(finder: Finder, text: str) -> bool:
    """Whether there is something in a text that can be matched with patches."""
    try:
        read_description(finder.model, text)
    except ValueError:
        return False
    return True


def _item(finder: Finder, number: int) -> Item:
    item = finder.index.item(number)
    if item is None:
        raise Refused(404, f"there is no picture {number}")
    return item


def _result(item: Item, score: float, tokens: float | None = None, group: int | None = None) -> Result:
    return Result(
        id=item.id,
        name=item.name,
        score=score,
        tokens=tokens,
        captions=list(item.captions),
        width=item.shape[0],
        height=item.shape[1],
        group=group,
    )
