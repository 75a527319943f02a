"""Items are born and end, and rows that no living item shows are dead: steps of one transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Literal

from hnclip.search.index.catalogue import ASKED, State, text_hash
from hnclip.search.index.changes import NewItem


def rows_of(
    database: sqlite3.Connection, table: Literal["pictures", "captions"], contents: Sequence[bytes]
) -> dict[bytes, int]:
    """The rows of these contents, as far as there are any."""
    found: dict[bytes, int] = {}
    for start in range(0, len(contents), ASKED):
        part = contents[start : start + ASKED]
        marks = ",".join("?" * len(part))
        found.update(database.execute(f"SELECT content, row FROM {table} WHERE content IN ({marks})", part))
    return found


def end_items(database: sqlite3.Connection, names: Iterable[str], version: int) -> list[tuple[int, int]]:
    """End the living items of these names; returns their ids and rows."""
    ended = []
    for name in names:
        found = database.execute("SELECT id, row FROM items WHERE name = ? AND died IS NULL", (name,)).fetchone()
        if found is not None:
            database.execute("UPDATE items SET died = ? WHERE id = ?", (version, found[0]))
            ended.append(found)
    return ended


def bear_item(database: sqlite3.Connection, item: NewItem, version: int) -> None:
    rows = rows_of(database, "pictures", [item.content])
    said = rows_of(database, "captions", [text_hash(text) for text in item.captions])
    if len(rows) != 1 or len(said) != len(set(item.captions)):
        raise ValueError(f"{item.name}: its picture or a caption of it has no vector")
    number = database.execute(
        "INSERT INTO items (name, row, place, stamp, born) VALUES (?, ?, ?, ?, ?)",
        (item.name, rows[item.content], item.place, item.stamp, version),
    ).lastrowid
    captions = [said[text_hash(text)] for text in item.captions]
    database.executemany("INSERT INTO said VALUES (?, ?, ?)", ((number, at, row) for at, row in enumerate(captions)))
    database.execute("DELETE FROM dead WHERE kind = 'images' AND row = ?", (rows[item.content],))
    database.executemany("DELETE FROM dead WHERE kind = 'captions' AND row = ?", ((row,) for row in captions))


def bury_rows(database: sqlite3.Connection, ended: Sequence[tuple[int, int]], before: State) -> None:
    """Rows that ended items had and no living one has are dead, and so are new ones that nobody has.

    Args:
        before: rows behind its own are new.
    """
    unshown = "NOT EXISTS (SELECT 1 FROM items WHERE items.row = pictures.row AND died IS NULL)"
    unsaid = (
        "NOT EXISTS (SELECT 1 FROM said JOIN items ON items.id = said.item WHERE said.row = captions.row "
        "AND died IS NULL)"
    )
    database.executemany(
        f"INSERT OR IGNORE INTO dead SELECT 'images', row FROM pictures WHERE row = ? AND {unshown}",
        ((row,) for _, row in ended),
    )
    database.executemany(
        "INSERT OR IGNORE INTO dead SELECT 'captions', row FROM captions "
        f"WHERE row IN (SELECT row FROM said WHERE item = ?) AND {unsaid}",
        ((number,) for number, _ in ended),
    )
    database.execute(
        f"INSERT OR IGNORE INTO dead SELECT 'images', row FROM pictures WHERE row >= ? AND {unshown}", (before.images,)
    )
    database.execute(
        f"INSERT OR IGNORE INTO dead SELECT 'captions', row FROM captions WHERE row >= ? AND {unsaid}",
        (before.captions,),
    )
