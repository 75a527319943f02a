"""An answer for a terminal: results, where words were seen, near-twins and what separates them."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hnclip.analysis.near_duplicates import STOP_WORDS, compared, shorten
from hnclip.report.document import Passage
from hnclip.util.tables import text_table
from hnclip.util.text import counted

if TYPE_CHECKING:
    from hnclip.search.answer import Answer, Separated
    from hnclip.search.explain import Explanation, WordMatch

NARROWEST, WIDEST = 40, 120  # columns
SHADES = "·░▒▓█"
CELLS = 8  # most of a heat map's side; larger grids are shown by the best patch of each cell
AROUND = 5  # words that are shown before and behind a highlighted one
NAMED = 10  # words of which is said where they were seen


def answer_text(answer: Answer) -> str:
    """Plain text, as wide as the terminal but no wider than people read."""
    width = min(WIDEST, max(NARROWEST, shutil.get_terminal_size().columns))
    count = len(answer.hits) + len(answer.captions)
    total = counted(answer.total, "picture" if answer.find == "images" else "caption")
    parts = [f"{count:,} of {total} in {answer.index}, nearest first"] if count else []
    parts += [_note(note, width) for note in answer.notes]
    blocks = ["\n".join(parts), "\n".join(_results(answer, width))]
    blocks += [_explanation(answer, explanation, width) for explanation in answer.explanations]
    blocks += [_twins(answer, twins, width) for twins in answer.twins]
    return "\n\n".join(block for block in blocks if block)


def _note(note: str, width: int) -> str:
    """A command on lines of its own stays as it is, to be copied."""
    first, *rest = note.split("\n")
    return "\n".join([_wrapped(f"note: {first}", width), *rest])


def _results(answer: Answer, width: int) -> Iterator[str]:
    """A result's rank, score and name, and below it what is said of it; the letter is that of its near-twins."""
    letters = {place: _letter(group) for place, group in answer.group_of().items()}
    column = max(map(len, letters.values()), default=0)
    re_ranked = any(hit.tokens is not None for hit in answer.hits)
    if answer.hits or answer.captions:
        tokens = "  tokens" if re_ranked else ""
        yield f"   #{' ' * column}   score{tokens}  {'picture' if answer.hits else 'caption'}"
    for place, hit in enumerate(answer.hits):
        tokens = "" if not re_ranked else f"{'':8}" if hit.tokens is None else f"  {hit.tokens:6.3f}"
        head = f"{place + 1:4}{letters.get(place, ''):{column}}  {hit.score:6.3f}{tokens}  "
        yield head + _line(answer.places[hit.item.id])
        if hit.item.captions:
            yield " " * len(head) + shorten(_line(hit.item.captions[0]), width - len(head))
    for place, found in enumerate(answer.captions):
        head = f"{place + 1:4}{letters.get(place, ''):{column}}  {found.score:6.3f}  "
        yield _wrapped(_line(found.caption.text), width, head, most=3)
        items = found.caption.items
        more = f" and {len(items) - 1:,} more" if len(items) > 1 else ""
        if items:
            yield f"{' ' * len(head)}of {_line(answer.places[items[0].id])}{more}"


def _explanation(answer: Answer, explanation: Explanation, width: int) -> str:
    """Heat maps of the words that stand out most, side by side, and where others were seen."""
    rank = next(place for place, hit in enumerate(answer.hits, 1) if hit.item == explanation.item)
    left, top, right, bottom = explanation.box
    share = (right - left) * (bottom - top)
    much = f"{share:.0%}" if share >= 0.01 else "less than 1%"
    seen = "" if share > 0.99 else f" (the model sees {much} of it, the middle)"
    words = _standing_out(explanation.words)
    shown: list[list[str]] = []
    taken = 2
    for word in words:
        lines = [_named(word), *_heat_map(word, explanation), _where(word, explanation)]
        column = max(map(len, lines))
        taken += column + 3
        if taken > width + 3:
            break
        shown.append([line.ljust(column) for line in lines])
    text = [_wrapped(f"Words that stand out in result {rank}{seen}:", width)]
    text += [("  " + "   ".join(row)).rstrip() for row in zip(*shown)]
    if others := [f"{word.text} {word.score:.2f} {_where(word, explanation)}" for word in words[len(shown) : NAMED]]:
        text.append(_wrapped(", ".join(others), width, "  also "))
    return "\n".join(text)


def _standing_out(words: Sequence[WordMatch]) -> list[WordMatch]:
    """Content words, each once, those first whose best patch is furthest above their mean one: a word that is as near
    to all patches says nothing about a place."""
    best: dict[str, WordMatch] = {}
    for word in sorted(words, key=_contrast, reverse=True):
        if compared(word.text) not in STOP_WORDS:
            best.setdefault(compared(word.text), word)
    return list(best.values())


def _contrast(word: WordMatch) -> float:
    return word.score - sum(word.patches) / len(word.patches)


def _named(word: WordMatch) -> str:
    return f"{shorten(word.text, 16)} {word.score:.2f}"


def _heat_map(word: WordMatch, explanation: Explanation) -> list[str]:
    """Two characters for each cell, which makes it about square; shades from the word's worst cell to its best."""
    height, width = min(CELLS, explanation.rows), min(CELLS, explanation.columns)
    cells = [[-1.0] * width for _ in range(height)]
    for place, score in enumerate(word.patches):
        row, column = divmod(place, explanation.columns)
        row, column = row * height // explanation.rows, column * width // explanation.columns
        cells[row][column] = max(cells[row][column], score)
    low, high = min(map(min, cells)), max(map(max, cells))
    step = (high - low) / len(SHADES) or 1.0

    def shade(score: float) -> str:
        return 2 * SHADES[min(len(SHADES) - 1, int((score - low) / step))]

    return ["".join(map(shade, row)) for row in cells]


def _where(word: WordMatch, explanation: Explanation) -> str:
    """The ninth of the upright picture that the middle of the best patch lies in."""
    row, column = divmod(word.patches.index(word.score), explanation.columns)
    left, top, right, bottom = explanation.box
    across = left + (column + 0.5) / explanation.columns * (right - left)
    down = top + (row + 0.5) / explanation.rows * (bottom - top)
    names = [("top", "", "bottom")[min(2, int(3 * down))], ("left", "", "right")[min(2, int(3 * across))]]
    return " ".join(filter(None, names)) or "centre"


def _twins(answer: Answer, twins: Separated, width: int) -> str:
    """A group: its members' captions around the words that they differ in, and which words of the query differ."""
    group = twins.group
    ranks = [str(place + 1) for place in group.places]
    letter = _letter(answer.group_of()[group.places[0]])
    together = f"{', '.join(ranks[:-1])} and {ranks[-1]}"
    similarity = f"{group.similarity:.4f}"
    more = "" if similarity == "1.0000" else " or more"
    lines = [_wrapped(f"Near-twins {letter}: results {together}; cosine with the first {similarity}{more}", width)]
    if len(group.captions) > 1:
        lines.append(_wrapped("Words in [brackets] are in one of their captions alone:", width, "  "))
        lines += [
            _wrapped(differences(said.passage) or "(no such word)", width, f"{said.place + 1:6}  ")
            for said in group.captions
        ]
    if twins.separators:
        lines.append(_wrapped("Words of the description that separate them, by their best patch:", width, "  "))
        table = text_table(
            ["word", *(str(place + 1) for place in twins.places)],
            [[_line(found.word), *(f"{score:.3f}" for score in found.scores)] for found in twins.separators],
        )
        lines.append(textwrap.indent(table, "    "))
    return "\n".join(lines)


def differences(passage: Passage) -> str:
    """Highlighted words in brackets with a few words around them; the rest of the text is left out."""
    words: list[tuple[str, bool]] = []
    glued = False
    for piece, highlighted in passage:
        marked = f"[{piece}]" if highlighted else piece
        for number, word in enumerate(marked.split() if not highlighted else [marked]):
            if number == 0 and glued and not piece[:1].isspace() and words:  # punctuation stays with its word
                words[-1] = (words[-1][0] + word, words[-1][1] or highlighted)
            else:
                words.append((word, highlighted))
        glued = not piece[-1:].isspace()
    near = [
        any(marked for _, marked in words[max(0, place - AROUND) : place + AROUND + 1]) for place in range(len(words))
    ]
    shown: list[str] = []
    for (word, _), close in zip(words, near):
        if close:
            shown.append(word)
        elif not shown or shown[-1] != "…":
            shown.append("…")
    return " ".join(shown).replace("] [", " ") if any(near) else ""


def _letter(group: int) -> str:
    """A to Z, then AA, AB and so on."""
    more, last = divmod(group, 26)
    return (_letter(more - 1) if more else "") + chr(ord("A") + last)


def _wrapped(text: str, width: int, head: str = "", *, most: int | None = None) -> str:
    """Lines behind a head and below its end."""
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
    """On one line, and nothing in it that a terminal would obey."""
    return " ".join(shorten(text, max(1, len(text))).split())
