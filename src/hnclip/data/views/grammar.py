"""Words dropped from a caption so that what is left still reads: a little English grammar, without a parser.

A listed word goes where it describes ("a red car", "the car is red", "made of wood") and stays where it names a thing
("a glass of water", "the orange is ripe"). In doubt it stays: a colour too many does less harm than a broken sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


STOP_WORDS = _words("a an the and or but of in on at to with by for from is are was were it its this that there as")

_DETERMINERS = _words(
    "a an the this that these those its his her their our my your each every another some any no one both either"
)
_PRONOUNS = _words("it they he she we you i this these those that one both all some")
_RELATIVE = _words("which that who")
_AND = _words("and or")
_COPULAS = _words("is are was were")
_PREPOSITIONS = _words(
    "about above across against along alongside among around at atop before behind below beneath beside besides "
    "between beyond by down during for from in inside into like near next of off on onto out outside over past "
    "through throughout to toward towards under underneath until up upon via with within without"
)
_VERBS = _words(
    "has have had can could may might will would does do did be been being appear appears cast casts contain contains "
    "cover covers extend extends extending face faces facing fill fills go goes going hang hangs hanging has hold "
    "holds holding lead leads leading lean leans leaning lie lies lying look looks looking make makes meet meets read "
    "reads reading reflect reflects reflecting rest rests resting rise rises run runs running say says saying seem "
    "seems serve serves show shows showing sit sits sitting spell spells stand stands standing stretch stretches "
    "surround surrounds surrounding take takes turn turns wear wears wearing placed located positioned"
)
_NOUNS_TOO = _words(
    "cover covers face faces cast casts stand stands rest run runs show shows turn turns lead look looks"
)
_CONNECTIVES = _words(
    "but while as than because although though where when if so then also which who whose what however not too well "
    "again overall respectively apart almost everywhere there here only just together"
)
_NOT_A_NOUN = (_DETERMINERS | _AND | _COPULAS | _PREPOSITIONS | _VERBS - _NOUNS_TOO | _CONNECTIVES | _PRONOUNS) - {
    "one"
}
_CLAUSE = _DETERMINERS | _VERBS | _COPULAS | _PRONOUNS  # what begins a new clause after "and"

# What goes with a description right after it.
_INTENSIFIERS = _words(
    "dark darker light lighter bright brighter pale paler deep deeper medium vivid vibrant faint solid rich warm cool "
    "very mostly mainly primarily predominantly slightly partially partly completely entirely fully fairly rather "
    "quite nearly somewhat mixed"
)
_ING_NOUNS = _words("lettering writing clothing building lighting painting packaging wrapping ring string wing coating")
_BESIDE_COPULA = _words("also all both mostly either now still")
_MADE = _words("made built composed constructed crafted carved fashioned formed")
_PAINTED = _words("painted dyed tinted stained")
_NOT_BEFORE_OF = _words("consist consists consisting full instead because kind kinds type types sort lots lot one")
_STANDS_ALONE = _words(  # second parts of hyphenated words that need no first one: "white-striped"
    "striped spotted dotted checked checkered chequered patterned painted tiled framed paneled panelled trimmed lined "
    "covered capped tipped rimmed edged topped walled floored roofed"
)
_ADJECTIVES = _words(
    "big large small tall short long wide narrow thin thick round square flat old new young clean dirty dry wet tiny "
    "huge little oval plain simple ornate modern vintage antique rustic open closed empty clear cloudy sunny heavy "
    "fancy fresh leafy lush curly straight vertical horizontal high low bare single double faded shaggy"
)
_ADJECTIVE_END = re.compile(r".{2,}(ish|ular|ical|ous|ful|less|ed|ive|ental)$")
# Colours that are things as well; materials all are.
_THINGS = _words(
    "orange oranges olive peach plum cream coral copper gold silver amber apricot champagne charcoal chestnut emerald "
    "jade khaki lavender lilac mustard peach rust salmon sapphire whites greens browns caramel mahogany blonde blond"
)

_WORD = re.compile(r"\w+(?:['’]\w+)*")
_QUOTED = re.compile(r"\"[^\"\n]{1,200}\"|“[^”\n]{1,200}”")
_SENTENCE_STOP = re.compile(r"[.!?。\n]")
_VOWEL_SOUND = re.compile(
    r"(?!(?:uni(?!n|m)|us[aeiu]|ut[aeio]|eu|ewe|one\b|once\b|ur[aeio]n|ub[aeio]q))[aeiou]"
    r"|(?:hour|honest|honou?r|heir)|8|1[18](?!\d)|[fhlmnrsx](?![a-z])|[aeio](?![a-z])",
    re.IGNORECASE,
)

_SPELLED = frozenset(["SUV", "LED", "ATM", "UFO", "RAV", "AED"])
_LETTERS = re.compile(r"[A-Z][B-DF-HJ-NP-TV-Z]{1,4}s?\d*")


class Entries:
    """Word lists by their first words, for finding the longest entry at a place."""

    def __init__(self, lists: Mapping[str, Sequence[str]]) -> None:
        self._by_first: dict[str, list[tuple[tuple[str, ...], str]]] = {}
        for category, entries in lists.items():
            for entry in entries:
                parts = tuple(re.split(r"[\s-]+", entry))
                self._by_first.setdefault(parts[0], []).append((parts, category))
        for found in self._by_first.values():
            found.sort(key=lambda item: len(item[0]), reverse=True)

    def at(self, text: _Text, place: int) -> tuple[int, str] | None:
        """How many words the longest entry has that begins with this word, and its category."""
        for parts, category in self._by_first.get(text.low[place], ()):
            stop = place + len(parts)
            if tuple(text.low[place:stop]) == parts and all(text.joined(inner) for inner in range(place + 1, stop)):
                return len(parts), category
        return None


class _Text:
    """A caption as words with gaps: `gaps[i]` stands before word i, the last gap after the last word."""

    def __init__(self, text: str) -> None:
        found = list(_WORD.finditer(text))
        self.words = [match[0] for match in found]
        self.low = [word.lower() for word in self.words]
        stops = [0, *(match.end() for match in found)]
        starts = [*(match.start() for match in found), len(text)]
        self.gaps = [text[stop:start] for stop, start in zip(stops, starts)]
        quotes = [match.span() for match in _QUOTED.finditer(text)]
        self.quoted = _inside([match.start() for match in found], quotes)
        self.all_capitals = text.isupper()

    def word(self, place: int) -> str:
        """The word at a place in small letters; "" beyond either end."""
        return self.low[place] if 0 <= place < len(self.low) else ""

    def spaced(self, place: int) -> bool:
        """Whether nothing but white space stands before this word, and a word before that."""
        return 0 < place < len(self.low) and self.gaps[place].isspace() and "\n" not in self.gaps[place]

    def hyphened(self, place: int) -> bool:
        return 0 < place < len(self.low) and self.gaps[place] in ("-", "‑", "–")

    def joined(self, place: int) -> bool:
        return self.spaced(place) or self.hyphened(place)

    def after(self, place: int) -> str:
        """The word that follows with nothing but white space before it; "" if there is none."""
        return self.low[place] if self.spaced(place) else ""

    def starts_sentence(self, place: int) -> bool:
        return place == 0 or _SENTENCE_STOP.search(self.gaps[place]) is not None

    def is_name(self, place: int, stop: int) -> bool:
        """Whether these words are part of a name: capitals, and beside another capital."""
        if self.all_capitals or not self.words[place][0].isupper():
            return False
        after = self.spaced(stop) and self.words[stop][0].isupper()
        before = self.spaced(place) and self.words[place - 1][0].isupper() and self.low[place - 1] not in STOP_WORDS
        return after or before

    def is_noun(self, place: int) -> bool:
        """Whether the word after a description may be what it describes."""
        if 0 < place < len(self.low) and self.gaps[place].strip() in ('"', "“") and self.gaps[place][0].isspace():
            return True  # a white "NO PARKING" sign
        word = self.after(place) or (self.low[place] if self.hyphened(place) else "")
        if not word or word in _NOT_A_NOUN or word in _BESIDE_COPULA:
            return False
        # "the glass filled with water", but "the brick walled garden"
        return not (word.endswith("ed") and self.after(place + 1) in _PREPOSITIONS)

    def is_adjective(self, place: int) -> bool:
        word = self.word(place)
        return word in _ADJECTIVES or self.hyphened(place + 1) or _ADJECTIVE_END.match(word) is not None


@dataclass
class _Cut:
    """Words to drop, gaps that become a space, articles to mend."""

    words: set[int] = field(default_factory=set)
    gaps: set[int] = field(default_factory=set)

    def add(self, start: int, stop: int) -> None:
        self.words.update(range(start, stop))


@dataclass(frozen=True)
class _Run:
    """Listed words that belong together, [start, stop): "dark red", "red, white and blue". The last entry begins at
    `last`; `things` says whether all of them can be things, `colours` whether all are colours."""

    start: int
    stop: int
    last: int
    things: bool
    colours: bool


def drop_words(caption: str, entries: Entries) -> str:
    """The caption without those listed words that can go."""
    text = _Text(caption)
    cut = _Cut()
    for run in _runs(text, entries):
        _decide(text, _widened(text, run), cut)
    return _rebuilt(text, cut) if cut.words else caption


def _runs(text: _Text, entries: Entries) -> Iterator[_Run]:
    run: _Run | None = None
    place = 0
    while place < len(text.words):
        found = None if text.quoted[place] else entries.at(text, place)
        if found is None or text.is_name(place, place + found[0]):
            place += 1
            continue
        stop = place + found[0]
        colour = found[1] == "colours"
        thing = found[1] == "materials" or any(word in _THINGS for word in text.low[place:stop])
        if run is not None and _connected(text, run, place):
            run = _Run(run.start, stop, place, run.things and thing, run.colours and colour)
        else:
            if run is not None:
                yield run
            run = _Run(place, stop, place, thing, colour)
        place = stop
    if run is not None:
        yield run


def _connected(text: _Text, run: _Run, place: int) -> bool:
    """Whether a listed word belongs to the run before it."""
    gap = text.gaps[run.stop].strip()
    if place == run.stop:
        if gap == "," and text.word(run.start - 1) in ("of", "in"):  # "made of wood, white cups"
            return False
        return text.joined(place) or gap in (",", "/", "&", "+")
    return place == run.stop + 1 and text.low[run.stop] in _AND and gap in ("", ",", "-") and text.joined(place)


def _widened(text: _Text, run: _Run) -> _Run | None:
    """The run with what cannot stand without it: parts of hyphenated words, shades, intensifiers. None where it must
    stay because it is the end of a compound."""
    start, stop = run.start, run.stop
    while text.hyphened(stop) and text.low[stop] not in _STANDS_ALONE and _is_participle(text.low[stop]):
        stop += 1
    while text.hyphened(start):
        if not run.colours:
            return None
        start -= 1
    while text.spaced(start) and text.low[start - 1] in _INTENSIFIERS:
        start -= 1
    if text.spaced(start) and text.low[start - 1] == "both" and "and" in text.low[start:stop]:
        start -= 1
    return _Run(start, stop, run.last, run.things, run.colours)


def _is_participle(word: str) -> bool:
    return word.endswith(("ed", "ing")) or word in (
        "like",
        "toned",
        "clad",
        "ish",
        "hued",
        "worn",
        "hair",
        "tone",
        "and",
    )


def _is_action(word: str) -> bool:
    """ "outlined in red pointing left", but "in red lettering"."""
    return word.endswith("ing") and word not in _ING_NOUNS


def _decide(text: _Text, run: _Run | None, cut: _Cut) -> None:
    """Drop a run if something good is left."""
    if run is None:
        return
    start, stop = run.start, run.stop
    if text.word(stop) == "one" and text.word(start - 1) in ("a", "an"):  # "a red one"
        return
    if text.is_noun(stop) and not (text.word(start - 1) == "in" and _is_action(text.word(stop))):
        _drop_description(text, start, stop, cut)
    elif text.gaps[stop].strip() == "," and text.is_adjective(stop) and text.word(start - 1) in _DETERMINERS:
        _drop_description(text, start, stop, cut)  # "a red, round ball"
        cut.gaps.add(stop)
    elif not _drop_predicate(text, start, stop, cut) and not _drop_phrase(text, start, stop, cut):
        before = text.word(start - 1) if text.spaced(start) else ""
        if before in _PAINTED:
            cut.add(start, stop)
        elif (
            not run.things
            and text.after(stop) in _AND
            and text.is_noun(stop + 1)
            and not text.low[stop + 1].endswith("ing")
            and (before in _DETERMINERS or text.is_adjective(stop + 1))
            and before not in _COPULAS
        ):
            cut.add(start, stop + 1)  # "a red and shiny ball"
        elif run.last > start and text.spaced(run.last) and text.low[run.last - 1] not in _AND:
            _drop_description(text, start, run.last, cut)  # "a red brick lies there"


def _drop_description(text: _Text, start: int, stop: int, cut: _Cut) -> None:
    """Drop what stands before a noun, and what joined it to another adjective."""
    cut.add(start, stop)
    if text.gaps[start].strip() == "," and start > 0 and text.is_adjective(start - 1):  # "a big, red ball"
        cut.gaps.add(start)
    elif (
        text.spaced(start)
        and text.low[start - 1] in _AND
        and text.spaced(start - 1)
        and text.is_adjective(start - 2)
        and start - 2 not in cut.words
    ):
        cut.add(start - 1, start)  # "a big and red ball"


def _copula_before(text: _Text, start: int) -> int | None:
    """Where the "is" of "is also …" stands, if it has a subject."""
    verb = start - 1
    while text.spaced(verb + 1) and text.word(verb) in _BESIDE_COPULA:
        verb -= 1
    return verb if text.word(verb) in _COPULAS and text.spaced(verb + 1) and text.spaced(verb) else None


def _drop_predicate(text: _Text, start: int, stop: int, cut: _Cut) -> bool:
    """Drop "is red" if a sentence is left: "The car is red and has" becomes "The car has"."""
    verb = _copula_before(text, start)
    if verb is None:
        return False
    subject = text.low[verb - 1]
    whose = text.word(verb - 2) if text.spaced(verb - 1) else ""
    if subject in ("there", "here") or (subject in _RELATIVE and whose in _PREPOSITIONS):  # "some of which are red"
        return False
    if text.after(stop) in _AND or text.after(stop) == "but":
        second = text.after(stop + 1)
        if second in _VERBS or second in _COPULAS:
            cut.add(verb, stop + 1)
            return True
        if second and second not in _NOT_A_NOUN:
            cut.add(start, stop + 1)  # "is red and shiny"
            return True
        if second in _PREPOSITIONS:
            return False
    if subject in _PRONOUNS - _RELATIVE or (subject == "that" and text.starts_sentence(verb - 1)):
        ends = stop == len(text.words) or text.starts_sentence(stop)
        alone = verb == 1 and stop == len(text.words)
        if not ends or alone or not text.starts_sentence(verb - 1):
            return False
        cut.add(verb - 1, stop)  # "It is red." says nothing else
    elif subject in _RELATIVE | _AND:
        cut.add(verb - 1 - (whose in _AND), stop)
        if text.gaps[verb - 1].strip() == text.gaps[stop].strip() == ",":  # "the wall, which is red, has"
            cut.gaps.add(stop)
    else:
        cut.add(verb, stop)
    return True


def _drop_phrase(text: _Text, start: int, stop: int, cut: _Cut) -> bool:
    """Drop "in red", "of wood", "made of wood" if what is before can stand alone."""
    first = start - 1
    while text.spaced(first + 1) and text.word(first) in ("all", "mostly", "either"):
        first -= 1
    if first < 1 or not text.spaced(first + 1) or text.low[first] not in ("of", "in", "from", "with"):
        return False
    if text.after(stop) == "to" or (text.after(stop) in _AND and text.after(stop + 1) not in _CLAUSE):
        return False  # "in red to orange", "of brick and mortar"
    made = first - 1
    if text.spaced(first) and text.word(made) in ("up", "out", "entirely", "mostly", "completely"):
        made -= 1
    if text.word(made) in _MADE and all(text.spaced(place) for place in range(made + 1, first + 1)):
        if _copula_before(text, made) is not None:
            return _drop_predicate(text, made, stop, cut)
        joined = text.spaced(made) and text.word(made - 1) in _AND
        if joined and made - 1 in cut.words:  # "is red and made of wood": what is left decides in the next round
            return False
        cut.add(made - joined, stop)
        return True
    before = text.word(first - 1) if text.spaced(first) else ""
    if text.low[first] in ("from", "with") or not before or before in _NOT_BEFORE_OF | _NOT_A_NOUN:
        return False
    cut.add(first, stop)
    return True


def _rebuilt(text: _Text, cut: _Cut) -> str:
    """The words that stay, with mended gaps, articles and capitals."""
    kept = [place for place in range(len(text.words)) if place not in cut.words]
    pieces: list[str] = []
    previous = -1
    for place in kept:
        word = text.words[place]
        if place > previous + 1 and any(_begins_high(text, gone) for gone in range(previous + 1, place)):
            word = word[0].upper() + word[1:]
        pieces += (_gap(text, cut, previous + 1, place), word)
        previous = place
    pieces.append(_gap(text, cut, previous + 1, len(text.words)))
    for index, place in enumerate(kept[:-1]):
        if text.low[place] in ("a", "an") and kept[index + 1] != place + 1 and text.spaced(place + 1):
            article = _article(text.words[place], text.words[kept[index + 1]])
            pieces[2 * index + 1] = article.upper() if text.all_capitals else article
    return "".join(pieces).strip()


def _begins_high(text: _Text, place: int) -> bool:
    return text.starts_sentence(place) and text.words[place][0].isupper()


def _gap(text: _Text, cut: _Cut, first: int, last: int) -> str:
    """What stands between two words that stay; words [first, last) between them go."""
    if first in cut.gaps or last in cut.gaps:
        return " "
    if first == last:
        return text.gaps[first]
    before, after = text.gaps[first], text.gaps[last]
    if after in ("-", "‑", "–"):
        after = " "
    if first == 0 and _SENTENCE_STOP.match(after.strip()):
        return before
    if not after.strip():
        return before if before.strip() or first == 0 else after or before
    if _SENTENCE_STOP.search(before) and _SENTENCE_STOP.match(after.strip()):
        return before  # the whole sentence is gone
    mark = after.strip()[0]
    if before.strip() in (",", ";", ":") and mark in ",;:.!?":
        before = ""
    return before.rstrip() + (after.lstrip() if mark in ",;:.!?)]}" else after)


def _article(article: str, word: str) -> str:
    spelled = word.rstrip("s") in _SPELLED or _LETTERS.fullmatch(word)  # "an SUV", "a BMW", "an MP3 player"
    right = "an" if _VOWEL_SOUND.match(word[0] if spelled else word) else "a"
    return right.capitalize() if article[0].isupper() else right


def _inside(places: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Which of these ascending places lie in one of these ascending spans."""
    inside = []
    current = 0
    for place in places:
        while current < len(spans) and spans[current][1] <= place:
            current += 1
        inside.append(current < len(spans) and spans[current][0] <= place)
    return inside
