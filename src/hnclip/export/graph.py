"""One tower as an ONNX graph: traced by torch, without traces of the machine, compared with what torch computes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

OPSET = 18  # what torch writes without converting; onnxruntime reads it since 1.14
TOLERANCE = 1e-4  # fp32 on both sides; what is wrong differs by far more
LARGEST_FILE = 1_500_000_000  # bytes of weights in the graph itself; protobuf ends at 2 GB, the rest needs room


def write_graph(
    which: str, tower: nn.Module, feed: dict[str, Tensor], file: Path, *, length: int | None = None
) -> None:
    """One tower as a graph. Weights beyond `LARGEST_FILE` go into a file beside it, with `.data` after its name.

    Args:
        which: image or text.
        feed: example inputs by name, a batch of more than one.
        length: the longest text, where the second dimension may change.
    """
    dynamic = {0: torch.export.Dim("batch")}
    if length is not None:
        dynamic[1] = torch.export.Dim("length", max=length)
    arguments, shapes = tuple(feed.values()), tuple(dynamic for _ in feed)
    with _silence(), torch.no_grad():
        try:
            # In two steps: `torch.onnx.export` alone would answer a batch that cannot change with a fixed one.
            program = _trace(tower, arguments, shapes)
            graph: Any = torch.onnx.export(
                program,
                arguments,
                dynamo=True,
                input_names=list(feed),
                output_names=[f"{which}_embeds"],
                dynamic_shapes=shapes,  # for their names
                opset_version=OPSET,
                verbose=False,
            )
        except Exception as error:  # both steps raise many types
            reason = str(error).partition("\n")[0]
            raise ValueError(f"the {which} tower cannot be written as ONNX: {reason}") from error
        _strip(graph.model)
        weights = sum(value.const_value.nbytes for value in graph.model.graph.initializers.values())
        file.parent.mkdir(exist_ok=True)
        graph.save(file, external_data=weights > LARGEST_FILE)


def _trace(tower: nn.Module, arguments: tuple[Tensor, ...], shapes: Any) -> torch.export.ExportedProgram:
    try:
        return torch.export.export(tower, arguments, dynamic_shapes=shapes, strict=False)
    except Exception:  # slower, but it follows Python that the other takes for constant, such as len() of a batch
        return torch.export.export(tower, arguments, dynamic_shapes=shapes, strict=True)


def _strip(model: Any) -> None:
    """Without the notes of the exporter: they hold the traces, paths and all, of the machine it ran on."""
    from onnx_ir import traversal

    for part in (model, model.graph, *model.functions.values()):
        part.metadata_props.clear()
        part.doc_string = None
    for graph in (model.graph, *model.functions.values()):
        values = [*graph.inputs, *graph.outputs]
        for node in traversal.RecursiveGraphIterator(graph):
            node.metadata_props.clear()
            node.doc_string = None
            values += node.outputs
        for value in values:
            value.metadata_props.clear()
            value.doc_string = None
    for value in model.graph.initializers.values():
        value.metadata_props.clear()


def compare(which: str, file: Path, feeds: Sequence[dict[str, Tensor]], expected: Sequence[Tensor]) -> float:
    """The largest difference between what the file computes and what torch has computed; an error if it is large."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    differences = []
    for feed, vectors in zip(feeds, expected):
        found = session.run(None, {name: tensor.numpy() for name, tensor in feed.items()})[0]
        differences.append(np.abs(found - vectors.numpy()).max())
    largest = float(np.max(differences))
    if not largest <= TOLERANCE:  # not a number is no match either
        raise ValueError(
            f"the {which} tower as ONNX differs from torch by {largest:.1e}, more than {TOLERANCE:.0e}; nothing was "
            "written"
        )
    return largest


@contextmanager
def _silence() -> Iterator[None]:
    """No warnings and log lines from torch's exporter: what it could not do, the comparison with torch finds."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
