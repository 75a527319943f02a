from __future__ import annotations

import hashlib
import pickle
import zipfile

import pytest
import torch
from openai_twin import small_b16
from torch import nn

from hnclip.models.torchscript import read_torchscript
from hnclip.models.weights import read_checkpoint


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.linear(x))


class Small(nn.Module):
    """Everything that an archive can hold: nested and shared parts, buffers, views, scalars, and no tensors at all."""

    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(Part(), Part())
        self.again = self.parts[0]
        self.register_buffer("input_resolution", torch.tensor(224))
        self.register_buffer("halved", torch.randn(3, 5).half())
        self.register_buffer("brain", torch.randn(3).bfloat16())
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.empty(0, 4))
        table = torch.randn(6, 8)
        self.register_buffer("turned", table.T)
        self.register_buffer("row", table[2])
        self.plain = torch.randn(2)
        self.numbers, self.words, self.masks = [1, 2], {"a": 0.5}, [torch.ones(2)]
        self.label, self.rate = "name", 0.1

    def forward(self, x):
        offset = self.numbers[0] + self.words["a"] + self.rate + self.masks[0].sum() + self.plain.sum()
        return self.parts(x) + offset + self.row.sum() + len(self.label)


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """The same small model, scripted and traced, beside what it holds."""
    torch.manual_seed(0)
    directory, model = tmp_path_factory.mktemp("archives"), Small().eval()
    scripted, traced = directory / "scripted.pt", directory / "traced.pt"
    torch.jit.save(torch.jit.script(model), scripted)
    torch.jit.save(torch.jit.trace(model, torch.randn(2, 4)), traced)
    return {"scripted": scripted, "traced": traced}, {**model.state_dict(), "plain": model.plain}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    return True


@pytest.mark.parametrize("how", ["scripted", "traced"])
def test_it_equals_the_state_of_the_module(archives, how):
    files, expected = archives
    official = torch.jit.load(files[how]).state_dict()
    found = read_torchscript(files[how])
    plain = {"plain"} & found.keys()  # tensors that were attributes; tracing makes constants of them
    assert plain == ({"plain"} if how == "scripted" else set())
    assert same({name: found[name] for name in found if name not in plain}, official)
    assert same(found, {name: tensor for name, tensor in expected.items() if name in official or name in plain})


def test_a_checkpoint_of_it_says_so(archives):
    found = read_checkpoint(archives[0]["traced"])
    assert found.kind == "torchscript"
    assert found.about == {}
    assert same(found.tensors, torch.jit.load(archives[0]["traced"]).state_dict())


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_whole_clip_traced_in_half_precision(tmp_path):
    """As OpenAI made theirs: traced, in fp16, with sizes as scalar tensors beside the weights."""
    twin = small_b16(long=False, context=77)
    twin.register_buffer("input_resolution", torch.tensor(64))
    state = twin.state_dict()
    traced = torch.jit.trace(twin, (torch.randn(1, 3, 64, 64), twin.tokens([5])[None]))
    torch.jit.save(traced.half(), tmp_path / "ViT.pt")
    found = read_torchscript(tmp_path / "ViT.pt")
    assert same(
        found, {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    )


def test_tensors_of_one_storage_stay_views_of_one(archives):
    found = read_torchscript(archives[0]["scripted"])
    found["row"].fill_(3)
    assert (found["turned"][:, 2] == 3).all()


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_archive_packed_again_reads_the_same(archives, tmp_path, compression):
    """Other tools neither align what they store nor leave it uncompressed."""
    file = tmp_path / "other.pt"
    with zipfile.ZipFile(archives[0]["scripted"]) as old, zipfile.ZipFile(file, "w", compression) as new:
        for name in old.namelist():
            new.writestr("x" + name.partition("/")[1] + name.partition("/")[2], old.read(name))
    found = read_torchscript(file)
    assert same(found, read_torchscript(archives[0]["scripted"]))
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in found.values())


def test_writing_into_tensors_leaves_the_file_alone(archives):
    file = archives[0]["scripted"]
    before = hashlib.sha256(file.read_bytes()).digest()
    for tensor in read_torchscript(file).values():
        tensor.fill_(1)
    assert hashlib.sha256(file.read_bytes()).digest() == before


def altered(source, file, **records):
    """A copy of an archive with some records changed; None leaves one out."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            content = records.get(name.partition("/")[2].replace(".", "_").replace("/", "_"), old.read(name))
            if content is not None:
                new.writestr(name, content)
    return file


def test_an_archive_that_asks_for_the_system_is_refused_and_runs_nothing(archives, tmp_path):
    trace = tmp_path / "trace"
    evil = b"cos\nsystem\n(V" + f"touch {trace}".encode() + b"\ntR."
    file = altered(archives[0]["traced"], tmp_path / "evil.pt", data_pkl=evil)
    with pytest.raises(ValueError, match=r"evil\.pt cannot be read: it asks for os\.system"):
        read_torchscript(file)
    with pytest.raises(ValueError, match=r"asks for os\.system"):
        read_checkpoint(file)
    assert not trace.exists()
    pickle.loads(evil)  # it would have worked elsewhere
    assert trace.exists()


ASKED = {
    "builtins": (b"cbuiltins\neval\n(V1\ntR.", r"builtins\.eval"),
    "torch": (b"ctorch\nload\n(Vx\ntR.", r"torch\.load"),
    "utils": (b"ctorch._utils\n_rebuild_parameter\n(tR.", r"torch\._utils\._rebuild_parameter"),
    "almost": (b"c__torch__x\nos.system\n(tR.", r"__torch__x\.os\.system"),
    "stacked": (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", r"os\.system"),
}


@pytest.mark.parametrize("case", ASKED)
def test_every_other_global_is_refused_by_name(archives, tmp_path, case):
    content, name = ASKED[case]
    with pytest.raises(ValueError, match=f"it asks for {name}, which no weights need"):
        read_torchscript(altered(archives[0]["traced"], tmp_path / "x.pt", data_pkl=content))


DAMAGED = {
    # BUILD with attributes on a function that is allowed, or on a class, must not reach it.
    "altered-function": (b"ccollections\nOrderedDict\n(N(VX\nV1\ndtb.", "alter a function"),
    "altered-class": (b"c__torch__\nM\n(N(VX\nV1\ndtb.", "cannot be read"),
    "no-module": (b"]\x94.", "holds a list, not a module"),
    "odd-state": (b"c__torch__\nM\n)\x81Vtext\nb.", "attributes are a str"),
    "no-state": (b"c__torch__\nM\n)\x81.", "cannot be read"),
    "itself": (b"c__torch__\nM\n)\x81q\x00}Vme\nh\x00sb.", "contains itself"),
    "cut": (b"c__torch__\nM\n)\x81}", "cannot be read"),
    "noise": (b"\x00\x01\x02", "cannot be read"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_or_hostile_pickle_is_refused(archives, tmp_path, case):
    content, message = DAMAGED[case]
    file = altered(archives[0]["traced"], tmp_path / "x.pt", data_pkl=content)
    with pytest.raises(ValueError, match=message) as caught:
        read_torchscript(file)
    assert str(file) in str(caught.value)
    assert same(read_torchscript(archives[0]["traced"]), torch.jit.load(archives[0]["traced"]).state_dict())


def test_records_that_do_not_fit_are_named(archives, tmp_path):
    source = archives[0]["traced"]
    with zipfile.ZipFile(source) as archive:
        size = archive.getinfo("traced/data/0").file_size
    with pytest.raises(ValueError, match=rf"data/0 has 3 bytes, its tensor needs {size}"):
        read_torchscript(altered(source, tmp_path / "short.pt", data_0=b"abc"))
    with pytest.raises(ValueError, match="traced/data/0"):
        read_torchscript(altered(source, tmp_path / "none.pt", data_0=None))
    with pytest.raises(ValueError, match="endian"):
        read_torchscript(altered(source, tmp_path / "order.pt", byteorder=b"middle"))


def test_a_tensor_larger_than_its_storage_is_refused(archives, tmp_path):
    """Sizes in the pickle are not believed: memory beyond the record is never seen."""
    with zipfile.ZipFile(archives[0]["traced"]) as archive:
        content = archive.read("traced/data.pkl")
    assert b"K\x03K\x05" in content  # the size [3, 5] of `halved`
    file = altered(archives[0]["traced"], tmp_path / "x.pt", data_pkl=content.replace(b"K\x03K\x05", b"K\x7fK\x05"))
    with pytest.raises(ValueError, match="out of bounds"):
        read_torchscript(file)
