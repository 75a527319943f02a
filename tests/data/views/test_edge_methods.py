"""Edge maps against closed forms and slow twins, and the names that methods are called by."""

from __future__ import annotations

import math
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hnclip.data.views.edges import Canny, EdgeMethod, Hed, LaplacianOfGaussian, edge_method
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from hnclip.data.views import hed


def square(low: int = 20, high: int = 220, size: tuple[int, int] = (60, 40)) -> Image.Image:
    """A bright rectangle from (20, 10) to (45, 30)."""
    picture = Image.new("RGB", size, (low, low, low))
    picture.paste((high, high, high), (20, 10, 45, 30))
    return picture


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def hed_tensors() -> dict[str, Tensor]:
    """Weights under which the signal survives thirteen layers."""
    random = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in hed.HedNetwork().state_dict().items()}
    tensors = {}
    for name, shape in shapes.items():
        spread = math.sqrt(2 / shape[1:].numel()) if len(shape) == 4 else 0.1
        tensors[name] = torch.randn(shape, generator=random) * spread
    tensors["netCombine.0.weight"] /= 100  # or each pixel would be black or white
    return tensors


@pytest.fixture(scope="module")
def hed_file(hed_tensors: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("hed") / "hed.safetensors"
    save_file(hed_tensors, file)
    return file


@pytest.mark.parametrize("method", [Canny(), LaplacianOfGaussian(), LaplacianOfGaussian(1.0)])
def test_a_rectangle_has_edges_where_it_ends(method: EdgeMethod) -> None:
    edges = method(square())
    assert edges.mode == "L"
    assert edges.size == (60, 40)
    white = np.asarray(edges)
    assert set(np.unique(white)) == {0, 255}
    rows, columns = np.nonzero(white)
    # All edges lie within two pixels of the border, and every pixel of a straight border has one close by.
    across = np.minimum(abs(columns - 19.5), abs(columns - 44.5))
    down = np.minimum(abs(rows - 9.5), abs(rows - 29.5))
    assert np.minimum(across, down).max() <= 2
    assert all(white[y, 18:22].any() and white[y, 43:47].any() for y in range(13, 27))
    assert all(white[8:12, x].any() and white[28:32, x].any() for x in range(23, 42))


@pytest.mark.parametrize("method", [Canny(), LaplacianOfGaussian(), LaplacianOfGaussian(0.5, 1)])
@pytest.mark.parametrize("colour", [(0, 0, 0), (255, 255, 255), (13, 200, 77)])
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (7, 1), (2, 2), (31, 17)])
def test_one_colour_has_no_edges(method: EdgeMethod, colour: tuple[int, int, int], size: tuple[int, int]) -> None:
    edges = method(Image.new("RGB", size, colour))
    assert edges.size == size
    assert not np.asarray(edges).any()


def test_canny_sees_colours_of_the_same_brightness() -> None:
    picture = Image.new("RGB", (40, 30), (200, 0, 0))
    picture.paste((0, 102, 0), (20, 0, 40, 30))
    assert len(np.unique(np.asarray(picture.convert("L")))) == 1
    assert np.asarray(Canny()(picture))[:, 18:22].any()


def test_canny_thresholds_are_those_of_the_gradient() -> None:
    """Sobel's gradient at a vertical step of h levels is 4·h."""
    for height, low, high, found in [(60, 100, 239, True), (60, 100, 241, False), (60, 0, 1000, False)]:
        picture = Image.new("RGB", (40, 30))
        picture.paste((height,) * 3, (20, 0, 40, 30))
        assert np.asarray(Canny(low, high)(picture)).any() == found


def test_low_continues_what_high_has_begun() -> None:
    """Across a step that is strong in its upper half only."""
    picture = Image.new("RGB", (40, 60))
    picture.paste((200,) * 3, (20, 0, 40, 30))
    picture.paste((50,) * 3, (20, 30, 40, 60))
    below = np.s_[40:, 15:25]
    assert np.asarray(Canny(100, 500)(picture))[below].any()
    assert not np.asarray(Canny(300, 500)(picture))[below].any()


def slow_crossings(response: np.ndarray, least: float) -> np.ndarray:
    """Zero crossings, pair by pair."""
    height, width = response.shape
    edges = np.zeros((height, width), dtype=np.uint8)
    for y in range(height):
        for x in range(width):
            for other_y, other_x in ((y + 1, x), (y, x + 1)):
                if other_y == height or other_x == width:
                    continue
                here, there = response[y, x], response[other_y, other_x]
                if (here < 0) != (there < 0) and abs(here - there) > least:
                    nearer = (y, x) if abs(here) <= abs(there) else (other_y, other_x)
                    edges[nearer] = 255
    return edges


def slow_response(grey: np.ndarray, sigma: float) -> np.ndarray:
    """Second derivatives of the Gaussian, summed up tap by tap along each direction."""
    reach = int(4 * sigma + 0.5)
    taps = np.arange(-reach, reach + 1)
    bell = np.exp(-(taps**2) / (2 * sigma**2))
    bell /= bell.sum()
    curve = bell * (taps**2 / sigma**4 - 1 / sigma**2)

    def along(values: np.ndarray, weights: np.ndarray, axis: int) -> np.ndarray:
        padded = np.pad(values, [(reach, reach) if each == axis else (0, 0) for each in (0, 1)], mode="edge")
        length = values.shape[axis]
        return sum(w * np.take(padded, range(i, i + length), axis) for i, w in enumerate(weights))

    return along(along(grey, curve, 0), bell, 1) + along(along(grey, bell, 0), curve, 1)


@pytest.mark.parametrize(("sigma", "contrast"), [(2.0, 16.0), (1.0, 40.0), (1.4, 3.0)])
@pytest.mark.parametrize("size", [(23, 31), (1, 12), (9, 1)])
def test_log_is_its_slow_twin(sigma: float, contrast: float, size: tuple[int, int]) -> None:
    picture = noise(*size)
    grey = np.asarray(picture.convert("L"), dtype=np.float64)
    expected = slow_crossings(slow_response(grey, sigma), contrast / (sigma**3 * math.sqrt(2 * math.pi)))
    found = np.asarray(LaplacianOfGaussian(sigma, contrast)(picture))
    assert np.array_equal(found, expected)
    assert min(size) == 1 or 0 < (found > 0).mean() < 0.6


@pytest.mark.parametrize("sigma", [1.5, 2.0, 4.0])
def test_contrast_means_the_same_at_every_sigma(sigma: float) -> None:
    for step, found in [(30, False), (50, True)]:
        picture = Image.new("RGB", (80, 20), (100,) * 3)
        picture.paste((100 + step,) * 3, (40, 0, 80, 20))
        edges = np.asarray(LaplacianOfGaussian(sigma, 40)(picture))
        assert edges.any() == found
        if found:
            assert ((edges > 0).sum(1) == 1).all()  # one pixel wide
            assert edges[:, 39:41].any(1).all()


def slow_hed(tensors: dict[str, Tensor], picture: Image.Image) -> np.ndarray:
    """HED written out: VGG-16 to its last convolution, a score after each stage, the five enlarged and fused."""
    colours = np.asarray(picture, dtype=np.float32)[:, :, ::-1] - np.float32([104.00698793, 116.66876762, 122.67891434])
    hidden = torch.from_numpy(colours.transpose(2, 0, 1).copy())[None]
    size = hidden.shape[-2:]
    scores = []
    for stage, layers in [
        ("One", (0, 2)),
        ("Two", (1, 3)),
        ("Thr", (1, 3, 5)),
        ("Fou", (1, 3, 5)),
        ("Fiv", (1, 3, 5)),
    ]:
        if stage != "One":
            hidden = F.max_pool2d(hidden, kernel_size=2, stride=2)
        for layer in layers:
            weight, bias = (tensors[f"netVgg{stage}.{layer}.{part}"] for part in ("weight", "bias"))
            hidden = F.conv2d(hidden, weight, bias, padding=1).clamp(min=0)
        weight, bias = (tensors[f"netScore{stage}.{part}"] for part in ("weight", "bias"))
        score = (hidden * weight.view(1, -1, 1, 1)).sum(1, keepdim=True) + bias
        scores.append(F.interpolate(score, size, mode="bilinear", align_corners=False))
    fuse, bias = tensors["netCombine.0.weight"], tensors["netCombine.0.bias"]
    total = sum(fuse[0, i, 0, 0] * score for i, score in enumerate(scores)) + bias
    return 255 * torch.sigmoid(total)[0, 0].numpy()


@pytest.mark.parametrize("size", [(48, 32), (37, 50), (16, 16)])
def test_hed_is_its_slow_twin(hed_tensors: dict[str, Tensor], hed_file: Path, size: tuple[int, int]) -> None:
    picture = noise(*size)
    edges = Hed(hed_file, device="cpu")(picture)
    assert edges.mode == "L"
    assert edges.size == size
    expected = slow_hed(hed_tensors, picture)
    assert np.abs(np.asarray(edges) - expected).max() < 0.51
    assert expected.std() > 5  # else little was compared
    assert not np.array_equal(np.asarray(edges), np.asarray(Hed(hed_file, device="cpu")(noise(*size, seed=1))))


@pytest.mark.parametrize("size", [(1, 1), (3, 40), (40, 15)])
def test_hed_of_tiny_pictures(hed_tensors: dict[str, Tensor], hed_file: Path, size: tuple[int, int]) -> None:
    """They are continued to sixteen pixels, and the map is that of the continued picture."""
    picture = noise(*size)
    pixels = np.asarray(picture)
    room = [(0, max(0, 16 - size[1])), (0, max(0, 16 - size[0])), (0, 0)]
    expected = slow_hed(hed_tensors, Image.fromarray(np.pad(pixels, room, mode="edge")))[: size[1], : size[0]]
    edges = Hed(hed_file, device="cpu")(picture)
    assert edges.size == size
    assert np.abs(np.asarray(edges) - expected).max() < 0.51


def test_hed_looks_at_large_pictures_smaller(hed_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hed, "LONGEST", 48)
    shapes: list[torch.Size] = []
    forward = hed.HedNetwork.forward
    monkeypatch.setattr(
        hed.HedNetwork, "forward", lambda network, pixels: shapes.append(pixels.shape) or forward(network, pixels)
    )
    edges = Hed(hed_file, device="cpu")(noise(96, 60))
    assert edges.size == (96, 60)
    assert [tuple(shape) for shape in shapes] == [(1, 3, 30, 48)]


def test_hed_reads_both_names_and_both_kinds_of_files(
    hed_tensors: dict[str, Tensor], hed_file: Path, tmp_path: Path
) -> None:
    published = {name.replace("net", "module", 1): tensor for name, tensor in hed_tensors.items()}
    torch.save(published, tmp_path / "hed.pth")
    picture = noise(30, 20)
    first, second = (Hed(file, device="cpu")(picture) for file in (hed_file, tmp_path / "hed.pth"))
    assert np.array_equal(np.asarray(first), np.asarray(second))


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


def test_other_layouts_are_refused(hed_tensors: dict[str, Tensor], tmp_path: Path) -> None:
    one = torch.zeros(1)
    for wrong, message in [
        ({"block1.convs.0.weight": one}, "38 tensors are missing, first netVggOne.0.weight"),
        (without(hed_tensors, "netScoreFou.bias"), "1 tensors are missing, first netScoreFou.bias"),
        ({**hed_tensors, "norm": one}, "nothing is known of norm"),
        ({**hed_tensors, "netScoreOne.bias": torch.zeros(2)}, r"netScoreOne.bias has shape \[2\], not \[1\]"),
    ]:
        save_file(wrong, tmp_path / "wrong.safetensors")
        with pytest.raises(ValueError, match=message):
            edge_method("hed", weights=tmp_path / "wrong.safetensors")


def test_weights_that_would_run_code_are_refused(tmp_path: Path) -> None:
    torch.save({"netVggOne.0.weight": torch.nn.Linear(2, 2)}, tmp_path / "hed.pth")
    with pytest.raises(ValueError, match="code"):
        edge_method("hed", weights=tmp_path / "hed.pth")


def test_versions_say_all_that_the_map_depends_on(
    hed_file: Path, hed_tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    import cv2
    import scipy

    assert cv2.__version__ in Canny().version
    assert scipy.__version__ in LaplacianOfGaussian().version
    assert torch.__version__ in Hed(hed_file).version
    versions = [
        method.version
        for method in (Canny(), Canny(50, 200), Canny(100, 201), LaplacianOfGaussian(), LaplacianOfGaussian(1.5))
    ]
    versions += [LaplacianOfGaussian(2, 17).version, Hed(hed_file).version]
    assert len(set(versions)) == 7
    # not where the weights lie, but what they are
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(hed_file.read_bytes())
    assert Hed(copy).version == Hed(hed_file).version
    save_file({**hed_tensors, "netCombine.0.bias": torch.ones(1)}, copy)
    assert Hed(copy).version != Hed(hed_file).version


def test_new_weights_in_the_same_file_are_used(hed_tensors: dict[str, Tensor], tmp_path: Path) -> None:
    file, picture = tmp_path / "hed.pth", noise(16, 16)
    torch.save(hed_tensors, file)
    first = Hed(file, device="cpu")(picture)
    torch.save({**hed_tensors, "netCombine.0.bias": torch.full((1,), 100.0)}, file)
    second = Hed(file, device="cpu")(picture)
    assert np.asarray(first).mean() < 255
    assert (np.asarray(second) == 255).all()


def test_methods_compare_and_pickle(hed_file: Path) -> None:
    assert Canny() == Canny(100, 200) == edge_method("canny")
    assert Canny().version == Canny(100, 200).version
    assert Canny() != Canny(100, 201)
    for method in (Canny(), LaplacianOfGaussian(), Hed(hed_file, "cpu")):
        copy = pickle.loads(pickle.dumps(method))
        assert copy == method
        assert hash(copy) == hash(method)
        assert copy.version == method.version
        assert np.array_equal(np.asarray(copy(square())), np.asarray(method(square())))


def test_names_are_understood(hed_file: Path) -> None:
    assert edge_method("canny:50,150") == Canny(50, 150)
    assert edge_method("log") == LaplacianOfGaussian()
    assert edge_method("log:1.4") == LaplacianOfGaussian(1.4)
    assert edge_method("log:1.4,20") == LaplacianOfGaussian(1.4, 20)
    assert edge_method("hed", weights=hed_file, device="cpu") == Hed(hed_file, "cpu")
    assert [edge_method(name).name for name in ("canny", "log:3")] == ["canny", "log"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sobel", "no edge method is called 'sobel': use canny, log, hed"),
        ("", "no edge method is called ''"),
        ("canny:", "two thresholds, as canny:50,150"),
        ("canny:50", "two thresholds"),
        ("canny:50,150,1", "two thresholds"),
        ("canny:a,b", "'canny:a,b' is not understood"),
        ("canny:150,50", "low ≤ high"),
        ("canny:-1,50", "low ≤ high"),
        ("canny:1,inf", "low ≤ high"),
        ("canny:nan,5", "low ≤ high"),
        ("log:", "sigma"),
        ("log:1,2,3", "sigma"),
        ("log:0.1", "at least 0.5"),
        ("log:nan", "at least 0.5"),
        ("log:2,0", "greater than 0"),
        ("hed:2", "hed has no settings"),
        ("hed", "hed needs weights: name a file of them with --weights, or use canny"),
    ],
)
def test_names_that_mean_nothing(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        edge_method(name)


def test_weights_must_be_wanted_and_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="canny takes no weights"):
        edge_method("canny", weights=tmp_path)
    with pytest.raises(ValueError, match="no weights of HED at"):
        edge_method("hed", weights=tmp_path / "none.pth")


@pytest.mark.parametrize(("name", "module"), [("canny", "cv2"), ("log", "scipy")])
def test_a_missing_package_is_named(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"needs the package {module}: pip install 'hnclip\[views\]'"):
        edge_method(name)
