"""Image classification: pictures from folders or arrays, made what the model takes, and their classes.

An image is resized (bilinear), its channels are adapted, and its values are normalised to mean 0.5 and deviation 0.5 of
their range: the least becomes -1, the greatest 1. There are no random crops or flips.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from meshwright.errors import UserError
from meshwright.files import is_folder
from meshwright.runtime.data.classes import ClassDataset
from meshwright.runtime.data.order import DEFAULT_HELD_OUT_FRACTION, Split
from meshwright.spec.model import PatchEmbeddingLayer

DIGITS = "digits"
ENDINGS = (".png", ".jpg", ".jpeg")
_LARGEST_BYTE = 255.0
_LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow's "L"
_GRAY, _COLOUR, _COLOUR_AND_ALPHA = 1, 3, 4
_WAYS = "a folder with one folder a class, an .npz of images and labels, two .npy of these, or digits"
_NO_PILLOW = "data: pictures in folders need Pillow; pip install 'meshwright[images]'"

Array = NDArray[Any]


class Images(Protocol):
    """Labelled pictures; `identity` changes when they do. Values lie between `lowest` and `highest`."""

    @property
    def labels(self) -> NDArray[np.int64]: ...
    @property
    def identity(self) -> str: ...
    @property
    def lowest(self) -> float: ...
    @property
    def highest(self) -> float: ...
    def image(self, index: int) -> Array:
        """Return picture `index`, [height, width, channels]."""
        ...


class ArrayImages:
    """Pictures [N, height, width] or [N, height, width, channels], of bytes or other numbers, and N labels."""

    def __init__(self, images: Array, labels: Array, where: str) -> None:
        if images.ndim not in (3, 4) or images.dtype.kind not in "uif" or not images.size:
            shape = " x ".join(map(str, images.shape))
            raise UserError(
                f"data: {where}: images must be numbers [N, height, width] or [N, height, width, channels], "
                f"not {shape} of {images.dtype}"
            )
        if labels.shape != images.shape[:1] or labels.dtype.kind not in "ui":
            shape = " x ".join(map(str, labels.shape))
            raise UserError(f"data: {where}: labels must be {len(images)} integers, not {shape} of {labels.dtype}")
        self.labels = np.asarray(labels, np.int64)
        self._images = images if images.ndim == 4 else images[..., None]  # noqa: PLR2004 with channels
        self.lowest, self.highest = 0.0, _LARGEST_BYTE
        if images.dtype != np.uint8:
            self.lowest, self.highest = float(images.min()), float(images.max())
        if not self.lowest < self.highest < float("inf"):  # false for NaN too
            raise UserError(
                f"data: {where}: images must be finite and differ, not lie in {self.lowest} .. {self.highest}"
            )
        self.identity = _digest(images, labels)

    def image(self, index: int) -> Array:
        return self._images[index]


class FolderImages:
    """Pictures in folders, one a class; the classes are numbered by the names of their folders.

    They are read when they are needed. Their names and sizes are what they are known by.
    """

    lowest, highest = 0.0, _LARGEST_BYTE

    def __init__(self, folder: Path) -> None:
        try:
            from PIL import Image, UnidentifiedImageError
        except ImportError:
            raise UserError(_NO_PILLOW) from None
        self._open, self._unidentified, self._too_large = (
            Image.open,
            UnidentifiedImageError,
            Image.DecompressionBombError,
        )
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
        self._paths: list[Path] = []
        labels: list[int] = []
        for number, name in enumerate(self.classes):
            found = sorted(path for path in (folder / name).iterdir() if path.suffix.lower() in ENDINGS)
            if not found:
                raise UserError(f"data: {folder / name}: no picture in this folder ends in {', '.join(ENDINGS)}")
            self._paths += found
            labels += [number] * len(found)
        if not labels:
            raise UserError(f"data: {folder}: has no folders; a folder of pictures has one folder a class")
        self.labels = np.array(labels, np.int64)
        known = "\n".join(f"{path.relative_to(folder).as_posix()} {path.stat().st_size}" for path in self._paths)
        self.identity = hashlib.sha256(known.encode()).hexdigest()
        self.image(0)  # what cannot be read at all is said before ranks start

    def image(self, index: int) -> Array:
        path = self._paths[index]
        try:
            with self._open(path) as picture:
                is_gray = picture.mode in ("1", "L")
                return np.asarray(picture.convert("L" if is_gray else "RGB")).reshape(
                    picture.height, picture.width, _GRAY if is_gray else _COLOUR
                )
        except self._unidentified:
            raise UserError(f"data: {path}: not a picture") from None
        except (OSError, ValueError, SyntaxError, self._too_large) as error:  # all are raised for damaged files
            raise UserError(f"data: {path}: cannot be read: {' '.join(str(error).split())}") from None


def open_images(sources: Sequence[str | Path]) -> Images:
    """Return the pictures that `sources` mean. Raises UserError in one line."""
    paths = [Path(source) for source in sources]
    try:
        if [str(source) for source in sources] == [DIGITS]:
            return _digits()
        if [path.suffix for path in paths] == [".npy", ".npy"]:
            images, labels = (_load(path) for path in paths)
            return ArrayImages(images, labels, str(paths[0]))
        if len(paths) == 1 and paths[0].suffix == ".npz":
            return _of_archive(paths[0])
        if len(paths) == 1 and is_folder(paths[0]):
            return FolderImages(paths[0])
    except FileNotFoundError as error:
        raise UserError(f"data: {error.filename}: no such file or folder") from None
    except OSError as error:
        raise UserError(f"data: {paths[0]}: cannot be read: {error.strerror}") from None
    if len(paths) == 1 and paths[0].name and not paths[0].exists():
        raise UserError(f"data: {paths[0]}: no such file or folder; pictures are {_WAYS}")
    raise UserError(f"data: {' '.join(map(str, sources)) or 'nothing'} is not {_WAYS}")


class ImageDataset(ClassDataset):
    """Pictures and their classes."""

    def __init__(
        self,
        images: Images,
        *,
        layer: PatchEmbeddingLayer,
        num_classes: int,
        split: Split = "train",
        seed: int = 0,
        held_out_fraction: float = DEFAULT_HELD_OUT_FRACTION,
    ) -> None:
        super().__init__(
            images.labels, num_classes=num_classes, split=split, seed=seed, held_out_fraction=held_out_fraction
        )
        self._images, self._layer = images, layer

    def batch(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Return images fp32 [count, channels, size, size] and classes int64 [count] of samples from `start` on."""
        items = self._taken(start, count)
        images = torch.stack([self._adapted(self._images.image(item)) for item in items])
        return images, torch.from_numpy(self._images.labels[items])

    def _adapted(self, image: Array) -> Tensor:
        layer, lowest, highest = self._layer, self._images.lowest, self._images.highest
        values = torch.from_numpy(np.array(image, np.float32)).permute(2, 0, 1)
        x = adapt_channels(values, layer.num_channels)[None]
        size = (layer.image_size, layer.image_size)
        if x.shape[2:] != size:
            x = functional.interpolate(x, size, mode="bilinear", align_corners=False, antialias=True)
        return ((x[0] - lowest) / (highest - lowest) - 0.5) / 0.5


def adapt_channels(image: Tensor, num_channels: int) -> Tensor:
    """Return `image` [C, ...] with `num_channels`: gray is repeated, colour becomes luminance, alpha is left out."""
    have = len(image)
    if have == num_channels:
        return image
    if have == _COLOUR_AND_ALPHA and num_channels in (_GRAY, _COLOUR):
        return adapt_channels(image[:_COLOUR], num_channels)
    if have == _GRAY:
        return image.expand(num_channels, *image.shape[1:])
    if have == _COLOUR and num_channels == _GRAY:
        return torch.tensordot(image.new_tensor(_LUMINANCE), image, dims=1)[None]
    raise UserError(f"data: images of {have} channels cannot become the {num_channels} of the model")


def _digits() -> Images:
    try:
        from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]  # may be absent
    except ImportError:
        raise UserError("data: digits needs scikit-learn; pip install 'meshwright[images]'") from None
    loaded: Any = load_digits()
    return ArrayImages(loaded.images, loaded.target, DIGITS)


def _load(path: Path) -> Array:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:  # no array, a pickle, or cut short
        raise UserError(f"data: {path}: not a .npy array: {' '.join(str(error).split())}") from None


def _of_archive(path: Path) -> Images:
    import zipfile

    try:
        with np.load(path, allow_pickle=False) as arrays:
            missing = [name for name in ("images", "labels") if name not in arrays]
            if missing:
                raise UserError(f"data: {path}: has no array {missing[0]}; it needs images and labels")
            return ArrayImages(arrays["images"], arrays["labels"], str(path))
    except (ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise UserError(f"data: {path}: not an .npz of arrays: {' '.join(str(error).split())}") from None


def _digest(*arrays: Array) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str} {array.shape}".encode())
        for row in array if array.ndim > 1 else [array]:
            digest.update(np.ascontiguousarray(row).tobytes())
    return digest.hexdigest()
