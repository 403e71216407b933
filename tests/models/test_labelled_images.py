"""Images and labels are the same, whatever they come in."""

import numpy as np
import PIL.Image
import pytest

from keras_vit22b.models.labelled_images import read_images

pytestmark = pytest.mark.any_backend

LABELS = np.array([0, 0, 1, 1])


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 255, (4, 5, 6, 3), "uint8")


@pytest.fixture
def photos(images, tmp_path):
    """A folder with one sub-folder a class."""
    for i, image in enumerate(images):
        path = tmp_path / "photos" / "ab"[LABELS[i]] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(image).save(path)
    return tmp_path / "photos"


def assert_read(found, images, class_names):
    assert found.class_names == class_names and len(found) == 4
    np.testing.assert_array_equal(found.labels, LABELS)
    for ours, image in zip(found.images, images, strict=True):
        np.testing.assert_array_equal(ours, image)


def test_arrays(images, tmp_path):
    np.savez(tmp_path / "data.npz", images=images, labels=LABELS)
    found = read_images(tmp_path / "data.npz")
    assert_read(found, images, [])
    assert found.name == "data"
    np.savez(tmp_path / "unlabelled.npz", images=images)
    assert read_images(tmp_path / "unlabelled.npz").labels is None


def test_folders(images, photos):
    assert_read(read_images(photos), images, ["a", "b"])


def test_tables(images, photos):
    lines = [
        f"photos/{'ab'[label]}/{i}.png,{'ab'[label]},{'xy'[i % 2]}"
        for i, label in enumerate(LABELS)
    ]
    path = photos.parent / "labels.csv"
    path.write_text("\n".join(["path,label,group", *lines]) + "\n")
    found = read_images(path)
    assert_read(found, images, ["a", "b"])
    assert found.columns["group"].tolist() == ["x", "y", "x", "y"]
    numbers = "\n".join(
        line.replace(",a,", ",0,").replace(",b,", ",1,") for line in lines
    )
    path.write_text(f"path,label,group\n{numbers}\n")
    assert_read(read_images(path), images, [])


def test_hugging_face(images, tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict(
        {
            "image": [PIL.Image.fromarray(image) for image in images],
            "label": LABELS,
        },
        datasets.Features(
            {
                "image": datasets.Image(),
                "label": datasets.ClassLabel(names=["a", "b"]),
            }
        ),
    ).save_to_disk(tmp_path / "hugging")
    assert_read(read_images(tmp_path / "hugging"), images, ["a", "b"])


def test_digits():
    found = read_images("digits")
    assert len(found) == 1797 and found.images.max() == 255


def test_what_cannot_be_read_is_an_error(images, tmp_path):
    (tmp_path / "a.npz").write_text("no")
    np.savez(tmp_path / "b.npz", pixels=images)
    np.savez(tmp_path / "c.npz", images=images, labels=[1])
    (tmp_path / "d.csv").write_text("file,label\na.png,1\n")
    (tmp_path / "e.csv").write_text("path,label\na.png\n")
    (tmp_path / "f.csv").write_text("path,label\nnone.png,cat\n")
    (tmp_path / "several").mkdir()
    (tmp_path / "several" / "dataset_dict.json").write_text("{}")
    for name, message in (
        ("a.npz", "is no .npz file of arrays"),
        ("b.npz", "has no images. It holds pixels"),
        ("c.npz", "4 images and 1 labels"),
        ("d.csv", "a column path. It has columns file, label"),
        ("e.csv", "line 2: expected 2 values"),
        ("several", "holds several data sets"),
        ("nowhere", "is not a folder"),
    ):
        with pytest.raises(ValueError, match=message):
            read_images(tmp_path / name)
    with pytest.raises(ValueError, match="Cannot read image .*none.png"):
        read_images(tmp_path / "f.csv").images[0]
