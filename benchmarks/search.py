"""Search: engines against faiss's flat index, cold start with and without torch, indexing against its encoder, serving.

engines: time per query and recall; the peers are `faiss.IndexScalarQuantizer(QT_fp16)` and a product in float32. The
vectors are made up: around a common direction, as those of CLIP, in clusters of families of near-duplicates; queries
are as far from all of them as descriptions are. For each query all ways run one after the other, in rotating order, so
that none finds its data in the CPU's caches. R@10 is the share of the ten nearest rows of the float32 product.

cold: `hnclip search INDEX "…"` as a new process, with the text tower in the index (onnxruntime) and without (torch).

indexing: `hnclip index` from JPEG files of 640 × 480 to the last commit, against the image tower alone on preprocessed
pixels; then the same command again with nothing to do. The model has random weights, in the shape of CLIP ViT-B/32.

serving: `hnclip serve` in a process of its own; clients on the same machine each send one request after the other.
"""

from __future__ import annotations

import http.client
import io
import itertools
import json
import random
import re
import statistics
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from measure import Report, Timing, log, machine, main, threads, time_ways
from PIL import Image

from hnclip.data.image_sources import FileImage
from hnclip.data.images import preprocess_image
from hnclip.data.scenes import scene_records
from hnclip.encode.fingerprint import model_fingerprint
from hnclip.encode.loop import encode_pixels
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load, save, wrap
from hnclip.models.preprocessing import train_tokenizer
from hnclip.search.database import About, EngineName
from hnclip.search.engines import VectorSearch, open_engine, update_engine
from hnclip.search.indexer import build_index
from hnclip.search.query_encoder import update_text_encoder
from hnclip.search.reader import IndexReader
from hnclip.search.writer import Change, NewFile, NewImage, open_writer

FAMILY, CLUSTER = 8, 500  # near-duplicates; rows of a cluster on average
BLOCK = 16_384  # rows at a time, whole families
K, TIMEOUT = 20, 120  # rows of a query; seconds to wait for a response


def write_photos(folder: Path, count: int) -> list[Path]:
    """Smooth noise, as JPEG files of 640 × 480 pixels."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    files = [folder / f"{number:06}.jpg" for number in range(count)]
    for file in files:
        coarse = Image.fromarray(generator.integers(0, 256, (60, 80, 3), dtype=np.uint8))
        coarse.resize((640, 480), Image.Resampling.BICUBIC).save(file, quality=90)
    return files


def write_model(
    directory: Path, tokenizer: Any, *, text: dict[str, int], vision: dict[str, int], width: int = 512
) -> str:
    """Write a CLIP of random weights; returns its path.

    Args:
        text, vision: `layers` and `width` of the towers, `context` of the text and `patch` of the image tower.
    """
    from transformers import CLIPConfig, CLIPModel

    def tower(of: dict[str, int]) -> dict[str, int]:
        sizes = {"hidden_size": of["width"], "intermediate_size": 4 * of["width"]}
        return sizes | {"num_hidden_layers": of["layers"], "num_attention_heads": max(1, of["width"] // 64)}

    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    vocabulary = {**special, "vocab_size": len(tokenizer), "max_position_embeddings": text["context"]}
    image = {"image_size": 224, "patch_size": vision["patch"]}
    torch.manual_seed(0)
    config = CLIPConfig(
        projection_dim=width, text_config={**tower(text), **vocabulary}, vision_config={**tower(vision), **image}
    )
    save(wrap(CLIPModel(config), tokenizer), directory)
    return str(directory)


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def directions(generator: np.random.Generator, count: int, width: int) -> np.ndarray:
    """[n, D] of about length 1."""
    return generator.standard_normal((count, width), np.float32) / np.float32(width**0.5)


def made_up_vectors(rows: int, width: int) -> Iterator[np.ndarray]:
    """Blocks [n, D] of unit vectors: cosines of about 0.97 between near-duplicates, 0.7 in a cluster, 0.4 elsewhere."""
    generator = np.random.default_rng(0)
    common, centres = directions(generator, 1, width), directions(generator, max(1, rows // CLUSTER), width)
    for start in range(0, rows, BLOCK):
        families = directions(generator, BLOCK // FAMILY, width)  # [F, D]
        shared = 0.6 * common + 0.5 * centres[generator.integers(len(centres), size=len(families))] + 0.5 * families
        vectors = shared.repeat(FAMILY, 0) + 0.15 * directions(generator, BLOCK, width)  # [BLOCK, D]
        yield unit(vectors[: rows - start])


def description_queries(vectors: np.ndarray) -> np.ndarray:
    """Queries as of descriptions of given vectors [Q, D]: around a direction of their own, a little nearer to them."""
    generator, width = np.random.default_rng(1), vectors.shape[1]
    common = unit(vectors.mean(0, keepdims=True))  # [1, D]
    described = unit(vectors - (vectors @ common.T) * common)  # [Q, D]
    return unit(0.7 * directions(generator, 1, width) + 0.5 * described + 0.4 * directions(generator, *vectors.shape))


def write_index(
    path: Path, rows: int, width: int, model: DualEncoder | None = None, captions: Sequence[str] = ()
) -> None:
    """An index of made-up vectors, for each a file with the same thumbnail.

    Args:
        model: the bundled one, which has this width; without one the index answers no query by text.
        captions: of the files, in turn.
    """
    name, fingerprint = ("none", "none") if model is None else (model.source, model_fingerprint(model, model.name))
    about = About("bundled", source=name, fingerprint=fingerprint, opening={}, width=width, data="made up", root=None)
    thumbnail = io.BytesIO()
    Image.new("RGB", (32, 24), (120, 150, 90)).save(thumbnail, "JPEG")
    with open_writer(path, about) as writer:
        texts = [vector for block in made_up_vectors(len(captions), width) for vector in block]
        writer.commit(Change(captions=dict(zip(captions, texts))))
        numbers = itertools.count()
        for block in made_up_vectors(rows, width):
            images, files = [], []
            for number, vector in zip(numbers, block):
                digest = number.to_bytes(32, "big")
                own = (captions[number % len(captions)],) if captions else ()
                images.append(NewImage(digest, vector, (64, 48), thumbnail.getvalue()))
                files.append(NewFile(f"{number:09d}.jpg", digest, "{}", "", own))
            writer.commit(Change(images=images, files=files))
        update_text_encoder(writer, model)
        writer.publish()


@contextmanager
def open_index_of(index: Path, name: str) -> Iterator[VectorSearch]:
    """The images of an index, searched by an engine."""
    with IndexReader(index) as reader:
        engine = open_engine(reader, "images", name)
        if engine is None and name != "exact":
            raise ValueError(f"{name} is not built for so few rows: raise --rows")
        with closing(engine) if hasattr(engine, "close") else nullcontext():
            yield VectorSearch(reader, "images", engine)


@dataclass(frozen=True)
class Engines:
    """Recall and time per query of the search engines."""

    rows: int = 100_000
    """Of the index; 1,000,000 of width 512 need about 8 GB of memory and 3 GB of disk."""
    width: int = 512
    queries: int = 200
    engines: tuple[EngineName, ...] = ("exact", "faiss-ivf", "faiss-hnsw")
    """milvus requires --uri."""
    uri: str | None = None
    """Of a server of Milvus, or a file of milvus-lite."""
    threads: int = 1
    """Of faiss and torch."""


def engines(options: Engines) -> Report:
    import faiss

    faiss.omp_set_num_threads(options.threads)
    vectors = np.concatenate([*made_up_vectors(options.rows, options.width)])  # [N, D]
    queries = description_queries(vectors[np.random.default_rng(4).integers(len(vectors), size=options.queries)])
    stored, flat16 = torch.from_numpy(vectors), "faiss flat fp16"
    flat = faiss.IndexScalarQuantizer(options.width, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT)
    flat.add(vectors)
    ways: dict[str, Callable[[np.ndarray], np.ndarray]] = {  # the nearest rows [K] to a query [D]
        "float32 product": lambda query: torch.mv(stored, torch.from_numpy(query)).topk(K).indices.numpy(),
        flat16: lambda query: flat.search(query[None], K)[1][0],
    }
    costs: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as place, ExitStack() as opened, threads(options.threads):
        log.info(f"writing an index of {options.rows:,} rows")
        index = Path(place) / "made-up.hnc"
        write_index(index, options.rows, options.width)
        for name in options.engines:
            log.info(f"building {name}")
            with IndexReader(index) as reader:
                about = replace(reader.about, engine=name, uri=options.uri if name == "milvus" else None)
            with open_writer(index, about) as writer:
                writer.set_about(about)
                start = time.perf_counter()
                update_engine(writer, "images", name, options.uri)
                built = time.perf_counter() - start
            found = opened.enter_context(open_index_of(index, name))  # stays mapped when the next one replaces its file
            ways[name] = lambda query, found=found: found.nearest(query, K)[0]
            if found.engine is not None:
                size = sum(file.stat().st_size for file in index.glob("images-*.faiss"))
                costs[name] = {"build s": built, "engine MB": size / 1e6}
        log.info(f"{options.queries} queries")
        taken, recall = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
        names, right = list(ways), [ways["float32 product"](query)[:10] for query in queries]
        for turn, query in enumerate(queries):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                start = time.perf_counter()
                found = ways[name](query)
                taken[name].append(time.perf_counter() - start)
                recall[name].append(float(np.isin(right[turn], found[:10]).mean()))
        about_machine = {**machine(), "rows": options.rows, "width": options.width}
    timings = {name: Timing(tuple(seconds)) for name, seconds in taken.items()}
    rows = [
        {"engine": name, "median ms": 1000 * timings[name].median, f"× {flat16}": timings[name].ratios(timings[flat16])}
        | {"R@10": statistics.fmean(recall[name]), **costs.get(name, {})}
        for name in ways
    ]
    return Report("engines", rows, about_machine)


@dataclass(frozen=True)
class Cold:
    """Time of a search in a new process."""

    tower: Literal["bundled", "long-clip-l"] = "bundled"
    """bundled, or long-clip-l: 123 M parameters with random weights, and a small image tower."""
    images: int = 64
    turns: int = 5


COLD = """
import json, sys
from hnclip.cli import main
status = main(sys.argv[1:])
print(json.dumps("torch" in sys.modules))
sys.exit(status)
"""


def cold(options: Cold) -> Report:
    records = scene_records("park", "test", families=options.images // 4 + 1, members=4)[: options.images]
    with tempfile.TemporaryDirectory() as place:
        images, model = Path(place, "images"), "bundled"
        images.mkdir()
        for number, record in enumerate(records):
            record.image.load().save(images / f"{number}.png")
        if options.tower != "bundled":
            letters = random.Random(0)
            words = ["".join(letters.choices(string.ascii_lowercase, k=8)) for _ in range(60_000)]
            tokenizer = train_tokenizer([*(record.captions[0] for record in records), *words], 49_408)
            text, vision = {"layers": 12, "width": 768, "context": 248}, {"layers": 1, "width": 64, "patch": 32}
            model = write_model(Path(place, "model"), tokenizer, text=text, vision=vision, width=768)
        found: dict[str, list[Any]] = {}

        def search(way: str, index: Path) -> None:
            call = ["search", str(index), records[0].captions[0], "-k", "5", "--json"]
            done = subprocess.run([sys.executable, "-c", COLD, *call], capture_output=True, text=True, check=True)
            found[way] = [json.loads(line) for line in done.stdout.splitlines()]

        ways: dict[str, Callable[[], object]] = {}
        for way, text_encoder in (("torch", False), ("onnxruntime", True)):
            log.info(f"index for {way}")
            index = Path(place, f"{way}.hnc")
            build_index(str(images), index, model=model, text_encoder=text_encoder, device="cpu")
            ways[way] = partial(search, way, index)
        timings = time_ways(ways, turns=options.turns)
    scores = {way: {hit["name"]: hit["score"] for hit in result[0]["hits"]} for way, result in found.items()}
    rows = [
        {"queries by": way, "s": timing, "× torch": timing.ratios(timings["torch"]), "imports torch": found[way][1]}
        | {"torch's hits": list(scores[way]) == list(scores["torch"])}
        | {"largest difference": max(abs(score - scores["torch"].get(name, 0)) for name, score in scores[way].items())}
        for way, timing in timings.items()
    ]
    return Report("cold", rows, {**machine(), "tower": options.tower, "images": options.images})


@dataclass(frozen=True)
class Indexing:
    """Speed of `hnclip index`."""

    images: int = 512
    layers: int = 12
    width: int = 768
    batch: int = 64
    turns: int = 3
    threads: int = torch.get_num_threads()


def indexing(options: Indexing) -> Report:
    taken = defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory() as place, threads(options.threads):
        folder = Path(place)
        log.info(f"writing {options.images:,} images and the model")
        files = write_photos(folder / "photos", options.images)
        text, vision = {"layers": 1, "width": 64, "context": 77}, {"layers": options.layers, "width": options.width}
        name = write_model(folder / "model", load().tokenizer, text=text, vision={**vision, "patch": 32})
        model = load(name).eval()
        pixels = torch.stack([preprocess_image(FileImage(file).load(), model.image_transform) for file in files])
        for turn in range(options.turns + 1):
            log.info(f"turn {turn} of {options.turns}" if turn else "warm-up")
            source, out = str(files[0].parent), folder / f"{turn}.hnc"
            index = partial(build_index, source, out, model=name, text_encoder=False, device="cpu", batch=options.batch)
            alone = time_ways({"encoder": lambda: encode_pixels(model, pixels, batch=options.batch)}, turns=1, warmup=0)
            first, again = index(), index()
            if (first.encoded, again.encoded) != (len(files), 0):
                raise RuntimeError(f"encoded {first.encoded} and {again.encoded} of {len(files)} images")
            if turn:
                taken["encoder alone"].append(alone["encoder"].median)
                taken["hnclip index"].append(first.working)
                taken["hnclip index again"].append(again.working)
        about = machine()
    timings = {way: Timing(tuple(seconds)) for way, seconds in taken.items()}
    alone = timings["encoder alone"]
    rows = [
        {"way": way, "images/s": options.images / timing.median, "of the encoder alone": alone.ratios(timing)}
        for way, timing in timings.items()
    ]
    return Report("indexing", rows, about)


@dataclass(frozen=True)
class Serving:
    """`hnclip serve` under load."""

    rows: int = 20_000
    """Images in the index; of the bundled model's width."""
    clients: int = 20
    seconds: float = 10.0
    images: int = 10
    """One query in so many is an image."""


@contextmanager
def server(index: Path) -> Iterator[int]:
    """A process that serves, and its port. RuntimeError if it ends before the block does."""
    command = [sys.executable, "-m", "hnclip", "serve", str(index), "--port", "0"]
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


def send(connection: http.client.HTTPConnection, path: str, kind: str, body: bytes) -> str:
    """The status of the response, or the name of an error."""
    try:
        connection.request("POST", path, body, {"Content-Type": kind})
        response = connection.getresponse()
        response.read()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        return type(error).__name__
    return str(response.status)


def serving(options: Serving) -> Report:
    records = scene_records("park", "test", families=100)[:400]
    captions, requests = [record.captions[0] for record in records], dict[str, list[tuple[str, str, bytes]]]()
    bodies = [json.dumps({"text": caption, "k": 24}).encode() for caption in captions]
    requests["text"] = [("/api/search", "application/json", body) for body in bodies]
    requests["image"] = []
    for record in records[:16]:
        record.image.load().save(content := io.BytesIO(), "PNG")
        requests["image"].append(("/api/search/image?k=24", "image/png", content.getvalue()))
    responses, stop = list[tuple[str, str, float]](), threading.Event()

    def client(port: int, number: int) -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)) as connection:
            for turn in itertools.count(7 * number):
                kind = "text" if turn % options.images else "image"
                start = time.perf_counter()
                status = send(connection, *requests[kind][turn % len(requests[kind])])
                responses.append((kind, status, time.perf_counter() - start))
                if stop.wait(0 if status == "200" else 1):
                    break

    with tempfile.TemporaryDirectory() as place:
        log.info(f"writing an index of {options.rows:,} images")
        index, model = Path(place) / "made-up.hnc", load()
        write_index(index, options.rows, model.width, model, captions)
        with server(index) as port, ThreadPoolExecutor(options.clients) as pool:
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)) as connection:
                for some in requests.values():  # until the model is loaded
                    while send(connection, *some[0]) == "503":
                        time.sleep(0.1)
            log.info(f"{options.clients} clients for {options.seconds:.0f} s")
            clients = [pool.submit(client, port, number) for number in range(options.clients)]
            time.sleep(options.seconds)
            stop.set()
            for ended in clients:
                ended.result()
    rows = []
    for kind in requests:
        own = [(status, seconds) for sent, status, seconds in responses if sent == kind]
        taken = [seconds for status, seconds in own if status == "200"]
        refused = sum(status == "503" for status, _ in own)
        row = {"query": kind, "answers/s": len(taken) / options.seconds}
        row |= {f"p{share} ms": 1000 * float(np.quantile(taken or [np.nan], share / 100)) for share in (50, 95, 99)}
        rows.append(row | {"refused": refused, "failed": len(own) - len(taken) - refused})
    return Report("serving", rows, {**machine(), "images": options.rows, "clients": options.clients})


Options = Engines | Cold | Indexing | Serving
RUNS: dict[type, Callable[[Any], Report]] = {Engines: engines, Cold: cold, Indexing: indexing, Serving: serving}


def run(options: Options) -> Report:
    return RUNS[type(options)](options)


if __name__ == "__main__":
    main(Options, run)
