"""Folders of images: what is found, and how it is decoded."""

import numpy as np
import PIL.Image
import pytest

from keras_vit22b.probing import ImageFolder


def save(path, array, **kwargs):
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(array).save(path, **kwargs)


def test_sub_folders_are_classes_in_sorted_order(tmp_path):
    for name in ("dog/b.png", "cat/2.png", "cat/1.png"):
        save(tmp_path / name, np.zeros((4, 4), "uint8"))
    folder = ImageFolder(tmp_path)
    assert folder.class_names == ["cat", "dog"]
    assert folder.labels.tolist() == [0, 0, 1]
    assert [p.name for p in folder.paths] == ["1.png", "2.png", "b.png"]


def test_a_flat_folder_has_no_labels(tmp_path):
    save(tmp_path / "a.png", np.zeros((4, 4), "uint8"))
    assert ImageFolder(tmp_path).labels is None


@pytest.mark.parametrize(
    "mode, channels",
    [("L", 1), ("1", 1), ("LA", 1), ("RGB", 3), ("RGBA", 3), ("P", 3)],
)
def test_every_mode_becomes_gray_or_rgb(tmp_path, mode, channels):
    image = PIL.Image.new("RGB", (5, 4), (200, 200, 200)).convert(mode)
    image.save(tmp_path / "a.png")
    array = ImageFolder(tmp_path)[0]
    assert array.shape == (4, 5, channels)
    assert array.dtype == np.uint8


def test_sixteen_bits_keep_their_brightness(tmp_path):
    pixels = np.array([[0, 32896, 65535]], "uint16")
    save(tmp_path / "a.png", pixels)
    assert ImageFolder(tmp_path)[0][..., 0].tolist() == [[0, 128, 255]]


def test_exif_orientation_is_applied(tmp_path):
    image = PIL.Image.new("L", (6, 2))
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # rotate by a quarter turn
    image.save(tmp_path / "a.jpg", exif=exif)
    assert ImageFolder(tmp_path)[0].shape == (6, 2, 1)


def test_a_corrupt_image_is_named(tmp_path):
    (tmp_path / "broken.png").write_bytes(b"not an image")
    with pytest.raises(ValueError, match="broken.png"):
        ImageFolder(tmp_path)[0]


def test_a_truncated_image_is_named(tmp_path):
    path = tmp_path / "half.png"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), "uint8")
    save(path, noise)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match="half.png"):
        ImageFolder(tmp_path)[0]


def test_an_empty_folder_says_what_was_expected(tmp_path):
    with pytest.raises(ValueError, match="holds no images"):
        ImageFolder(tmp_path)


def test_a_missing_folder_is_named():
    with pytest.raises(ValueError, match="nowhere"):
        ImageFolder("nowhere")


def test_hidden_files_and_folders_are_left_out(tmp_path):
    for name in ("a/1.png", "a/._1.png", "a/.checkpoints/2.png", ".b/3.png"):
        save(tmp_path / name, np.zeros((4, 4), "uint8"))
    folder = ImageFolder(tmp_path)
    assert [p.name for p in folder.paths] == ["1.png"]
    assert folder.class_names == ["a"]


def test_a_class_without_images_is_named(tmp_path):
    save(tmp_path / "a" / "1.png", np.zeros((4, 4), "uint8"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="without images: empty"):
        ImageFolder(tmp_path)


def test_images_beside_the_classes_are_named(tmp_path):
    for name in ("a/1.png", "stray.png"):
        save(tmp_path / name, np.zeros((4, 4), "uint8"))
    with pytest.raises(ValueError, match="beside its sub-folders: stray.png"):
        ImageFolder(tmp_path)


@pytest.mark.parametrize("mode, value", [("F", 0.5), ("I", 70_000)])
def test_pixels_of_unknown_range_are_refused(tmp_path, mode, value):
    PIL.Image.new(mode, (4, 4), value).save(tmp_path / "a.tiff")
    with pytest.raises(ValueError, match="a.tiff"):
        ImageFolder(tmp_path)[0]
