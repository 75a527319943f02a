"""Results of `hnclip index` and `hnclip search` as text for terminals and as JSON, the same as the server's."""

from __future__ import annotations

import re
import shlex
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hnclip.core import Problem
from hnclip.data.image_sources import FileImage
from hnclip.search.database import Kind
from hnclip.search.near_duplicates import CaptionHit, Hit, NearDuplicates
from hnclip.search.reader import IndexedImage, source_at
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
        index: path of the index; `root` is the directory that the places of its files are relative to, if any.
        engine: that searched; exact if all rows were scanned.
        query: the text, or the name of the image that was searched with; `kind` says which.
        total: images or captions that could be found.
        truncated: the text is longer than the model's context.
        hits: images, or none if captions were searched; `captions` the other way round.
        groups: of near-duplicates; shown as text if they have a separation.
        explanations: of the best hits, if asked for.
        notes: sentences for the user.
    """

    index: Path
    root: Path | None
    engine: str
    query: str
    kind: Literal["text", "image"]
    find: Kind
    total: int
    truncated: bool
    hits: tuple[Hit, ...]
    captions: tuple[CaptionHit, ...]
    groups: tuple[NearDuplicates, ...]
    explanations: tuple[Explanation, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def to_dict(self, *, paths: bool = True) -> dict[str, Any]:
        """
        Args:
            paths: with the paths of this machine, which the server does not give away.
        """
        groups = {place: number for number, group in enumerate(self.groups) for place in group.places}

        def image(hit: Hit, group: int | None = None) -> dict[str, Any]:
            file, source = hit.file, source_at(hit.file.place, self.root)
            path = source.key if isinstance(source, FileImage) else None
            return {
                "id": file.id,
                "name": file.name,
                **({"path": path} if paths else {}),
                "captions": list(file.captions),
                "width": file.width,
                "height": file.height,
                "score": hit.score,
                "token_score": hit.token_score,
                "group": group,
            }

        return {
            **({"index": str(self.index), self.kind: self.query} if paths else {}),
            "find": self.find,
            "engine": self.engine,
            "total": self.total,
            "truncated": self.truncated,
            "hits": [image(hit, groups.get(place)) for place, hit in enumerate(self.hits)],
            "captions": [
                {"text": hit.text, "score": hit.score, "group": groups.get(place), "images": [*map(image, hit.images)]}
                for place, hit in enumerate(self.captions)
            ],
            "groups": [group.to_dict() for group in self.groups],
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
        groups = {_letter(number): group for number, group in enumerate(self.groups) if group.separation}
        letters = {place: letter for letter, group in groups.items() for place in group.places}
        blocks = ["\n".join([*head, *(_note(note, width) for note in self.notes)])]
        blocks.append("\n".join(self._list(letters, width)))
        blocks += [self._explanation(explanation, width) for explanation in self.explanations]
        blocks += [_group(group, letter, width) for letter, group in groups.items()]
        return "\n\n".join(block for block in blocks if block)

    def _list(self, letters: dict[int, str], width: int) -> Iterator[str]:
        """Rank, group letter, score and name of each hit, and its caption."""
        found: tuple[Hit | CaptionHit, ...] = self.hits or self.captions
        column = max(map(len, letters.values()), default=0)
        reranked = any(hit.token_score is not None for hit in self.hits)
        if found:
            yield f"   #{' ' * column}   score{'  tokens' if reranked else ''}  {self.find.removesuffix('s')}"
        for place, hit in enumerate(found):
            head = f"{place + 1:4}{letters.get(place, ''):{column}}  {hit.score:6.3f}  "
            if isinstance(hit, CaptionHit):
                yield _wrap(_line(hit.text), width, head, most=3)
                more = f" and {len(hit.caption.files) - 1:,} more" if len(hit.caption.files) > 1 else ""
                yield f"{' ' * len(head)}of {self._place(hit.file)}{more}"
                continue
            if reranked:
                tokens = "" if hit.token_score is None else f"{hit.token_score:.3f}"
                head += f"{tokens:>6}  "
            yield head + self._place(hit.file)
            if hit.text:
                yield " " * len(head) + shorten(_line(hit.text), width - len(head))

    def _place(self, file: IndexedImage) -> str:
        """The path of a file, or its name if its image is not in a file."""
        source = source_at(file.place, self.root)
        return _line(file.name if source is None else source.key)

    def _explanation(self, explanation: Explanation, width: int) -> str:
        """Where the words that stand out match best."""
        rank = next(place for place, hit in enumerate(self.hits, 1) if hit.file == explanation.file)
        left, top, right, bottom = explanation.box
        share = (right - left) * (bottom - top)
        seen = "" if share > 0.99 else f" (the model sees {max(share, 0.01):.0%} of it, the middle)"
        best: dict[str, WordMatch] = {}  # content words, each once: the best patch is farthest above the mean one
        for word in sorted(explanation.words, key=lambda one: sum(one.patches) / len(one.patches) - one.score):
            if word.content:
                best.setdefault(comparison_key(word.text), word)
        words = [f"{word.text} {word.score:.2f} {_ninth(word, explanation)}" for word in list(best.values())[:NAMED]]
        head = f"Words that stand out in hit {rank}{seen}, and where they match best: "
        return _wrap(head + ("; ".join(words) or "none"), width)


def _note(note: str, width: int) -> str:
    """Commands on lines of their own stay as they are, to be copied."""
    first, *rest = note.split("\n")
    return "\n".join([_wrap(f"note: {first}", width), *rest])


def _ninth(word: WordMatch, explanation: Explanation) -> str:
    """The ninth of the upright image in which the middle of the best patch is."""
    row, column = divmod(word.patches.index(word.score), explanation.columns)
    left, top, right, bottom = explanation.box
    across = left + (column + 0.5) / explanation.columns * (right - left)
    down = top + (row + 0.5) / explanation.rows * (bottom - top)
    names = [("top", "", "bottom")[min(2, int(3 * down))], ("left", "", "right")[min(2, int(3 * across))]]
    return " ".join(filter(None, names)) or "centre"


def _group(group: NearDuplicates, letter: str, width: int) -> str:
    """Members of a group, the differing words of their captions, and the words of the query that separate them."""
    ranks = [str(place + 1) for place in group.places]
    similarity = f"{group.similarity:.4f}"
    more = "" if similarity == "1.0000" else " or more"
    head = f"Near-duplicates {letter}: hits {', '.join(ranks[:-1])} and {ranks[-1]}"
    lines = [_wrap(f"{head}; cosine with the first {similarity}{more}", width)]
    if len(group.captions) > 1:
        lines.append(_wrap("Words in [brackets] are in only one of their captions:", width, "  "))
        lines += [_wrap(_differences(words), width, f"{place + 1:6}  ") for place, words in group.captions.items()]
    if group.separation and group.separation.words:
        lines.append(_wrap("Words of the query that separate them, by their best patch:", width, "  "))
        rank_of = {file.id: rank for file, rank in zip(group.files, ranks)}
        rows = [[_line(word), *(f"{score:.3f}" for score in scores)] for word, scores in group.separation.words]
        table = text_table(["word", *(rank_of[one] for one in group.separation.ids)], rows)
        lines.append(textwrap.indent(table, "    "))
    return "\n".join(lines)


def _differences(passage: Passage) -> str:
    """Highlighted words in brackets, with a few words around them; "…" stands for the rest."""
    marked = [f"[{piece}]" if highlighted else piece.replace("[", "(") for piece, highlighted in passage]
    words = "".join(marked).split()
    near = {place + step for place, word in enumerate(words) if "[" in word for step in range(-AROUND, AROUND + 1)}
    shown = " ".join(word if place in near else "…" for place, word in enumerate(words))
    return re.sub("…( …)+", "…", shown).replace("] [", " ") if near else "(no such word)"


def _letter(number: int) -> str:
    """A to Z, then AA, AB and so on."""
    more, last = divmod(number, 26)
    return (_letter(more - 1) if more else "") + chr(ord("A") + last)


def _wrap(text: str, width: int, head: str = "", *, most: int | None = None) -> str:
    """Lines after a head, indented below its end."""
    indent = " " * (len(head) or 2)
    return textwrap.fill(
        text,
        width,
        initial_indent=head,
        subsequent_indent=indent,
        max_lines=most,
        placeholder=" …",
        break_on_hyphens=False,
    )


def _line(text: str) -> str:
    """On one line, without control characters that a terminal would obey."""
    return " ".join(shorten(text, max(1, len(text))).split())


@dataclass
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
    images: int = 0
    captions: int = 0
    added: int = 0
    updated: int = 0
    deleted: int = 0
    unchanged: int = 0
    encoded: int = 0
    encoded_captions: int = 0
    truncated: int = 0
    seconds: float = 0.0
    working: float = 0.0
    compacted: bool = False
    problems: tuple[Problem, ...] = ()

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
