from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import zipfile
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from hnclip.models.weights import check_safetensors, read_checkpoint

linux = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads the system's table of mapped memory")


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(0)
    return {
        "first.weight": torch.randn(300, 40, generator=generator),
        "second.half": torch.randn(7, 5, generator=generator).half(),
        "third.brain": torch.randn(3, generator=generator).bfloat16(),
        "count": torch.tensor(12),
        "scale": torch.tensor(4.6),
    }


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
        assert not found[name].requires_grad
    return True


class Holder(nn.Module):
    def __init__(self, content):
        super().__init__()
        for name, tensor in content.items():
            self.register_buffer(name, tensor)

    def forward(self):
        return 0


def written_as(kind, directory, content):
    """`content` in a file of this kind."""
    file = directory / {"safetensors": "w.safetensors", "zip": "w.pt", "legacy": "w.bin", "torchscript": "w.jit"}[kind]
    if kind == "safetensors":
        save_file(content, file)
    elif kind == "torchscript":
        torch.jit.save(torch.jit.script(Holder(content)), file)
    else:
        torch.save(content, file, _use_new_zipfile_serialization=kind == "zip")
    return file


@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy"])
def test_tensors_come_back(tmp_path, weights, kind):
    found = read_checkpoint(written_as(kind, tmp_path, weights))
    assert same(found.tensors, weights)
    assert found.kind == ("safetensors" if kind == "safetensors" else "pickle")
    assert found.about == {}


@pytest.mark.parametrize("kind", ["safetensors", "zip"])
def test_the_content_decides_not_the_suffix(tmp_path, weights, kind):
    file = written_as(kind, tmp_path, weights).rename(tmp_path / "model.weights")
    assert same(read_checkpoint(str(file)).tensors, weights)


CONTAINERS = {
    "bare": (lambda w: w, {}),
    "ordered": (OrderedDict, {}),
    "state_dict": (lambda w: {"state_dict": w}, {}),
    "model": (lambda w: {"model": w, "step": 7}, {"step": 7}),
    "model_state_dict": (lambda w: {"model_state_dict": w, "loss": 0.5}, {"loss": 0.5}),
    "twice": (lambda w: {"model": {"state_dict": w, "version": "b"}, "done": True}, {"version": "b", "done": True}),
    "beside": (lambda w: {**w, "epoch": 3}, {"epoch": 3}),
}


@pytest.mark.parametrize("kind", ["zip", "legacy"])
@pytest.mark.parametrize("name", CONTAINERS)
def test_containers(tmp_path, weights, kind, name):
    contain, about = CONTAINERS[name]
    found = read_checkpoint(written_as(kind, tmp_path, contain(weights)))
    assert same(found.tensors, weights)
    assert found.about == about


def trained(weight_bytes):
    """What open_clip's trainer saves after a step."""
    model = nn.Linear(weight_bytes // 4 // 64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, model.in_features)).sum().backward()
    optimizer.step()
    content = {"epoch": 3, "name": "run", "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
    return model, content


def test_a_trainers_checkpoint_gives_its_weights_alone(tmp_path):
    model, content = trained(1 << 12)
    found = read_checkpoint(written_as("zip", tmp_path, {**content, "scaler": {"scale": 2.0}}))
    assert same(found.tensors, {"weight": model.weight.detach()})
    assert found.about == {"epoch": 3, "name": "run"}


def test_parts_of_a_model_keep_their_names(tmp_path, weights):
    found = read_checkpoint(
        written_as("zip", tmp_path, {"model": {"visual": {"proj": weights["scale"]}, "rest": weights}})
    )
    expected = {"visual.proj": weights["scale"], **{f"rest.{name}": tensor for name, tensor in weights.items()}}
    assert same(found.tensors, expected)


@pytest.mark.parametrize("kind", ["safetensors", "zip"])
@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module."]
)
def test_prefixes_of_wrappers_are_removed(tmp_path, weights, kind, prefix):
    file = written_as(kind, tmp_path, {prefix + name: tensor for name, tensor in weights.items()})
    assert same(read_checkpoint(file).tensors, weights)


def test_a_compiled_part_loses_its_prefix_and_nothing_else_does(tmp_path):
    one = torch.ones(1)
    content = {"visual._orig_mod.conv.weight": one, "text.module.weight": one, "my_orig_mod.weight": one}
    found = read_checkpoint(written_as("zip", tmp_path, content))
    assert list(found.tensors) == ["visual.conv.weight", "text.module.weight", "my_orig_mod.weight"]


def test_a_name_with_and_without_a_prefix_is_refused(tmp_path):
    file = written_as("zip", tmp_path, {"module.weight": torch.ones(1), "weight": torch.ones(1)})
    with pytest.raises(ValueError, match="holds 'weight' twice"):
        read_checkpoint(file)


def test_saved_parameters_come_back_as_plain_tensors(tmp_path):
    linear = nn.Linear(3, 2)
    found = read_checkpoint(written_as("zip", tmp_path, dict(linear.named_parameters())))
    assert same(found.tensors, {name: value.detach() for name, value in linear.named_parameters()})
    assert not any(isinstance(tensor, nn.Parameter) for tensor in found.tensors.values())


@pytest.mark.parametrize("kind", ["safetensors", "zip"])
def test_writing_into_tensors_leaves_the_file_alone(tmp_path, weights, kind):
    file = written_as(kind, tmp_path, weights)
    before = hashlib.sha256(file.read_bytes()).digest()
    found = read_checkpoint(file)
    for tensor in found.tensors.values():
        tensor.add_(1)
    assert hashlib.sha256(file.read_bytes()).digest() == before
    assert same(read_checkpoint(file).tensors, weights)


def resident(file):
    """Bytes of a mapped file that are in this process's memory."""
    mappings = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    mine = [mapping for mapping in mappings if mapping.split("\n", 1)[0].endswith(str(file))]
    assert mine, "the file is not mapped"
    return sum(int(re.search(r"(?m)^Rss:\s+(\d+) kB", mapping)[1]) * 1024 for mapping in mine)


@linux
@pytest.mark.parametrize("kind", ["safetensors", "zip", "torchscript"])
def test_bytes_are_read_when_they_are_used(tmp_path, kind):
    size = 16 << 20
    file = written_as(kind, tmp_path, {"a": torch.ones(size // 4), "b": torch.ones(size // 4)})
    found = read_checkpoint(file)
    assert resident(file) < size / 8
    assert found.tensors["a"].sum() == size / 4
    assert size <= resident(file) < 1.25 * size


@linux
def test_moments_of_an_optimiser_are_not_read(tmp_path):
    size = 16 << 20
    model, content = trained(size)
    file = written_as("zip", tmp_path, content)
    assert file.stat().st_size > 3 * size
    found = read_checkpoint(file)
    assert torch.equal(found.tensors["weight"], model.weight)
    assert size <= resident(file) < 1.25 * size


class Evil:
    """Would leave a file behind wherever it is unpickled in full."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


class Plain:
    pass


@pytest.mark.parametrize("kind", ["zip", "legacy"])
@pytest.mark.parametrize(
    ("content", "asked"),
    [
        (lambda trace: Evil(trace), "posix.mkdir|nt.mkdir"),
        (lambda trace: Plain(), r"test_weights\.Plain"),
        (lambda trace: Namespace(lr=1), r"argparse\.Namespace"),
        (lambda trace: nn.Linear(2, 2), r"torch\.nn\.modules\.linear\.Linear"),
        (lambda trace: print, "print"),
    ],
    ids=["os", "class", "namespace", "module", "builtin"],
)
def test_a_file_that_needs_code_is_refused_by_name(tmp_path, weights, kind, content, asked):
    trace = tmp_path / "trace"
    file = written_as(kind, tmp_path, {"state_dict": weights, "args": content(trace)})
    with pytest.raises(ValueError, match=rf"w\.\w+ .* would run code, first ({asked})\. .*state_dict"):
        read_checkpoint(file)
    assert not trace.exists()


def test_an_environment_that_allows_code_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    trace = tmp_path / "trace"
    with pytest.raises(ValueError, match="would run code"):
        read_checkpoint(written_as("zip", tmp_path, Evil(trace)))
    assert not trace.exists()


def offsets(file):
    """Where each tensor's bytes begin and end in a safetensors file, by the definition of the format."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return {name: [8 + length + byte for byte in entry["data_offsets"]] for name, entry in header.items()}


def test_a_safetensors_file_cut_short_names_the_first_tensor_that_suffers(tmp_path, weights):
    file = written_as("safetensors", tmp_path, weights)
    data, places = file.read_bytes(), offsets(file)
    for size in {len(data) - 1, *(begin for begin, _ in places.values())}:
        file.write_bytes(data[:size])
        suffering = [name for name, (_, end) in sorted(places.items(), key=lambda item: item[1]) if end > size]
        numbers = rf"{len(data)} bytes expected, {size} found"
        message = rf"cut short: {numbers}; .* missing is '{suffering[0]}' \({len(suffering)} of 5 "
        with pytest.raises(ValueError, match=message):
            check_safetensors(file)
        with pytest.raises(ValueError, match=message):
            read_checkpoint(file)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True), kind=st.sampled_from(["safetensors", "zip", "legacy"]))
def test_no_file_cut_anywhere_is_taken_for_whole(tmp_path, share, kind):
    file = written_as(kind, tmp_path, {"a": torch.ones(40), "b": torch.ones(3, 3)})
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ValueError, match=re.escape(str(file))):
        read_checkpoint(file)


def lengthened(header):
    text = header.encode()
    return len(text).to_bytes(8, "little") + text


BROKEN = {
    "empty": ("w.pt", b"", "holds no weights that can be read"),
    "page": ("w.pt", b"<!DOCTYPE html><title>Log in</title>", "holds no weights that can be read"),
    "pointer": ("w.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    "empty-safetensors": ("w.safetensors", b"", "is not a safetensors file"),
    "noise": ("w.safetensors", bytes(range(200)), "is not a safetensors file"),
    "pickle-in-disguise": ("w.safetensors", pickle.dumps({"a": list(range(99))}), "is not a safetensors file"),
    "header-of-petabytes": ("w.safetensors", b"\xff" * 8 + b"{}", "is not a safetensors file"),
    "half-a-header": (
        "w.safetensors",
        (500).to_bytes(8, "little") + b'{"a": ',
        "508 bytes of header expected, 14 found",
    ),
    "no-json": ("w.safetensors", lengthened("{broken}"), "its header cannot be read"),
    "no-offsets": ("w.safetensors", lengthened('{"a": {"dtype": "F32"}}'), "its header cannot be read"),
    "odd-offsets": ("w.safetensors", lengthened('{"a": {"data_offsets": "ab"}}'), "its header cannot be read"),
    "no-tensors": ("w.safetensors", lengthened("{}"), "holds no tensors"),
    "wrong-size": (
        "w.safetensors",
        lengthened('{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}}') + b"1234",
        "is not a valid safetensors file",
    ),
    "cut-pickle": ("w.bin", pickle.dumps({"a": 1})[:-3], "cannot be read|cut short"),
    "python-pickle": ("w.bin", pickle.dumps({"a": 1}), "cannot be read|cut short"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_holds_no_weights_is_named(tmp_path, case):
    name, data, message = BROKEN[case]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        read_checkpoint(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_another_zip_file_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "w.pt", "w") as archive:
        archive.writestr("letter.txt", "hello")
    with pytest.raises(ValueError, match=r"has no data\.pkl"):
        read_checkpoint(tmp_path / "w.pt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"epoch": 3, "args": {"lr": 1.0}}, "with the keys 'epoch', 'args'$"),
        ({"model": {"name": "ViT"}}, "with the keys 'name'$"),
        ({str(i): i for i in range(20)}, "'7' …"),
        ({}, "an empty dictionary"),
        ([torch.ones(2)], "a list$"),
        (torch.ones(2), "a Tensor$"),
    ],
)
def test_a_file_without_named_tensors_says_what_is_there(tmp_path, content, message):
    with pytest.raises(ValueError, match=f"holds no named tensors, but .*{message}"):
        read_checkpoint(written_as("zip", tmp_path, content))


def test_a_missing_file_stays_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pt"):
        read_checkpoint(tmp_path / "nowhere.pt")
