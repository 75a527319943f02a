"""Results of `hnclip index` and `hnclip search` as text for terminals and as JSON, the same as the server's."""

from __future__ import annotations

import shlex
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hnclip.core import Problem
from hnclip.search.near_duplicates import CaptionHit, Group, Hit, Separation
from hnclip.util.tables import text_table
from hnclip.util.text import Passage, comparison_key, counted, shorten

if TYPE_CHECKING:
    from hnclip.search.explain import Explanation, WordMatch

NARROWEST, WIDEST = 40, 120  # columns
AROUND = 5  # words that are shown before and after a highlighted one
NAMED = 8  # words that are explained
SHOWN = 5  # problems that are shown


@dataclass(frozen=True)
class SearchResult:
    """The hits of a query, best first.

    Args:
        index: path of the index.
        engine: that searched; exact if all rows were scanned.
        query: the text, or the name of the image that was searched with; `kind` says which.
        total: images or captions that could be found.
        truncated: the text is longer than the model's context.
        hits: images, or none if captions were searched; `captions` the other way round.
        explained: with groups as text; and for a text that finds images, `separations` of the groups and `explanations`
            of the best hits.
        paths: of files that are images themselves, by their ids; `places` the best name of any file.
        notes: sentences for the user.
    """

    index: Path
    engine: str
    query: str
    kind: Literal["text", "image"]
    find: Literal["images", "captions"]
    total: int
    truncated: bool
    hits: tuple[Hit, ...]
    captions: tuple[CaptionHit, ...]
    groups: tuple[Group, ...]
    seconds: float
    paths: dict[int, str]
    explained: bool = False
    separations: tuple[Separation, ...] = ()
    explanations: tuple[Explanation, ...] = ()
    notes: tuple[str, ...] = ()
    places: dict[int, str] = field(default_factory=dict)

    def group_numbers(self) -> dict[int, int]:
        """The number of the group of each hit that is in one."""
        return {place: number for number, group in enumerate(self.groups) for place in group.places}

    def to_dict(self, *, paths: bool = True) -> dict[str, Any]:
        """
        Args:
            paths: with the paths of this machine, which the server does not give away.
        """
        numbers = self.group_numbers()

        def image(hit: Hit, group: int | None = None) -> dict[str, Any]:
            file = hit.file
            return {
                "id": file.id,
                "name": file.name,
                **({"path": self.paths.get(file.id)} if paths else {}),
                "captions": list(file.captions),
                "width": file.width,
                "height": file.height,
                "score": hit.score,
                "token_score": hit.token_score,
                "group": group,
            }

        separations = self.separations or (None,) * len(self.groups)
        return {
            **({"index": str(self.index), self.kind: self.query} if paths else {}),
            "find": self.find,
            "engine": self.engine,
            "total": self.total,
            "truncated": self.truncated,
            "hits": [image(hit, numbers.get(place)) for place, hit in enumerate(self.hits)],
            "captions": [
                {
                    "text": hit.caption.text,
                    "score": hit.score,
                    "group": numbers.get(place),
                    "images": [image(one) for one in hit.images],
                }
                for place, hit in enumerate(self.captions)
            ],
            "groups": [
                {**group.to_dict(), **(separation.to_dict() if separation else {})}
                for group, separation in zip(self.groups, separations)
            ],
            "explanations": [explanation.to_dict() for explanation in self.explanations],
            "notes": list(self.notes),
            "seconds": self.seconds,
        }

    def to_text(self) -> str:
        """Plain text, as wide as the terminal within limits."""
        width = min(WIDEST, max(NARROWEST, shutil.get_terminal_size().columns))
        count = len(self.hits) + len(self.captions)
        total = counted(self.total, self.find.removesuffix("s"))
        head = [f"{count:,} of {total} in {self.index}, best first"] if count else []
        blocks = ["\n".join([*head, *(_note(note, width) for note in self.notes)]), "\n".join(self._list(width))]
        blocks += [self._explanation(explanation, width) for explanation in self.explanations]
        if self.explained:
            separations = self.separations or (Separation(),) * len(self.groups)
            blocks += [_group(*pair, number, width) for number, pair in enumerate(zip(self.groups, separations))]
        return "\n\n".join(block for block in blocks if block)

    def _list(self, width: int) -> Iterator[str]:
        """Rank, group letter, score and name of each hit, and its caption."""
        numbers = self.group_numbers() if self.explained else {}
        letters = {place: _letter(number) for place, number in numbers.items()}
        column = max(map(len, letters.values()), default=0)
        reranked = any(hit.token_score is not None for hit in self.hits)
        if self.hits or self.captions:
            yield f"   #{' ' * column}   score{'  tokens' if reranked else ''}  {self.find.removesuffix('s')}"
        for place, hit in enumerate(self.hits):
            tokens = "" if not reranked else " " * 8 if hit.token_score is None else f"  {hit.token_score:6.3f}"
            head = f"{place + 1:4}{letters.get(place, ''):{column}}  {hit.score:6.3f}{tokens}  "
            yield head + _line(self.places[hit.file.id])
            if hit.file.captions:
                yield " " * len(head) + shorten(_line(hit.file.captions[0]), width - len(head))
        for place, found in enumerate(self.captions):
            head = f"{place + 1:4}{letters.get(place, ''):{column}}  {found.score:6.3f}  "
            yield _wrap(_line(found.caption.text), width, head, most=3)
            more = f" and {len(found.caption.files) - 1:,} more" if len(found.caption.files) > 1 else ""
            yield f"{' ' * len(head)}of {_line(self.places[found.caption.files[0].id])}{more}"

    def _explanation(self, explanation: Explanation, width: int) -> str:
        """Where the words that stand out match best."""
        rank = next(place for place, hit in enumerate(self.hits, 1) if hit.file == explanation.file)
        left, top, right, bottom = explanation.box
        share = (right - left) * (bottom - top)
        seen = "" if share > 0.99 else f" (the model sees {max(share, 0.01):.0%} of it, the middle)"
        shown = _standing_out(explanation.words)[:NAMED]
        words = [f"{word.text} {word.score:.2f} {_place(word, explanation)}" for word in shown]
        head = f"Words that stand out in hit {rank}{seen}, and where they match best: "
        return _wrap(head + ("; ".join(words) or "none"), width)


def _note(note: str, width: int) -> str:
    """Commands on lines of their own stay as they are, to be copied."""
    first, *rest = note.split("\n")
    return "\n".join([_wrap(f"note: {first}", width), *rest])


def _standing_out(words: tuple[WordMatch, ...]) -> list[WordMatch]:
    """Content words, each once, in the order of how far the best patch is above the mean one."""
    best: dict[str, WordMatch] = {}
    for word in sorted(words, key=lambda one: sum(one.patches) / len(one.patches) - one.score):
        if word.content:
            best.setdefault(comparison_key(word.text), word)
    return list(best.values())


def _place(word: WordMatch, explanation: Explanation) -> str:
    """The ninth of the upright image in which the middle of the best patch is."""
    row, column = divmod(word.patches.index(word.score), explanation.columns)
    left, top, right, bottom = explanation.box
    across = left + (column + 0.5) / explanation.columns * (right - left)
    down = top + (row + 0.5) / explanation.rows * (bottom - top)
    names = [("top", "", "bottom")[min(2, int(3 * down))], ("left", "", "right")[min(2, int(3 * across))]]
    return " ".join(filter(None, names)) or "centre"


def _group(group: Group, separation: Separation, number: int, width: int) -> str:
    """Members of a group, the differing words of their captions, and the words of the query that separate them."""
    ranks = [str(place + 1) for place in group.places]
    similarity = f"{group.similarity:.4f}"
    more = "" if similarity == "1.0000" else " or more"
    head = f"Near-duplicates {_letter(number)}: hits {', '.join(ranks[:-1])} and {ranks[-1]}"
    lines = [_wrap(f"{head}; cosine with the first {similarity}{more}", width)]
    if len(group.captions) > 1:
        lines.append(_wrap("Words in [brackets] are in only one of their captions:", width, "  "))
        lines += [
            _wrap(differences(passage) or "(no such word)", width, f"{place + 1:6}  ")
            for place, passage in group.captions.items()
        ]
    if separation.separators:
        lines.append(_wrap("Words of the query that separate them, by their best patch:", width, "  "))
        place_of = dict(zip((file.id for file in group.files), group.places))
        table = text_table(
            ["word", *(str(place_of[one] + 1) for one in separation.ids)],
            [[_line(one.word), *(f"{score:.3f}" for score in one.scores)] for one in separation.separators],
        )
        lines.append(textwrap.indent(table, "    "))
    return "\n".join(lines)


def differences(passage: Passage) -> str:
    """Highlighted words in brackets, with a few words around them; "…" stands for the rest."""
    words: list[tuple[str, bool]] = []
    joined = False
    for piece, highlighted in passage:
        parts = [f"[{piece}]"] if highlighted else piece.split()
        for number, word in enumerate(parts):
            if number == 0 and joined and not piece[:1].isspace() and words:  # punctuation stays with its word
                words[-1] = (words[-1][0] + word, words[-1][1] or highlighted)
            else:
                words.append((word, highlighted))
        joined = not piece[-1:].isspace()
    shown: list[str] = []
    for place, (word, _) in enumerate(words):
        if any(marked for _, marked in words[max(0, place - AROUND) : place + AROUND + 1]):
            shown.append(word)
        elif shown[-1:] != ["…"]:
            shown.append("…")
    return " ".join(shown).replace("] [", " ") if any(marked for _, marked in words) else ""


def _letter(number: int) -> str:
    """A to Z, then AA, AB and so on."""
    more, last = divmod(number, 26)
    return (_letter(more - 1) if more else "") + chr(ord("A") + last)


def _wrap(text: str, width: int, head: str = "", *, most: int | None = None) -> str:
    """Lines after a head, indented below its end."""
    return textwrap.fill(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * (len(head) or 2),
        max_lines=most,
        placeholder=" …",
        break_on_hyphens=False,
    )


def _line(text: str) -> str:
    """On one line, without control characters that a terminal would obey."""
    return " ".join(shorten(text, max(1, len(text))).split())


@dataclass(frozen=True)
class IndexResult:
    """What an update did, and what the index holds now.

    Args:
        images, captions: of the index.
        added, updated, deleted, unchanged: files; a file that was moved is one that was added and one that was deleted.
        encoded, encoded_captions: known content is not encoded again.
        truncated: encoded captions that are longer than the model's context.
        seconds: of the call; `working` without opening the data and the model.
        compacted: deleted rows were removed from the files.
        problems: what could not be indexed.
    """

    out: Path
    data: str
    model: str
    images: int
    captions: int
    added: int
    updated: int
    deleted: int
    unchanged: int
    encoded: int
    encoded_captions: int
    truncated: int
    seconds: float
    working: float
    compacted: bool
    problems: tuple[Problem, ...]

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "out": str(self.out), "problems": [asdict(problem) for problem in self.problems]}

    def to_text(self) -> str:
        names = ("added", "updated", "deleted", "unchanged")
        done = ", ".join(f"{getattr(self, name):,} {name}" for name in names if getattr(self, name)) or "nothing found"
        encoded = [counted(self.encoded, "image")] * bool(self.encoded)
        encoded += [counted(self.encoded_captions, "caption")] * bool(self.encoded_captions)
        rate = f", {self.encoded / self.working:,.0f} images/s" if self.encoded else ""
        lines = [
            f"{self.out}: {counted(self.images, 'image')}, {counted(self.captions, 'caption')}",
            f"files: {done}",
            f"encoded {' and '.join(encoded) or 'nothing'} in {self.working:.1f} s{rate}",
        ]
        lines += [f"{counted(self.truncated, 'caption')} truncated to the model's context"] * bool(self.truncated)
        lines += ["deleted rows were removed"] * self.compacted
        if self.problems:
            more = len(self.problems) - SHOWN
            lines.append(f"{counted(len(self.problems), 'problem')}:")
            lines += [f"  {problem.kind}: {_detail(problem)}" for problem in self.problems[:SHOWN]]
            lines += [f"  and {more:,} more; --json lists all"] * (more > 0)
        if self.images:
            place = shlex.quote(str(self.out))
            lines += ["next:", f'  hnclip search {place} "what the image shows, in as many words as you like"']
            lines += [f"  hnclip serve {place}"]
        return "\n".join(lines)


def _detail(problem: Problem) -> str:
    """Most details name the file."""
    named = problem.where in problem.detail
    return _line(problem.detail if named else f"{problem.where}: {problem.detail}")
