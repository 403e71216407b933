"""A folder of images, one sub-folder a class."""

import pathlib

import numpy as np
import PIL.Image
import PIL.ImageOps

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


class ImageFolder:
    """Images below a folder, in sorted order, decoded one at a time.

    Args:
        path: path of a folder. Its sub-folders are the classes; if it has
            none, its own images have no labels.

    Attributes:
        paths: list of `pathlib.Path`, one an image.
        class_names: sorted list of strings, empty without sub-folders.
        labels: int array `(images,)`, or `None` without sub-folders.

    Raises:
        ValueError: if the folder is missing or holds no images.
    """

    def __init__(self, path):
        self.path = pathlib.Path(path).expanduser()
        if not self.path.is_dir():
            raise ValueError(f"{str(path)!r} is not a folder.")
        folders = sorted(f for f in self.path.iterdir() if f.is_dir())
        folders = [f for f in folders if not f.name.startswith(".")]
        if folders:
            found = [_images_in(folder) for folder in folders]
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

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        """Return one image as uint8 `(height, width, 1 or 3)`.

        It is turned as its EXIF orientation says; alpha is dropped and
        palettes are resolved.

        Raises:
            ValueError: if the file cannot be decoded.
        """
        path = self.paths[index]
        try:
            with PIL.Image.open(path) as image:
                image = PIL.ImageOps.exif_transpose(image)
                return _to_uint8(image)
        except (OSError, SyntaxError, ValueError) as error:
            raise ValueError(f"Cannot read image {path}: {error}") from error
        except PIL.Image.DecompressionBombError as error:
            raise ValueError(f"Image {path} is too large: {error}") from error


def _images_in(folder):
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES and path.is_file()
    )


def _to_uint8(image):
    if image.mode.startswith("I"):  # 16 bits a pixel
        return (np.asarray(image)[..., None] / 257).round().astype("uint8")
    gray = image.mode in ("1", "L", "LA", "La", "F")
    return np.atleast_3d(np.asarray(image.convert("L" if gray else "RGB")))
