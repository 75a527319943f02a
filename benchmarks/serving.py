"""`hnclip serve` under load: answers per second, how long they take, and how many requests are refused.

A server in a process of its own, on an index of made-up vectors, and clients on the same machine that each send one
request after the other over a connection that stays open: long captions of scenes as queries, and some images. A client
that gets status 503 waits as long as the response says. `first` is the time from the start of the process to its first
answer.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from synthetic_index import synthetic_index

from hnclip.data.scenes import scene_records
from hnclip.measure import Report, machine
from hnclip.models.load import load

log = logging.getLogger("hnclip.bench")

PATIENCE = 120  # seconds to wait for a response, and for the server's model
COLUMNS = {
    "kind": "query",
    "answers": "answers/s",
    **{f"p{share}": f"p{share} ms" for share in (50, 95, 99)},
    "busy": "503",
    "failed": "failures",
    "first": "first s",
}


@dataclass(frozen=True)
class Options:
    """`hnclip serve` under load."""

    rows: int = 20_000
    """Images in the index; of the bundled model's width."""
    clients: int = 20
    seconds: float = 10.0
    images: int = 10
    """One query in so many is an image; 0 for none."""
    k: int = 24
    waiting: int = 32
    """As for `hnclip serve`."""

    def __post_init__(self) -> None:
        if min(self.rows, self.clients, self.k, self.waiting) < 1 or self.seconds <= 0 or self.images < 0:
            raise ValueError("rows, clients, k, waiting and seconds must be greater than 0, and images not negative")


class Request(NamedTuple):
    """A query as it is sent."""

    path: str
    content_type: str
    body: bytes


class Response(NamedTuple):
    """Its kind of query, its status or the name of an error, and the seconds until it was read."""

    kind: str
    status: str
    seconds: float


def run(options: Options) -> Report:
    records = scene_records("park", "test", families=100)[:400]
    captions = [record.captions[0] for record in records]
    requests = {"text": [text_request(caption, options.k) for caption in captions]}
    if options.images:
        requests["image"] = [image_request(record.image.load(), options.k) for record in records[:16]]
    with tempfile.TemporaryDirectory() as place:
        log.info(f"writing an index of {options.rows:,} images")
        index, model = Path(place) / "made-up.hnc", load()
        synthetic_index(index, options.rows, model.width, model=model, captions=captions)
        start = time.perf_counter()
        with serving(index, options.waiting) as port:
            first = {kind: first_answer(port, some[0], start) for kind, some in requests.items()}
            log.info(f"{options.clients} clients for {options.seconds:.0f} s")
            responses = load_server(port, requests, options)
    rows = [{**summary(kind, responses, options.seconds), "first": first[kind]} for kind in requests]
    failures = Counter(one.status for one in responses) - Counter({"200": len(responses), "503": len(responses)})
    notes = [f"{options.clients} clients on the server's own CPUs; failures: {dict(failures) or 'none'}"]
    return Report("serving", COLUMNS, rows, {**machine(), "images": options.rows}, notes)


@contextmanager
def serving(index: Path, waiting: int) -> Iterator[int]:
    """A process that serves, and its port. RuntimeError if it ends before the block does."""
    command = [sys.executable, "-m", "hnclip", "serve", str(index), "--port", "0", "--waiting", str(waiting)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            port = next((found[1] for line in process.stderr if (found := re.search(r"http://.*:(\d+)/", line))), None)
            if port is not None:
                yield int(port)
            if process.poll() is not None or port is None:
                raise RuntimeError(f"the server ended: {process.stderr.read()}")
        finally:
            process.terminate()


def first_answer(port: int, request: Request, start: float) -> float:
    """Seconds from `start` to the first answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    while (status := send(connection, request)[0]) != "200":
        if status != "503" or time.perf_counter() > start + PATIENCE:
            raise RuntimeError(f"{request.path}: status {status}")
        time.sleep(0.05)
    connection.close()
    return time.perf_counter() - start


def load_server(port: int, requests: dict[str, list[Request]], options: Options) -> list[Response]:
    """What all clients got."""
    responses, stop = list[Response](), threading.Event()

    def client(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        for turn in itertools.count(7 * number):
            if stop.is_set():
                break
            kind = "image" if options.images and turn % options.images == 0 else "text"
            start = time.perf_counter()
            status, pause = send(connection, requests[kind][turn % len(requests[kind])])
            responses.append(Response(kind, status, time.perf_counter() - start))
            stop.wait(pause)
        connection.close()

    with ThreadPoolExecutor(options.clients) as pool:
        clients = [pool.submit(client, number) for number in range(options.clients)]
        time.sleep(options.seconds)
        stop.set()
    for ended in clients:
        ended.result()
    return responses


def send(connection: http.client.HTTPConnection, request: Request) -> tuple[str, float]:
    """The status of the response, or the name of an error, and seconds to wait before the next request."""
    try:
        connection.request("POST", request.path, request.body, {"Content-Type": request.content_type})
        response = connection.getresponse()
        response.read()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        return type(error).__name__, 0.1
    return str(response.status), float(response.headers.get("Retry-After", 0))


def text_request(text: str, k: int) -> Request:
    return Request("/api/search", "application/json", json.dumps({"text": text, "k": k}).encode())


def image_request(image: Any, k: int) -> Request:
    content = io.BytesIO()
    image.save(content, "PNG")
    return Request(f"/api/search/image?k={k}", "image/png", content.getvalue())


def summary(kind: str, responses: Sequence[Response], seconds: float) -> dict[str, Any]:
    """One row of the report."""
    own = [one for one in responses if one.kind == kind]
    taken = [one.seconds for one in own if one.status == "200"]
    cuts = statistics.quantiles(taken, n=100, method="inclusive") if len(taken) > 1 else [float("nan")] * 99
    busy = sum(one.status == "503" for one in own)
    return {
        "kind": kind,
        "answers": len(taken) / seconds,
        **{f"p{share}": 1000 * cuts[share - 1] for share in (50, 95, 99)},
        "busy": busy,
        "failed": len(own) - len(taken) - busy,
    }
