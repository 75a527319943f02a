"""The `hnclip` command: parses, calls, prints.

Nothing heavy is imported before a command needs it, so help answers at once.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

HELP = """usage: hnclip COMMAND [options]        hnclip COMMAND --help for the options

image–text retrieval for long, nearly identical captions

  demo         fine-tune the bundled model with InfoNCE and with HN-CLIP, compare, write a report
  train        fine-tune a model; continue a stopped run with --resume RUN
  eval         retrieval metrics of a model on a data set
  convert      open a model in any layout, write it as a Hugging Face directory or as ONNX
  interpolate  weights between a base model and a fine-tuned one, against forgetting
  pretrain     make the bundled model anew

  --version    print the version
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 when it worked, 1 when it failed with a message, 2 for a wrong call, 130 when interrupted."""
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
    try:
        COMMANDS[command](rest)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"hnclip {command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"hnclip {command}: interrupted; {CONTINUE.get(command, 'nothing was lost')}", file=sys.stderr)
        return 130
    return 0


def _train(arguments: Sequence[str]) -> None:
    from hnclip import recipes
    from hnclip.config import TrainConfig, from_json
    from hnclip.options import Train

    base = recipes.RECIPES[_value(arguments, "--recipe", "demo", recipes.RECIPES)]()
    if (path := _value(arguments, "--config")) is not None:
        base = from_json(TrainConfig, Path(path).read_text(encoding="utf-8"))
    options = _parse(Train, "train", arguments, Train(run=base))

    from hnclip.train.loop import resume, train

    report = _warn if options.json or options.quiet else _say
    quiet = options.quiet or options.json
    if options.resume is not None:
        result = resume(options.resume, quiet=quiet, report=report)
    else:
        result = train(options.run, quiet=quiet, report=report)
    if options.json:
        print(json.dumps({**vars(result), "out": str(result.out)}))
        return
    print(f"trained {result.steps} steps in {result.seconds:.0f} s")
    for name, found in (("best", result.best), ("last", result.last)):
        print(f"  {name}: epoch {found['epoch']}, validation R@1 {found['mean_R@1']:.1f}   {result.out / name}")
    print(f"next: hnclip eval --model {result.out / 'best'}")


def _eval(arguments: Sequence[str]) -> None:
    from hnclip.options import Eval

    options = _parse(Eval, "eval", arguments)

    from hnclip.analysis.geometry import caption_geometry
    from hnclip.data.sources import open_records
    from hnclip.evaluate import format_results
    from hnclip.evaluate.retrieval import evaluate, prepare_gallery
    from hnclip.files import replace_file
    from hnclip.models.load import load
    from hnclip.train.log import progress_bar
    from hnclip.train.loop import pick_device

    records = open_records(options.data, options.split)
    model = load(options.model, **vars(options.opening)).to(pick_device(options.device))
    gallery = prepare_gallery(records, model)
    with progress_bar("encoding batches", quiet=options.quiet or options.json) as bar:
        found = evaluate(model, gallery, intervals=True, batch=options.batch, progress=bar.walk)
    geometry = caption_geometry(found.text, gallery.owner)
    metrics = {
        "model": options.model,
        "data": options.data,
        "split": options.split,
        "images": len(records),
        "captions": len(gallery.captions),
        "truncated_captions": gallery.truncated,
        "caption_similarity": geometry._asdict(),
        **found.metrics.to_dict(),
    }
    if options.out is not None:
        ranks = {
            "text_to_image": found.ranks.text_to_image.tolist(),
            "image_to_text": found.ranks.image_to_text.tolist(),
        }
        with replace_file(options.out) as partial:
            partial.write_text(json.dumps({**metrics, "ids": [r.id for r in records], "ranks": ranks}) + "\n")
    if options.json:
        print(json.dumps(metrics))
        return
    print(f"{options.model} on {options.data} {options.split}: {len(records)} images, {len(gallery.captions)} captions")
    if gallery.truncated:
        print(f"warning: {gallery.truncated} captions are cut at {model.context} tokens")
    print(f"caption similarity: {geometry.pairwise:.2f} on average, {geometry.hardest:.2f} to the hardest companion")
    print(format_results({options.model: metrics}, ks=(1, 5, 10, 25, 50)))


def _convert(arguments: Sequence[str]) -> None:
    from hnclip.options import Convert

    options = _parse(Convert, "convert", arguments)
    _check_free(options.out, options.replace)

    from hnclip.models.load import load, save

    model = load(options.model, **vars(options.opening))
    _say(f"recognised: {model.source}")
    result = {"model": options.model, "recognised": model.source, "out": str(options.out), "to": options.to}
    if options.to == "hf":
        save(model, options.out)
    else:
        from hnclip.export.to_onnx import export_onnx

        check = export_onnx(model, options.out, layout=options.to, report=_say)
        result |= vars(check)
    if options.json:
        print(json.dumps({**result, "context": model.context, "image_size": model.image_size}))
        return
    print(f"written: {options.out}")


def _interpolate(arguments: Sequence[str]) -> None:
    from hnclip.options import Interpolate

    options = _parse(Interpolate, "interpolate", arguments)
    if len(options.alpha) == 1 and options.out is None:
        raise ValueError("one --alpha without --out would do nothing: give --out, or several values to compare")
    if options.out is not None:
        _check_free(options.out, options.replace)

    from hnclip.evaluate import format_results
    from hnclip.evaluate.sweep import sweep
    from hnclip.models.card import Training
    from hnclip.models.interpolate import interpolate, match_base
    from hnclip.models.load import load, save
    from hnclip.train.log import progress_bar
    from hnclip.train.loop import pick_device

    device = pick_device(options.device)
    base = load(options.base, **vars(options.opening)).to(device)
    tuned, mixed = load(options.tuned).to(device), load(options.tuned).to(device)
    match_base(base, tuned)
    best, results = options.alpha[0], {}
    if len(options.alpha) > 1:
        with progress_bar("encoding batches", quiet=options.quiet or options.json) as bar:
            models = ((alpha, interpolate(mixed, base, tuned, alpha)) for alpha in options.alpha)
            results = sweep(models, options.data, batch=options.batch, progress=bar.walk)
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
    if options.json:
        out = None if options.out is None else str(options.out)
        print(json.dumps({"alpha": best, "out": out, "split": "validation", "results": results}))
        return
    for data in options.data if results else ():
        print(f"{data}, validation split")
        print(format_results({f"α {alpha:g}": found[data] for alpha, found in results.items()}))
    if results:
        print(f"best mean R@1: α {best:g}")
    if options.out is not None:
        print(f"written: {options.out}")


def _demo(arguments: Sequence[str]) -> None:
    from hnclip.options import Demo

    options = _parse(Demo, "demo", arguments)

    from hnclip.demo import demo

    quiet = options.quiet or options.json
    results = demo(options.out, seed=options.seed, quiet=quiet, report=_warn if quiet else _say)
    print(json.dumps(results.to_dict()) if options.json else results.to_text())


def _pretrain(arguments: Sequence[str]) -> None:
    from hnclip.options import Pretrain

    options = _parse(Pretrain, "pretrain", arguments)

    from hnclip.train.pretrain import PretrainConfig, brief, pretrain

    config = PretrainConfig(out=options.out, seed=options.seed)
    model = pretrain(brief(config, options.brief) if options.brief else config, report=_say)
    print(f"the model is in {model}")


def _check_free(out: Path, replace: bool) -> None:
    """Before any work is done: nothing of the user's is overwritten unasked."""
    if out.exists() and not replace and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already; choose another directory or pass --replace")


def _parse(kind: type, command: str, arguments: Sequence[str], default: Any = None) -> Any:
    import tyro

    extra = {} if default is None else {"default": default}
    return tyro.cli(kind, prog=f"hnclip {command}", args=arguments, **extra)


def _value(arguments: Sequence[str], flag: str, default: Any = None, allowed: Any = None) -> Any:
    """The value behind a flag that decides the defaults of all others, so it is read before they are parsed. A value
    that is not allowed is left for the parser, which says so properly."""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == flag:
            found = value if equals else next(iter(arguments[index + 1 : index + 2]), default)
            return found if allowed is None or found in allowed else default
    return default


def _say(text: str) -> None:
    """Progress goes to standard error; standard output is for results."""
    print(text, file=sys.stderr, flush=True)


def _warn(text: str) -> None:
    """Say only what must not be overlooked."""
    if text.startswith("warning:"):
        _say(text)


CONTINUE = {
    "train": "continue with hnclip train --resume RUN, RUN being the directory of the run",
    "demo": "the same command continues where it was",
    "pretrain": "the same command continues where it was",
}
COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "demo": _demo,
    "train": _train,
    "eval": _eval,
    "convert": _convert,
    "interpolate": _interpolate,
    "pretrain": _pretrain,
}
