"""Milvus by its URI: a file that milvus-lite serves within this process, or a server. pymilvus talks alike to both."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

import numpy as np

TOKEN = "HNCLIP_MILVUS_TOKEN"
FILE = ".db"  # what the name of a file ends in
_CONNECTING = 10.0  # seconds
_SEARCHING = 60.0  # seconds
_LOADING = 600.0  # seconds to flush, to build an index, to load a collection

_opened: Counter[str] = Counter()  # files of milvus-lite, and how many connections of this process use each
_opening = Lock()


class InUse(OSError):
    """Another process has the file open, and there can be only one."""


class Connection:
    """A connection to Milvus. Threads may share it."""

    def __init__(self, uri: str) -> None:
        """
        Args:
            uri: as `plain_uri` gives it. A file that is not there is made, its directory is not.

        Raises:
            ValueError: pymilvus or milvus-lite is not installed.
            OSError: it cannot be reached; `InUse` if it is a file that another process has open.
        """
        self.uri = uri
        milvus = import_milvus()
        self._file = uri if uri.endswith(FILE) else None
        if self._file is not None:
            _lite()
        with _opening, _errors_of_lite() as heard, explained(uri, heard):
            self.client: Any = milvus.MilvusClient(uri=uri, token=os.environ.get(TOKEN, ""), timeout=_CONNECTING)
            if self._file is not None:
                _opened[self._file] += 1

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The last one who uses a file lets other processes have it."""
        if self.client is None:
            return
        self.client.close()
        self.client = None
        with _opening:
            if self._file is not None:
                _opened[self._file] -= 1
                if not _opened[self._file]:
                    _lite().release_server(self._file)

    def names(self) -> list[str]:
        """Of the collections."""
        with explained(self.uri):
            return self.client.list_collections(timeout=_CONNECTING)

    def make(self, name: str, width: int, index: dict[str, Any]) -> None:
        """A collection of rows and their vectors, searched by inner product."""
        milvus = import_milvus()
        schema = self.client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("row", milvus.DataType.INT64, is_primary=True)
        schema.add_field("vector", milvus.DataType.FLOAT_VECTOR, dim=width)
        indexes = self.client.prepare_index_params()
        indexes.add_index(field_name="vector", metric_type="IP", **index)
        with explained(self.uri):
            self.client.create_collection(name, schema=schema, index_params=indexes, timeout=_LOADING)

    def drop(self, name: str) -> None:
        with explained(self.uri):
            self.client.drop_collection(name, timeout=_LOADING)

    def write(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Rows that are there already are replaced."""
        with explained(self.uri):
            self.client.upsert(name, rows, timeout=_LOADING)

    def keep(self, name: str) -> int:
        """Let all that was written be on its disk, ready to be found; how many rows there are."""
        with explained(self.uri):
            self.client.flush(name, timeout=_LOADING)
            self.client.load_collection(name, timeout=_LOADING)
            found = self.client.query(
                name, filter="", output_fields=["count(*)"], consistency_level="Strong", timeout=_LOADING
            )
        return int(found[0]["count(*)"])

    def load(self, name: str) -> None:
        """Let it be ready to be searched."""
        with explained(self.uri):
            self.client.load_collection(name, timeout=_LOADING)

    def search(self, name: str, queries: np.ndarray, count: int, effort: int) -> list[list[int]]:
        """The rows that it takes for the nearest of each query [Q, D], best first."""
        how = {"metric_type": "IP", "params": {"ef": effort}}
        with explained(self.uri):
            found = self.client.search(
                name,
                data=queries,
                anns_field="vector",
                limit=count,
                search_params=how,
                output_fields=["row"],
                timeout=_SEARCHING,
            )
        return [[hit["row"] for hit in some] for some in found]


def plain_uri(uri: str) -> str:
    """A URI as it is kept: that of a file as an absolute path.

    Raises:
        ValueError: it is none, or a secret is in it.
    """
    parts = urlsplit(uri)
    if "@" in parts.netloc:
        raise ValueError(f"the URI of Milvus is kept in the index: give user and password as USER:PASSWORD by ${TOKEN}")
    if parts.scheme in ("http", "https") and parts.hostname:
        return uri
    if not uri.endswith(FILE) or "://" in uri:
        raise ValueError(f"the URI of Milvus must be http://HOST:PORT, or a file whose name ends in .db; got {uri!r}")
    return os.path.abspath(os.path.expanduser(uri))


@contextmanager
def explained(uri: str, causes: list[BaseException] | None = None) -> Iterator[None]:
    """Errors of Milvus, with the URI that they are about."""
    from pymilvus.exceptions import MilvusException

    try:
        yield
    except MilvusException as error:
        if any(type(cause).__name__ == "DataDirLockedError" for cause in causes or ()):
            raise InUse(
                f"{uri} is open in another process, and a file of Milvus can be open in one at a time: wait for it, or "
                "search with --engine exact, or use a server of Milvus"
            ) from error
        why = "; ".join(map(str, causes or ())) or error.message
        hint = f". If it asks for a token: ${TOKEN}" if "auth" in why.lower() else ""
        raise OSError(f"Milvus at {uri} cannot be used: {why}{hint}") from error


def import_milvus() -> Any:
    """pymilvus, which only those who search by Milvus need.

    Raises:
        ValueError: it is not installed; the message says how to.
    """
    try:
        import pymilvus
    except ImportError as error:
        raise ValueError(f"this engine needs pymilvus ({error}): pip install 'hnclip[milvus]'") from error
    logging.getLogger("pymilvus").setLevel(logging.CRITICAL)  # errors are raised, and that is enough
    return pymilvus


def _lite() -> Any:
    """What serves files within this process; pymilvus starts it, and nobody ends it."""
    logging.getLogger("grpc._server").setLevel(logging.CRITICAL)  # pymilvus asks for more than it can, and goes on
    try:
        return import_module("milvus_lite.server_manager").server_manager_instance
    except ImportError as error:
        raise ValueError(f"a file of Milvus needs milvus-lite ({error}): pip install 'hnclip[milvus]'") from error


@contextmanager
def _errors_of_lite() -> Iterator[list[BaseException]]:
    """Why milvus-lite does not open a file: it tells its log alone, which is not printed where somebody listens."""
    heard: list[BaseException] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.exc_info[1] is not None:
                heard.append(record.exc_info[1])

    log, ear = logging.getLogger("milvus_lite"), Ear()
    log.addHandler(ear)
    try:
        yield heard
    finally:
        log.removeHandler(ear)
