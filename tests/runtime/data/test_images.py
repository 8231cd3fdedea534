"""Images: from folders and arrays, to the size and channels of a model; splits, orders, classes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.errors import UserError
from meshwright.runtime.data import ImageDataset, open_images
from meshwright.runtime.data.images import ArrayImages, adapt_channels
from meshwright.runtime.data.order import split_items
from meshwright.spec.model import PatchEmbeddingLayer
from tests.runtime.data.slices import check_slices

LAYER = PatchEmbeddingLayer(hidden_size=8, image_size=8, patch_size=2, num_channels=3)
NUMBERS = np.random.default_rng(0)
BYTES = NUMBERS.integers(0, 256, (50, 8, 8, 3), dtype=np.uint8)
LABELS = NUMBERS.integers(0, 5, 50)


def made(images=BYTES, labels=LABELS, layer: PatchEmbeddingLayer = LAYER, **options) -> ImageDataset:
    return ImageDataset(ArrayImages(images, labels, "a"), layer=layer, num_classes=5, **options)


def test_samples_do_not_depend_on_how_they_are_asked_for():
    check_slices(lambda: made(seed=3), 120)


def test_values_and_classes():
    dataset = made(held_out_fraction=0)
    images, classes = dataset.batch(0, 50)
    assert (images.dtype, classes.dtype) == (torch.float32, torch.int64)
    assert images.shape == (50, 3, 8, 8)
    assert torch.allclose(images.double().mean(), torch.tensor(BYTES / 127.5 - 1).mean())
    assert images.min() >= -1
    assert images.max() <= 1
    assert sorted(classes.tolist()) == sorted(LABELS.tolist())


def test_each_image_keeps_its_class():
    images = np.zeros((40, 4, 4), np.uint8)
    labels = np.arange(40) % 5
    images[:] = labels[:, None, None] * 50
    got, classes = made(images, labels).batch(0, 100)
    assert torch.equal(((got.mean((1, 2, 3)) + 1) * 127.5 / 50).round().long(), classes)


def test_resizing_is_bilinear():
    ramp = np.tile(np.linspace(0, 1, 4, dtype=np.float32), (2, 4, 1))
    image = made(ramp, np.zeros(2, int), held_out_fraction=0).batch(0, 1)[0][0]
    assert image.shape == (3, 8, 8)
    row = image[0, 0]
    assert row[0] == -1
    assert row[-1] == 1
    assert (row.diff() >= 0).all()
    assert torch.allclose(row[3:5].mean(), torch.zeros(()), atol=1e-6)


def test_floats_are_normalised_by_their_range():
    images = NUMBERS.uniform(3, 7, (20, 8, 8))
    got, _ = made(images, np.zeros(20, int), held_out_fraction=0).batch(0, 20)
    assert got.min() == pytest.approx(-1)
    assert got.max() == pytest.approx(1)


def test_channels():
    gray, colour, alpha = torch.full((1, 2, 2), 4.0), torch.ones(3, 2, 2), torch.ones(4, 2, 2)
    assert torch.equal(adapt_channels(gray, 3), torch.full((3, 2, 2), 4.0))
    assert torch.allclose(adapt_channels(colour, 1), torch.ones(1, 2, 2))
    assert adapt_channels(alpha, 3).shape == (3, 2, 2)
    assert adapt_channels(alpha, 1).shape == (1, 2, 2)
    assert adapt_channels(torch.ones(2, 2, 2), 2).shape == (2, 2, 2)
    with pytest.raises(UserError, match="images of 2 channels cannot become the 3 of the model"):
        adapt_channels(torch.ones(2, 2, 2), 3)


def test_splits_are_disjoint_random_and_the_same_for_every_seed():
    for num_items, fraction in ((50, 0.2), (1797, 0.05)):
        train, held_out = (split_items(num_items, split, fraction) for split in ("train", "held_out"))
        assert len(held_out) == round(num_items * fraction)
        assert sorted([*train, *held_out]) == list(range(num_items))
        assert held_out.max() - held_out.min() > num_items / 3
    assert made(seed=0, split="held_out").items.tolist() == made(seed=9, split="held_out").items.tolist()
    with pytest.raises(UserError, match=r"the held_out split of 5 samples is empty at held_out_fraction 0.05"):
        split_items(5, "held_out", 0.05)


def test_epochs_and_seeds_have_their_own_order():
    orders = {tuple(made(seed=seed).batch(epoch * 48, 48)[1].tolist()) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    for name, colour in (("cat", 10), ("ant", 200)):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(3):
            image.new("RGB", (6 + number, 9), (colour, 0, 0)).save(tmp_path / "pictures" / name / f"{number}.png")
    image.new("L", (5, 5), 99).save(tmp_path / "pictures" / "cat" / "gray.JPG", "jpeg")
    (tmp_path / "pictures" / "cat" / "notes.txt").write_text("not a picture, and not read")
    (tmp_path / "pictures" / ".cache").mkdir()
    return tmp_path / "pictures"


def test_folders(folder: Path):
    images = open_images([folder])
    assert images.labels.tolist() == [0, 0, 0, 1, 1, 1, 1]  # ant, then cat
    assert images.image(0).shape == (9, 6, 3)
    assert images.image(6).shape == (5, 5, 1)
    got, classes = ImageDataset(images, layer=LAYER, num_classes=2, held_out_fraction=0).batch(0, 7)
    assert got.shape == (7, 3, 8, 8)
    red = {True: 10 / 127.5 - 1, False: 200 / 127.5 - 1}
    for image, label in zip(got, classes.tolist(), strict=True):
        if image[1].max() == -1:  # not the gray one
            assert torch.allclose(image[0], torch.full((8, 8), red[label == 1]), atol=1e-5)
    first = images.identity
    assert open_images([folder]).identity == first
    (folder / "cat" / "2.png").unlink()
    assert open_images([folder]).identity != first


def test_arrays_in_files(tmp_path: Path):
    np.savez(tmp_path / "a.npz", images=BYTES, labels=LABELS)
    np.save(tmp_path / "images.npy", BYTES)
    np.save(tmp_path / "labels.npy", LABELS)
    archive, pair = open_images([tmp_path / "a.npz"]), open_images([tmp_path / "images.npy", tmp_path / "labels.npy"])
    assert archive.identity == pair.identity
    assert np.array_equal(archive.image(7), BYTES[7])
    assert np.array_equal(pair.labels, LABELS)


def test_digits():
    pytest.importorskip("sklearn")
    images = open_images(["digits"])
    assert len(images.labels) == 1797
    assert (images.lowest, images.highest) == (0, 16)


def test_what_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r"digits needs scikit-learn; pip install 'meshwright\[images\]'"):
        open_images(["digits"])
    with pytest.raises(UserError, match=r"need Pillow; pip install 'meshwright\[images\]'"):
        open_images([tmp_path])


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (BYTES[0, 0], LABELS, r"images must be numbers \[N, height, width\]"),
        (BYTES, LABELS[:3], "labels must be 50 integers, not 3"),
        (BYTES, LABELS.astype(float), "labels must be 50 integers"),
        (np.full((2, 4, 4), np.nan), LABELS[:2], "must be finite and differ"),
        (np.zeros((2, 4, 4)), LABELS[:2], "must be finite and differ"),
        (BYTES, LABELS + 3, r"label 7 is not one of the model's classes, 0 to 4"),
        (BYTES, LABELS - 9, r"label -\d is not one of the model's classes"),
    ],
)
def test_arrays_that_cannot_be(images, labels, message: str):
    with pytest.raises(UserError, match=message):
        made(images, labels)
