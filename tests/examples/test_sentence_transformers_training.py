from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import sentence_transformers_training as example
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers_training import CachedHardNegativeRankingLoss, HardNegativeRankingLoss
from torch.nn.parallel import DistributedDataParallel

import hnclip
from hnclip.data.scenes import scene_records

WORLD, COUNT = 2, 8
SAME = torch.tensor([[0, 0], [1, 1], [0, 2], [3, 3], [4, 1], [5, 5], [6, 6], [7, 7]])  # an image and a caption twice


@pytest.fixture
def model(no_dropout_directory):
    return open_model(no_dropout_directory)


def open_model(directory):
    return SentenceTransformer(str(directory), device="cpu", local_files_only=True)


def columns():
    records = scene_records("park", "train", families=COUNT // 4, members=4)
    return [record.image.load() for record in records], [record.captions[0] for record in records]


def batch(model, rows=slice(None)):
    """What the trainer hands to a loss."""
    return [model.preprocess(column[rows]) for column in columns()]


def gradients(loss, features, labels=None, share=1.0):
    parameters = dict(loss.model.named_parameters())
    for parameter in parameters.values():
        parameter.grad = None
    value = loss(features, labels)
    (share * value).backward()
    found = {name.removeprefix("module."): p.grad for name, p in parameters.items() if p.grad is not None}
    assert len(found) >= len(parameters) - 1  # all but the scale
    return value.item(), found


def assert_same(left, right):
    assert left[0] == pytest.approx(right[0], rel=1e-5)
    torch.testing.assert_close(left[1], right[1], rtol=1e-3, atol=1e-5)


def test_loss_is_l_hn_of_normalised_vectors(model):
    image, text = (F.normalize(model(features)["sentence_embedding"], dim=-1) for features in batch(model))
    scale = model[0].auto_model.logit_scale.exp().item()
    expected = hnclip.hard_negative_loss(image, text, scale, 0.5, ids=SAME).item()
    assert HardNegativeRankingLoss(model)(batch(model), SAME).item() == pytest.approx(expected, rel=1e-5)


def test_gamma_0_is_their_loss_in_both_directions(model):
    options = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    theirs = MultipleNegativesRankingLoss(model, scale=30.0, **options)
    ours = HardNegativeRankingLoss(model, gamma=0.0, scale=30.0)
    assert_same(gradients(ours, batch(model)), gradients(theirs, batch(model)))


@pytest.mark.parametrize("labels", [None, SAME], ids=["all negatives", "labels"])
def test_cached_is_plain(model, labels):
    plain = gradients(HardNegativeRankingLoss(model), batch(model), labels)
    cached = CachedHardNegativeRankingLoss(model, mini_batch_size=3)
    assert_same(gradients(cached, batch(model), labels), plain)
    # Accumulation and loss scaling multiply the loss.
    _, half = gradients(cached, batch(model), labels, share=0.5)
    torch.testing.assert_close({name: 2 * grad for name, grad in half.items()}, plain[1], rtol=1e-3, atol=1e-5)


def test_the_trainer_hands_labels_to_the_cached_loss(model, tmp_path):
    """A step of gradient descent shows the gradient."""
    images, captions = columns()
    _, expected = gradients(HardNegativeRankingLoss(model), batch(model), SAME)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    settings = {"learning_rate": 0.01, "optim": "sgd", "max_grad_norm": 0.0, "use_cpu": True, "max_steps": 1}
    settings |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False}
    arguments = SentenceTransformerTrainingArguments(str(tmp_path), per_device_train_batch_size=COUNT, **settings)
    data = Dataset.from_dict({"image": images, "caption": captions, "label": SAME.tolist()})
    loss = CachedHardNegativeRankingLoss(model, mini_batch_size=3)
    SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=loss).train()
    after = dict(model.named_parameters())
    for name, gradient in expected.items():
        torch.testing.assert_close(after[name], before[name] - 0.01 * gradient, rtol=1e-3, atol=1e-6)


def test_the_script_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    small = {"train": example.pairs("train", 4), "test": example.pairs("test", 2)}
    monkeypatch.setattr(example, "pairs", lambda split, families: small[split])
    for options in ([], ["--cached"]):
        example.main(["--steps", "1", *options])
        assert capsys.readouterr().out.count("R@1") == 2
    assert not list(tmp_path.iterdir())


LOSSES = {"plain": HardNegativeRankingLoss, "cached": lambda *args, **kw: CachedHardNegativeRankingLoss(*args, 3, **kw)}


def one_process(rank, folder, directory):
    os.environ["HF_HUB_OFFLINE"] = "1"
    meeting, timeout = f"file://{folder}/meeting", timedelta(minutes=5)
    dist.init_process_group("gloo", init_method=meeting, timeout=timeout, rank=rank, world_size=WORLD)
    rows = slice(rank * COUNT // WORLD, (rank + 1) * COUNT // WORLD)
    found = {}
    for name, loss_of in LOSSES.items():
        model = open_model(directory)
        loss = loss_of(model, gather_across_devices=True)
        # Wrapped and put into the loss as the trainer does it. Twice: it reports parameters without gradient late.
        loss.model = DistributedDataParallel(model, find_unused_parameters=name == "cached")
        for _ in range(2):
            found[name] = gradients(loss, batch(model, rows), SAME[rows])
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_are_one_batch(model, no_dropout_directory, tmp_path):
    mp.spawn(one_process, (str(tmp_path), no_dropout_directory), nprocs=WORLD)
    value, alone = gradients(HardNegativeRankingLoss(model), batch(model), SAME)
    found = [torch.load(Path(tmp_path) / f"{rank}.pt") for rank in range(WORLD)]
    for name in LOSSES:
        assert sum(process[name][0] for process in found) / WORLD == pytest.approx(value, rel=1e-5)
        for process in found:
            torch.testing.assert_close(process[name][1], alone, rtol=1e-3, atol=1e-5)
