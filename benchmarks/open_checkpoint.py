"""Memory and time to open Long-CLIP-L from one file of weights: hnclip beside the usual torch.load + load_state_dict.

    python benchmarks/open_checkpoint.py                    # the true size, 1.7 GB twice on disk
    python benchmarks/open_checkpoint.py --megabytes 150    # fewer layers and words, the same widths

Each way opens the file in a process of its own, reads every weight once, then encodes one picture and one full caption.
Memory is the rise of the process's peak resident size since before opening, imports excluded, divided by the size of
the file. The file was written a moment ago, so the disk's speed does not show in the seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "models")]

from openai_twin import OpenAITwin  # noqa: E402, it lives with the tests

WAYS = {
    "hnclip": "hnclip: read_checkpoint + build_clip",
    "usual": "peer: torch.load or safetensors' load_file + load_state_dict",
}
FULL = 1_711  # megabytes of Long-CLIP-L in fp32


def sizes(megabytes: float) -> dict[str, int]:
    """Long-CLIP-L with a share of its layers and of its vocabulary."""
    share = min(1.0, megabytes / FULL)
    return {
        "image_size": 224,
        "patch": 14,
        "vision_width": 1024,
        "vision_layers": max(1, round(24 * share)),
        "text_width": 768,
        "text_layers": max(1, round(12 * share)),
        "vocabulary": max(600, round(49408 * share)),
        "joint": 768,
    }


def write(directory: Path, megabytes: float) -> list[Path]:
    """Random weights in OpenAI's layout, as `torch.save` and as safetensors write them."""
    from safetensors.torch import save_file

    weights = OpenAITwin(**sizes(megabytes)).state_dict()
    files = [directory / "longclip.pt", directory / "longclip.safetensors"]
    torch.save(weights, files[0])
    save_file(weights, files[1])
    return files


def measure(way: str, file: Path, megabytes: float) -> dict[str, Any]:
    """Open `file` in a fresh process."""
    command = [sys.executable, __file__, "--megabytes", str(megabytes), "--child", way, str(file)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


def child(way: str, file: Path, megabytes: float) -> dict[str, Any]:
    """What the fresh process does."""
    import transformers.models.clip.modeling_clip  # noqa: F401, importing is not opening
    from safetensors.torch import load_file

    from hnclip.models.openai_layout import build_clip
    from hnclip.models.weights import read_checkpoint

    before, start = restart_peak(), time.perf_counter()
    if way == "hnclip":
        model: Any = build_clip(read_checkpoint(file))[0]
    else:
        weights = load_file(file) if file.suffix == ".safetensors" else torch.load(file, map_location="cpu")
        model = OpenAITwin(**sizes(megabytes), seed=None)
        model.load_state_dict(weights)
        del weights
    seconds, opened = time.perf_counter() - start, peak() - before
    with torch.no_grad():
        assert sum(weight.sum().item() for weight in model.parameters())  # every byte is read once
    used, start_encoding = peak() - before, time.perf_counter()
    vocabulary = sizes(megabytes)["vocabulary"]
    ids = torch.full((1, 248), 5)
    ids[:, -1] = vocabulary - 1
    pixels = torch.zeros(1, 3, 224, 224)
    with torch.no_grad():
        model(pixel_values=pixels, input_ids=ids) if way == "hnclip" else model(pixels, ids)
    size = file.stat().st_size
    return {
        "way": way,
        "file": file.suffix,
        "megabytes": size / 1e6,
        "open_seconds": seconds,
        "open_memory": opened / size,
        "use_memory": used / size,
        "encode_seconds": time.perf_counter() - start_encoding,
        "encode_memory": (peak() - before) / size,
    }


def restart_peak() -> int:
    """Forget the peak so far where the system allows it; the resident bytes now, or else the peak of the imports."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """The largest resident size of this process, in bytes."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        import resource

        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return largest if sys.platform == "darwin" else largest * 1024
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=FULL, help="size of the model, at most %(default)s")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--child", nargs=2, metavar=("WAY", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        way, file = options.child
        print(json.dumps(child(way, Path(file), options.megabytes)))
        return
    with tempfile.TemporaryDirectory() as directory:
        files = write(Path(directory), options.megabytes)
        rows = [measure(way, file, options.megabytes) for file in files for way in WAYS]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'':60} {'file':>12}      MB   open s       memory   all read     encode s       memory")
    for row in rows:
        print(
            f"{WAYS[row['way']]:60} {row['file']:>12} {row['megabytes']:7.0f} {row['open_seconds']:8.2f} "
            f"{row['open_memory']:12.2f} {row['use_memory']:10.2f} {row['encode_seconds']:12.2f} "
            f"{row['encode_memory']:12.2f}"
        )


if __name__ == "__main__":
    main()
