"""`hnclip serve` under load: answers per second, how long they take, what is turned away, and whether memory grows.

A real server on an index of made-up vectors, and clients on the same machine that each ask one question after the
other, over a connection that stays open: long captions of scenes, and some pictures. Who is told that the server is
busy waits as long as it says. Before that, the time from the start of the process to its first answers. Memory says
most after a while: `--seconds 60`.
"""

from __future__ import annotations

import http.client
import io
import itertools
import json
import logging
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from synthetic_index import synthetic_index

from hnclip.data.scenes import scene_records
from hnclip.measure import Report, machine
from hnclip.models.load import load

log = logging.getLogger("hnclip.bench")

PICTURES = 16  # different ones that are sent
WARM = 0.25  # of the time, after which memory is looked at for the first time


@dataclass(frozen=True)
class Options:
    """`hnclip serve` under load."""

    rows: int = 20_000
    """Pictures in the index; of the bundled model's width."""
    index: Path | None = None
    """An index that is there, instead."""
    clients: int = 50
    seconds: float = 10.0
    """How long they ask; memory that grows shows in 60."""
    images: int = 10
    """One question in so many is a picture; 0 for none."""
    k: int = 24
    waiting: int = 32
    """As for `hnclip serve`."""

    def __post_init__(self) -> None:
        if min(self.rows, self.clients, self.k, self.waiting) < 1 or self.seconds <= 0 or self.images < 0:
            raise ValueError("rows, clients, k, waiting and seconds must be greater than 0, and images not negative")


@dataclass
class Seen:
    """What a client saw: seconds of what was answered, by kind of question, and how often it was answered otherwise."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {"text": [], "picture": []})
    busy: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)


def run(options: Options) -> Report:
    records = list(itertools.islice(scene_records("park", "test", families=100), 400))
    texts = [record.captions[0] for record in records]
    pictures = [_png(record.image.load()) for record in records[:PICTURES]]
    with tempfile.TemporaryDirectory() as place:
        index = options.index
        if index is None:
            log.info(f"writing an index of {options.rows:,} rows")
            index = Path(place) / "made-up.hnc"
            synthetic_index(index, options.rows, load().width)
        started = time.perf_counter()
        with serving(index, options) as (process, port):
            first = _first_answers(port, started, texts[0])
            log.info(f"{options.clients} clients ask for {options.seconds:.0f} s")
            seen, memory = _load(process.pid, port, options, texts, pictures)
            alive = process.poll() is None
    if not alive:
        raise RuntimeError("the server died under load")
    rows = [_row(kind, seen, options.seconds) for kind in ("text", "picture") if kind == "text" or options.images]
    check(rows, seen)
    growth = memory[-1] - memory[0]
    columns = {
        "kind": "question",
        "answers": "answers/s",
        "p50": "p50 ms",
        "p95": "p95 ms",
        "p99": "p99 ms",
        "busy": "503",
        "failed": "failed",
    }
    notes = [
        f"from the start of the process: {first['healthz']:.2f} s to /healthz, {first['index']:.2f} s to /api/index, "
        f"{first['search']:.2f} s to the first search",
        f"memory of its own {memory[0] / 1e6:,.0f} MB when warm, {memory[-1] / 1e6:,.0f} MB at the end (grown by "
        f"{growth / 1e6:,.1f} MB), {max(memory) / 1e6:,.0f} MB at most; files mapped into memory not counted",
        "no failure but 503",
        f"{options.clients} clients, on the processors of the server",
    ]
    about = {**machine(), "rows": options.rows if options.index is None else str(options.index)}
    more = {"memory": memory, "growth": growth, "first": first}
    return Report("serving", columns, [{**row, **more} for row in rows], about, notes)


def check(rows: Sequence[dict[str, Any]], seen: Sequence[Seen]) -> None:
    """
    Raises:
        RuntimeError: these numbers are of no working server: questions failed, or none were answered.
    """
    failures = Counter[str]()
    for client in seen:
        failures.update(client.failed)
    if failures:
        raise RuntimeError(f"questions failed, not with 503: {dict(failures)}")
    if silent := [row["kind"] for row in rows if not row["answers"]]:
        raise RuntimeError(f"no question was answered of the kind {', '.join(silent)}: measure longer (--seconds)")


@contextmanager
def serving(index: Path, options: Options) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process that serves, and its port."""
    command = [sys.executable, "-m", "hnclip", "serve", str(index), "--port", "0", "--waiting", str(options.waiting)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            if (found := re.search(r"http://.*:(\d+)/", line)) is None:
                raise RuntimeError(f"the server did not start: {line}{process.stderr.read()}")
            yield process, int(found[1])
        finally:
            process.terminate()


def _first_answers(port: int, started: float, text: str) -> dict[str, float]:
    """Seconds from the start of the process to the first answers."""
    found = {}
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    for name, question in {"healthz": ("/healthz",), "index": ("/api/index",), "search": _text(text, 1)}.items():
        while _ask(client, *question)[0] != 200:
            time.sleep(0.05)
        found[name] = time.perf_counter() - started
    client.close()
    return found


def _load(
    server: int, port: int, options: Options, texts: Sequence[str], pictures: Sequence[bytes]
) -> tuple[list[Seen], list[int]]:
    """What the clients saw, and the server's memory once a second from when it is warm."""
    stop = threading.Event()
    seen = [Seen() for _ in range(options.clients)]
    clients = [
        threading.Thread(target=_client, args=(number, one, port, options, texts, pictures, stop))
        for number, one in enumerate(seen)
    ]
    for client in clients:
        client.start()
    time.sleep(WARM * options.seconds)
    memory, until = [_own_memory(server)], time.perf_counter() + (1 - WARM) * options.seconds
    while (left := until - time.perf_counter()) > 0:
        time.sleep(min(1.0, left))
        memory.append(_own_memory(server))
    stop.set()
    for client in clients:
        client.join()
    return seen, memory


def _client(
    number: int,
    seen: Seen,
    port: int,
    options: Options,
    texts: Sequence[str],
    pictures: Sequence[bytes],
    stop: threading.Event,
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    for turn in itertools.count(number * 7):
        if stop.is_set():
            break
        if options.images and turn % options.images == 0:
            kind, question = "picture", _picture(pictures[turn % len(pictures)], options.k)
        else:
            kind, question = "text", _text(texts[turn % len(texts)], options.k)
        start = time.perf_counter()
        try:
            status, pause = _ask(connection, *question)
        except (OSError, http.client.HTTPException) as error:
            seen.failed[f"{kind}: {type(error).__name__}"] += 1
            connection.close()
            stop.wait(0.1)
            continue
        if status == 200:
            seen.seconds[kind].append(time.perf_counter() - start)
        elif status == 503:
            seen.busy[kind] += 1
            stop.wait(pause)
        else:
            seen.failed[f"{kind}: {status}"] += 1
    connection.close()


def _ask(
    connection: http.client.HTTPConnection, path: str, body: bytes | None = None, kind: str = ""
) -> tuple[int, float]:
    """Status of the answer, and how long to wait before the next question."""
    connection.request("GET" if body is None else "POST", path, body, {"Content-Type": kind} if kind else {})
    answer = connection.getresponse()
    answer.read()
    return answer.status, float(answer.headers.get("Retry-After", 0))


def _text(text: str, k: int) -> tuple[str, bytes, str]:
    return "/api/search", json.dumps({"text": text, "k": k}).encode(), "application/json"


def _picture(content: bytes, k: int) -> tuple[str, bytes, str]:
    return f"/api/search/image?k={k}", content, "image/png"


def _row(kind: str, seen: Sequence[Seen], seconds: float) -> dict[str, Any]:
    taken = sorted(one for client in seen for one in client.seconds[kind])
    cuts = statistics.quantiles(taken, n=100, method="inclusive") if len(taken) > 1 else [float("nan")] * 99
    return {
        "kind": kind,
        "answers": len(taken) / seconds,
        **{f"p{share}": 1000 * cuts[share - 1] for share in (50, 95, 99)},
        "busy": sum(client.busy[kind] for client in seen),
        "failed": sum(count for client in seen for name, count in client.failed.items() if name.startswith(kind)),
    }


def _own_memory(process: int) -> int:
    """Resident bytes that are of no file."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def _png(picture: Any) -> bytes:
    content = io.BytesIO()
    picture.save(content, "PNG")
    return content.getvalue()
