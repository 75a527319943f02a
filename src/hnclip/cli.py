"""The `hnclip` command: parses options, calls the library, prints results.

Heavy modules are imported only by the commands that need them, so that --help is fast.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, get_args

from hnclip.util.console import configure_logging, progress
from hnclip.util.optional import large_import
from hnclip.util.text import duration

if TYPE_CHECKING:
    from hnclip.config import TrainConfig

log = logging.getLogger("hnclip")

HELP = """usage: hnclip COMMAND [options]        hnclip COMMAND --help for the options

image–text retrieval for long, nearly identical captions

  demo         fine-tune the bundled model with InfoNCE and with HN-CLIP, compare, write a report
  train        fine-tune a model; continue a stopped run with --resume RUN
  eval         retrieval metrics of models on benchmarks or your data
  compare      two models on the same queries, with a paired bootstrap
  data check   look for problems in data before training
  data cache   list or delete cached images
  prepare      regions and filtered captions for methods that need them
  study        tables and figures of the paper, and additional controls, on your data and model
  diagnose     similarity of captions to a model, and what it means for training
  convert      load a model in any layout, write it as a Hugging Face directory or as ONNX
  encode       images and captions to embeddings on disk, resumable, with any number of processes
  index        build or update an index of images for search by text
  search       find images by a description or an image, and captions by an image
  serve        a web page to search an index, and an HTTP API
  interpolate  interpolate the weights of a base model and a fine-tuned one, against forgetting
  bench        measure speed and memory, compared with other libraries

  --version    print the version
"""


PREPARE = """usage: hnclip prepare KIND DATA [options]        hnclip prepare KIND --help for the options

inputs for some methods, made once before training and kept in the cache directory (docs/prepare.md)

  regions      regions of the images, and the sentence of the caption that describes each
  text         captions without words of appearance: colours, materials, textures
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0 on success, 1 for an error with a message, 2 for invalid arguments, 130 if
    interrupted."""
    os.environ.setdefault("PYDANTIC_ERRORS_INCLUDE_URL", "false")  # read when pydantic is imported
    command, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if command in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if command == "--version":
        from hnclip import __version__

        print(f"hnclip {__version__}")
        return 0
    if command not in COMMANDS:
        print(f"hnclip: there is no command {command!r}\n\n{HELP}", end="", file=sys.stderr)
        return 2
    configure_logging()  # until the options are read
    try:
        return COMMANDS[command](rest) or 0
    except BrokenPipeError:  # the reader of the output has closed it
        sys.stdout = None  # otherwise the interpreter tries to flush it on exit
        return 1
    except (ValueError, OSError, RuntimeError) as error:
        name = " ".join([command, *rest[: command == "data"]])
        log.error(f"hnclip {name}: {_text(error)}")
        return 1
    except KeyboardInterrupt:
        log.error(f"hnclip {command}: interrupted; {CONTINUE.get(command, 'nothing was lost')}")
        return 130


def _text(error: Exception) -> str:
    from pydantic import ValidationError

    from hnclip.config import one_line

    return one_line(error) if isinstance(error, ValidationError) else str(error)


def _train(arguments: Sequence[str]) -> None:
    from hnclip import recipes
    from hnclip.config import ReadConfig, RunOptions, TrainConfig, option_words, read_config
    from hnclip.data.sources import SCENES
    from hnclip.options import Train

    resumed, run = _value(arguments, "--resume"), RunOptions()
    if resumed is not None:
        with large_import():
            from hnclip.training.runs import saved_config, saved_options

        base, run = saved_config(Path(resumed)), saved_options(Path(resumed))
    elif (path := _value(arguments, "--config")) is not None:
        base = _apply_short_options(read_config(TrainConfig, Path(path)), arguments)
    else:
        recipe = _value(arguments, "--recipe", _default_recipe(arguments), recipes.RECIPES)
        base = _apply_short_options(recipes.RECIPES[recipe](), arguments)
    options = _parse(Train, "train", arguments, default=Train(training=base, run=run))

    chosen = options.training
    named = any(_value(arguments, flag) is not None for flag in ("--model", "--config", "--resume"))
    own = chosen.data not in SCENES and (Path(chosen.data).exists() or not chosen.data.startswith("scenes/"))
    if chosen.model == "bundled" and own and not named:
        raise ValueError(
            "your own data need a --model: a directory or hub name of CLIP, Long-CLIP, SigLIP …, or a checkpoint file "
            "(docs/models.md); --model bundled is the small model of the demo, for trials"
        )

    with large_import():
        from hnclip.training.log import METRICS, read_metrics
        from hnclip.training.runs import resume, saved_config, train

    if options.resume is not None:
        given = [
            flag
            for flag in ("--recipe", "--config", "--objective", "--global", "--fidelity", "--out")
            if _value(arguments, flag) is not None
        ]
        if given or options.training != base:
            raise ValueError(
                "--resume continues with the run's own configuration: only --device, --threads, --speed.*, "
                "--save-minutes, --evaluate-batch and --tensorboard may change"
            )
        result = resume(options.resume, options.run)
    else:
        result = train(options.training, options.run)
    if os.environ.get("RANK", "0") != "0":  # of the processes of torchrun, rank 0 prints the result
        return
    if options.output.json:
        print(json.dumps({**vars(result), "out": str(result.out)}))
        return
    print(f"trained {result.steps} steps in {duration(result.seconds)}")
    for name, found in (("best", result.best), ("last", result.last)):
        print(f"  {name}: epoch {found['epoch']}, validation R@1 {found['mean_R@1']:.1f}   {result.out / name}")
    if measured := read_metrics(result.out, "gradients"):
        from hnclip.analysis.gradients import gradient_summary

        print(f"gradients, in {result.out / METRICS}:\n{gradient_summary(measured).to_text()}")
    if result.best["epoch"] == 0:
        print("no epoch was better on the validation split than the model before training (epoch 0), which is best/")
    has_test = any(entry["test_split"] for entry in read_metrics(result.out, "data"))
    out = shlex.quote(str(result.out))
    config = saved_config(result.out)
    split = [] if has_test else ["--split", "validation"]
    words = ["--data", config.data, *split, *option_words(config.read, ReadConfig(), "read.")]
    print(f"evaluate: hnclip eval --model {out} {shlex.join(words)}")
    print(f"search:   hnclip index IMAGES --model {out} --out images.hnc")
    print(f"resume:   hnclip train --resume {out}   (after an interruption)")


def _default_recipe(arguments: Sequence[str]) -> str:
    """The demo's settings for the bundled model, the paper's for any other; adapters have their own."""
    adapt = _value(arguments, "--adapt.method")
    if adapt in ("lora", "dora"):
        return adapt
    return "demo" if _value(arguments, "--model", "bundled") == "bundled" else "paper"


def _apply_short_options(base: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    """The configuration with the method, fidelity and global loss of the short options, before other options apply."""
    from hnclip.config import Fidelity, GlobalLoss
    from hnclip.objectives.registry import METHOD_CHOICES, apply_method, with_fidelity, with_global

    for short, long in (("--global", "--objective.global-loss"), ("--fidelity", "--objective.fidelity")):
        if _value(arguments, short) is not None and _value(arguments, long) is not None:
            raise ValueError(f"{short} and {long} are the same: give one of them")
    fidelity = _value(arguments, "--fidelity", _value(arguments, "--objective.fidelity"), get_args(Fidelity))
    chosen = _value(arguments, "--global", allowed=get_args(GlobalLoss))
    source = base.objective.margin_source
    if (method := _value(arguments, "--objective", allowed=METHOD_CHOICES)) is not None:
        base = apply_method(base, method, fidelity)
    elif fidelity is not None:
        base = with_fidelity(base, fidelity)
    return base if chosen is None else with_global(base, chosen, margin_source=source)


def _eval(arguments: Sequence[str]) -> None:
    from hnclip.options import Eval

    options = _parse(Eval, "eval", arguments)

    with large_import():
        from hnclip.analysis.captions import caption_similarity
        from hnclip.evaluation.retrieval import evaluate_models, open_task
        from hnclip.models.load import load, models_of
        from hnclip.report.document import check_format
        from hnclip.report.results import evaluation_report
        from hnclip.util.device import find_device

    files = [Path(path) for given in options.out for path in given]
    for path in files:
        check_format(path)
    device = find_device(options.device)
    models = [
        (name, lambda path=path: load(path, **vars(options.opening)).to(device))
        for given in options.model or [["bundled"]]
        for model in given
        for name, path in models_of(model)
    ]
    sources = _sources([source for given in options.data or [["scenes/park"]] for source in given])
    tasks = [open_task(source, options.split, options.read) for source in sources]
    for task in tasks:
        if task.split == "all" and options.split is None:
            log.warning(
                f"{task.data.name} declares no splits: all {len(task.records):,} records are used. For a model "
                "that was trained on them, --split validation uses only the records that training held out."
            )
    with progress("evaluating, batches") as bar:
        results = evaluate_models(
            models,
            tasks,
            options.read,
            batch=options.batch,
            queries=options.queries,
            top=options.top,
            caption_similarity=caption_similarity,
            progress=bar.iterate,
        )
    report = evaluation_report(results, with_paper=options.paper)
    for path in files:
        report.write_file(path)
    print(json.dumps(report.data) if options.output.json else report.to_text())


def _compare(arguments: Sequence[str]) -> None:
    from hnclip.options import Compare

    options = _parse(Compare, "compare", arguments)

    from hnclip.evaluation.compare import compare_queries, read_queries
    from hnclip.report.results import comparison_report

    a, b = read_queries(options.a), read_queries(options.b)
    try:
        found = compare_queries(a, b, ks=options.k)
    except ValueError as error:
        raise ValueError(f"{error} (a is {options.a}, b is {options.b})") from error
    if options.output.json:
        print(json.dumps([comparison.to_dict() for comparison in found]))
        return
    print(comparison_report(found, str(options.a), str(options.b)).to_text())


DATA = """usage: hnclip data check DATA [options]        look for problems in your data before training
       hnclip data cache [options]             list or delete cached images
       hnclip data check --help, hnclip data cache --help for the options
"""


def _data(arguments: Sequence[str]) -> int:
    kind, *rest = arguments or [""]
    if kind not in ("check", "cache"):
        asked = kind in ("-h", "--help")
        print(DATA, end="", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    return _check(rest) if kind == "check" else _cache(rest)


def _cache(arguments: Sequence[str]) -> int:
    from hnclip.options import Cache

    options = _parse(Cache, "data cache", arguments)

    from hnclip.data.image_cache import cache_directory, delete_cache, list_caches
    from hnclip.util.text import readable_size

    directory = cache_directory(options.cache)
    caches = list_caches(directory)
    deleted = [cache for cache in caches if options.delete == "all" or (options.delete and not cache.geometry)]
    for cache in deleted:
        delete_cache(cache)
    if options.output.json:
        rows = [{**vars(cache), "path": str(cache.path), "deleted": cache in deleted} for cache in caches]
        print(json.dumps({"directory": str(directory), "caches": rows}))
        return 0
    for cache in caches:
        about = f"{cache.geometry}: {cache.images:,} images" if cache.geometry else "of an earlier version, not used"
        done = "deleted " if cache in deleted else ""
        print(f"{done}{cache.path}   {about}, {readable_size(cache.bytes)}")
    if not caches:
        print(f"{directory} holds no cached images")
    elif not options.delete and not all(cache.geometry for cache in caches):
        print("hnclip data cache --delete old deletes those of earlier versions")
    return 0


def _check(arguments: Sequence[str]) -> int:
    from hnclip.options import Check

    options = _parse(Check, "data check", arguments)

    from hnclip.data.check import check_data
    from hnclip.data.sources import open_data
    from hnclip.report.data_check import check_report

    data = open_data(options.data, options.read)
    text_transform = image_transform = None
    if options.model is not None:
        from hnclip.models.load import load_transforms  # imports transformers, which takes seconds

        text_transform, image_transform = load_transforms(options.model, **vars(options.opening))
    result = check_data(data, text_transform=text_transform, image_transform=image_transform, images=options.images)
    report = check_report(result, options.listed)
    print(json.dumps(report.data) if options.output.json else report.to_text())
    return 1 if result.errors else 0


def _diagnose(arguments: Sequence[str]) -> None:
    from hnclip.options import Diagnose

    options = _parse(Diagnose, "diagnose", arguments)

    from hnclip.analysis.diagnose import diagnose

    found = diagnose(options)
    print(json.dumps(found.to_dict()) if options.output.json else found.to_text())


def _sources(given: Sequence[str]) -> list[str]:
    """Names separated by spaces or commas; an existing path may contain commas."""
    return [part for name in given for part in ([name] if Path(name).exists() else name.split(",")) if part]


def _convert(arguments: Sequence[str]) -> None:
    from hnclip.options import Convert

    options = _parse(Convert, "convert", arguments)
    _check_free(options.out, options.replace)

    from hnclip.models.load import load, save

    model = load(options.model, **vars(options.opening))
    log.info(f"recognised: {model.source}")
    if model.untrained_projections:
        log.info("the projections of the joined towers are untrained; train them with hnclip train --model")
    result = {"model": options.model, "recognised": model.source, "out": str(options.out), "to": options.to}
    if options.to == "hf":
        save(model, options.out)
    else:
        from hnclip.export import export_onnx, immich_name

        result |= vars(export_onnx(model, options.out, layout=options.to))
        if options.to == "immich":
            result["immich_name"] = immich_name(model)
    if options.output.json:
        print(json.dumps({**result, "context": model.context, "image_size": model.image_size}))
        return
    print(f"written: {options.out}")


def _index(arguments: Sequence[str]) -> None:
    from hnclip.search_options import Index

    options = _parse(Index, "index", arguments)

    with large_import():
        from hnclip.search.indexer import build_index

    result = build_index(**_settings(options))
    print(json.dumps(result.to_dict()) if options.output.json else result.to_text())


def _search(arguments: Sequence[str]) -> None:
    from hnclip.search_options import Search

    options = _parse(Search, "search", arguments)

    from hnclip.search.searcher import open_index

    text = _standard_input() if options.text == "-" else options.text
    image = None
    if options.image is not None:
        from hnclip.data.image_sources import FileImage

        image = FileImage(options.image).load()
    with open_index(options.index, engine=options.engine, model=options.model, device=options.device) as index:
        result = index.search(
            text,
            image=image,
            k=options.k,
            find=options.find,
            rerank=options.rerank,
            explain=options.explain,
            name=str(options.image),
        )
    print(json.dumps(result.to_dict()) if options.output.json else result.to_text())


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is no text in {(sys.stdin.encoding or '').upper()}: {error}") from error


def _serve(arguments: Sequence[str]) -> None:
    from hnclip.search_options import Serve

    options = _parse(Serve, "serve", arguments)

    from hnclip.search.serve.run import serve

    serve(**_settings(options))


def _settings(options: Any) -> dict[str, Any]:
    """The options of a command as arguments of the function that it calls."""
    return {name: value for name, value in vars(options).items() if name != "output"}


def _interpolate(arguments: Sequence[str]) -> None:
    from hnclip.options import Interpolate

    options = _parse(Interpolate, "interpolate", arguments)
    if len(options.alpha) == 1 and options.out is None:
        raise ValueError("one --alpha without --out would do nothing: give --out, or several values to compare")
    if options.out is not None:
        _check_free(options.out, options.replace)

    from hnclip.evaluation.retrieval import drop_unusable, evaluate_task, open_task
    from hnclip.models.load import load, save
    from hnclip.models.model_card import Training
    from hnclip.models.parameters import interpolate, match_base
    from hnclip.report.document import Report, Section
    from hnclip.report.results import recall_table
    from hnclip.util.device import find_device

    device = find_device(options.device)
    base = load(options.base, **vars(options.opening)).to(device)
    tuned, mixed = load(options.tuned).to(device), load(options.tuned).to(device)
    match_base(base, tuned)
    best, results = options.alpha[0], {}
    if len(options.alpha) > 1:
        with progress("encoding batches") as bar:
            opened = {source: open_task(source, "validation", options.read) for source in options.data}
            tasks = {source: drop_unusable(task, mixed, options.read) for source, task in opened.items()}
            for alpha in options.alpha:
                model = interpolate(mixed, base, tuned, alpha)
                results[alpha] = {
                    source: evaluate_task(
                        "", model, task, options.read, intervals=False, batch=options.batch, progress=bar.iterate
                    ).metrics
                    for source, task in tasks.items()
                }
        best = max(results, key=lambda alpha: fmean(found["mean_R@1"] for found in results[alpha].values()))
    if options.out is not None:
        interpolate(mixed, base, tuned, best)
        mixed.provenance = Training(
            base=f"{options.base}, interpolated with {options.tuned}",
            data=f"{', '.join(options.data)} (validation, to choose α)" if results else "none",
            objective={"alpha": best},
            command=shlex.join(
                ["hnclip", "interpolate", options.base, options.tuned, "--alpha", f"{best:g}", "--out", "mixed"]
            ),
            metrics={f"validation of {data}": found for data, found in results.get(best, {}).items()},
        )
        save(mixed, options.out)
    if options.output.json:
        out = None if options.out is None else str(options.out)
        print(json.dumps({"alpha": best, "out": out, "split": "validation", "results": results}))
        return
    if results:
        tables = {
            data: recall_table({f"α {alpha:g}": found[data] for alpha, found in results.items()})
            for data in options.data
        }
        sections = [Section(f"{data}, validation split", [table]) for data, table in tables.items()]
        print(Report("Interpolated models", [], sections).to_text())
        print(f"best mean R@1: α {best:g}")
    if options.out is not None:
        print(f"written: {options.out}")


def _encode(arguments: Sequence[str]) -> None:
    from hnclip.options import Encode

    parsed = _parse(Encode, "encode", arguments)

    with large_import():
        import torch

        from hnclip.encode.shards import encode

    if parsed.encoding.threads:
        torch.set_num_threads(parsed.encoding.threads)
    result = encode(parsed.encoding)
    print(json.dumps(result.to_dict()) if parsed.output.json else result.to_text())


def _prepare(arguments: Sequence[str]) -> int:
    from hnclip.options import PrepareRegions, PrepareText

    kinds = {"regions": PrepareRegions, "text": PrepareText}
    kind, *rest = arguments or ["--help"]
    if kind not in kinds:
        asked = kind in ("-h", "--help")
        wrong = "" if asked else f"hnclip prepare: there is no kind {kind!r}\n\n"
        print(f"{wrong}{PREPARE}", end="", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    options = _parse(kinds[kind], f"prepare {kind}", rest)

    from hnclip.prepare.run import prepare

    result = prepare(options)
    print(json.dumps(result.to_dict()) if options.output.json else result.to_text())
    return 0


def _study(arguments: Sequence[str]) -> int:
    from hnclip.options import Study

    options = _parse(Study, "study", arguments)
    if options.name == "list":
        from hnclip.studies.catalogue import STUDIES

        listed = [{"name": name, "title": one.title, "question": one.question} for name, one in STUDIES.items()]
        lines = [f"{name:<12}  {one.title}. {one.question}" for name, one in STUDIES.items()]
        print(json.dumps(listed) if options.output.json else "\n".join(lines))
        return 0

    from hnclip.studies.runner import study_command

    outcome = study_command(options)
    print(json.dumps(outcome.to_dict()) if options.output.json else outcome.text)
    for failure in outcome.failures:
        log.error(f"hnclip study: {failure}")
    return 1 if outcome.failures else 0


def _demo(arguments: Sequence[str]) -> None:
    from hnclip.options import Demo

    options = _parse(Demo, "demo", arguments)

    from hnclip.demo import demo

    report = demo(options.out, seed=options.seed)
    print(json.dumps(report.data) if options.output.json else report.to_text())
    log.info(f"report: {options.out / 'report.html'}")


def _bench(arguments: Sequence[str]) -> None:
    from hnclip.bench import benchmarks, run_benchmark

    if arguments and arguments[0] not in ("-h", "--help"):
        print(run_benchmark(arguments[0], arguments[1:]))
        return
    names = benchmarks()
    print("usage: hnclip bench NAME [options]        hnclip bench NAME --help for the options\n")
    print("\n".join(f"  {name:<{max(map(len, names))}}  {about}" for name, about in names.items()))


def _check_free(out: Path, replace: bool) -> None:
    """Refuse to overwrite existing files, before any work is done."""
    if out.exists() and not replace and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already; choose another directory or pass --replace")


def _parse(kind: type, command: str, arguments: Sequence[str], **extra: Any) -> Any:
    """Parse the options of a command and configure logging."""
    import tyro

    try:
        options = tyro.cli(kind, prog=f"hnclip {command}", args=arguments, **extra)
    except ValueError as error:  # values that the dataclasses of a command refuse together
        log.error(f"hnclip {command}: {_text(error)}")
        raise SystemExit(2) from error
    output = options.output
    configure_logging(quiet=output.quiet or output.json, log_file=output.log_file)
    return options


def _value(arguments: Sequence[str], flag: str, default: Any = None, allowed: Any = None) -> Any:
    """The value of a flag that determines the defaults of other options, and so is read before they are parsed. A value
    that is not allowed is ignored here; the parser reports it."""
    found = default
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == flag:  # the parser takes both spellings, and the last of several values
            found = value if equals else next(iter(arguments[index + 1 : index + 2]), default)
    return found if allowed is None or found in allowed else default


CONTINUE = {
    "train": "continue with hnclip train --resume RUN, where RUN is the directory of the run",
    "demo": "the same command continues",
    "diagnose": "the same command continues",
    "study": "the same command continues",
    "encode": "the same command continues",
    "index": "the same command continues",
    "prepare": "the same command continues",
    "bench": "nothing was written",
}
COMMANDS: dict[str, Callable[[Sequence[str]], int | None]] = {
    "demo": _demo,
    "train": _train,
    "eval": _eval,
    "compare": _compare,
    "data": _data,
    "prepare": _prepare,
    "study": _study,
    "diagnose": _diagnose,
    "convert": _convert,
    "encode": _encode,
    "index": _index,
    "search": _search,
    "serve": _serve,
    "interpolate": _interpolate,
    "bench": _bench,
}
