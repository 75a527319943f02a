"""Properties of the embedded benchmark, measured with zero-shot retrieval and InfoNCE alone (hnclip docs scenes).

    python scripts/scenes_properties.py --out runs/properties

Fine-tunes the bundled model on each domain with InfoNCE at every rate of a small grid. The rate is chosen on the
validation splits, for both domains together. No other loss is run. Finished runs are reused.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import mean

from hnclip.analysis.captions import caption_similarity
from hnclip.config import RunOptions
from hnclip.data.scenes import scene_records
from hnclip.data.scenes.world import DOMAINS
from hnclip.evaluation.ranks import ARROWS
from hnclip.evaluation.retrieval import evaluate, prepare_gallery
from hnclip.models.load import load
from hnclip.recipes import demo
from hnclip.training.log import read_metrics
from hnclip.training.runs import TrainResult, train_or_continue
from hnclip.util.console import configure_logging
from hnclip.util.tables import markdown_table

RATES = (1e-4, 3e-4, 1e-3, 3e-3)
HEADS = ["domain", "model", "validation R@1", "T→I R@1", "T→I R@10", "I→T R@1", "I→T R@10", "similarity", "hardest"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/properties"), help="directory of the runs")
    parser.add_argument("--model", default="bundled", help="the model before fine-tuning")
    parser.add_argument("--domains", nargs="+", default=sorted(DOMAINS), choices=sorted(DOMAINS))
    parser.add_argument("--threads", type=int, default=0, help="processor threads; 0 leaves torch's choice")
    options = parser.parse_args()
    configure_logging()

    runs = {(domain, lr): _trained(options, domain, lr) for domain in options.domains for lr in RATES}
    best = {key: run.best for key, run in runs.items()}
    validation = {lr: mean(best[domain, lr]["mean_R@1"] for domain in options.domains) for lr in RATES}
    chosen = max(RATES, key=validation.__getitem__)
    rows = []
    for domain in options.domains:
        rows.append([domain, "zero-shot", "", *_test(domain, options.model)])
        for lr in RATES:
            measured = _test(domain, str(runs[domain, lr].out / "best")) if lr == chosen else [""] * 6
            rows.append([domain, f"InfoNCE, {lr:g}", f"{best[domain, lr]['mean_R@1']:.1f}", *measured])
    print(markdown_table(HEADS, rows))
    print(f"\nchosen rate: {chosen:g} (mean validation R@1 {validation[chosen]:.1f})")
    for domain in options.domains:
        shares = ", ".join(f"{share:.2f}" for share in _saturation(runs[domain, chosen].out))
        print(f"{domain}: share of micro-batches with InfoNCE below 0.001 by epoch: {shares}")


def _trained(options: argparse.Namespace, domain: str, lr: float) -> TrainResult:
    config = demo("infonce")
    config = replace(config, data=f"scenes/{domain}", model=options.model, optim=replace(config.optim, lr=lr))
    return train_or_continue(config, RunOptions(out=options.out / f"{domain}-{lr:g}", threads=options.threads))


def _test(domain: str, model: str) -> list[str]:
    """Recalls on the test split, and how similar its captions are to the model."""
    encoder = load(model)
    gallery = prepare_gallery(scene_records(domain, "test"), encoder)
    found = evaluate(encoder, gallery)
    similarity = caption_similarity(found.text, gallery.owner)
    recalls = [found.metrics[direction][f"R@{k}"] for direction in ARROWS for k in (1, 10)]
    return [f"{recall:.1f}" for recall in recalls] + [f"{value:.2f}" for value in similarity.values()]


def _saturation(run: Path) -> list[float]:
    """Mean share of saturated micro-batches of each epoch."""
    shares = defaultdict(list)
    for entry in read_metrics(run, "step"):
        shares[entry["epoch"]].append(entry["saturated"])
    return [mean(shares[epoch]) for epoch in sorted(shares)]


if __name__ == "__main__":
    main()
