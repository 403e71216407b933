"""A folder of images, one sub-folder a class."""

import pathlib

import numpy as np
import PIL.Image
import PIL.ImageOps

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


class ImageFiles:
    """Image files, decoded one at a time.

    Args:
        paths: list of paths.

    Attributes:
        paths: list of `pathlib.Path`.
    """

    def __init__(self, paths):
        self.paths = [pathlib.Path(path) for path in paths]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        """Return one image as uint8 `(height, width, 1 or 3)`.

        It is turned as its EXIF orientation says; alpha is dropped and
        palettes are resolved.

        Raises:
            ValueError: if the file cannot be decoded.
        """
        path = self.paths[int(index)]
        try:
            with PIL.Image.open(path) as image:
                return decode(image)
        except (OSError, SyntaxError, ValueError) as error:
            raise ValueError(f"Cannot read image {path}: {error}") from error
        except PIL.Image.DecompressionBombError as error:
            raise ValueError(f"Image {path} is too large: {error}") from error


class ImageFolder(ImageFiles):
    """Images below a folder, in sorted order, decoded one at a time.

    Hidden files and folders, whose names start with a dot, are left out.

    Args:
        path: path of a folder. Its sub-folders are the classes; if it has
            none, its own images have no labels.

    Attributes:
        paths: list of `pathlib.Path`, one an image.
        class_names: sorted list of strings, empty without sub-folders.
        labels: int array `(images,)`, or `None` without sub-folders.

    Raises:
        ValueError: if the folder is missing or holds no images, a class has
            none, or images lie beside the classes.
    """

    def __init__(self, path):
        self.path = pathlib.Path(path).expanduser()
        if not self.path.is_dir():
            raise ValueError(f"{str(path)!r} is not a folder.")
        folders = sorted(f for f in self.path.iterdir() if f.is_dir())
        folders = [f for f in folders if not f.name.startswith(".")]
        if folders:
            found = [_images_in(folder) for folder in folders]
            self._check_classes(folders, found)
            self.paths = [path for paths in found for path in paths]
            self.class_names = [folder.name for folder in folders]
            self.labels = np.repeat(
                np.arange(len(folders)), [len(paths) for paths in found]
            )
        else:
            self.paths = _images_in(self.path)
            self.class_names, self.labels = [], None
        if not self.paths:
            raise ValueError(
                f"{str(path)!r} holds no images. Expected files ending in "
                f"{', '.join(SUFFIXES)}, in one sub-folder a class."
            )

    def _check_classes(self, folders, found):
        empty = [f.name for f, paths in zip(folders, found) if not paths]
        if empty and any(found):
            raise ValueError(
                f"{str(self.path)!r} has classes without images: "
                f"{', '.join(empty)}. Remove these sub-folders."
            )
        stray = [p.name for p in self.path.iterdir() if _is_image(p)]
        if stray:
            raise ValueError(
                f"{str(self.path)!r} has images beside its sub-folders: "
                f"{', '.join(sorted(stray)[:5])}. Move them into a class."
            )


def _images_in(folder):
    return sorted(
        path
        for path in folder.rglob("*")
        if _is_image(path)
        and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    )


def _is_image(path):
    return (
        path.suffix.lower() in SUFFIXES
        and not path.name.startswith(".")
        and path.is_file()
    )


def decode(image):
    """Return a PIL image as uint8 `(height, width, 1 or 3)`, upright."""
    image = PIL.ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        pixels = np.asarray(image)[..., None]
        if pixels.min() < 0 or pixels.max() > 65535:
            raise ValueError("it has more than 16 bits a pixel")
        return (pixels / 257).round().astype("uint8")
    if image.mode == "F":
        raise ValueError("its pixels are floats, of unknown range")
    gray = image.mode in ("1", "L", "LA", "La")
    return np.atleast_3d(np.asarray(image.convert("L" if gray else "RGB")))
