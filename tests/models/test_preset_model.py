"""A preset folder gives back the model that was saved to it."""

import json

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops
from safetensors.numpy import load_file

from keras_vit22b import ViT22BBackbone
from keras_vit22b import ViT22BImageClassifier
from keras_vit22b import ViT22BImageConverter
from keras_vit22b import from_preset
from keras_vit22b.layers import resize_position_embedding
from keras_vit22b.weights import preset_config

FILES = {
    "README.md",
    "config.json",
    "image_converter.json",
    "metadata.json",
    "model.safetensors",
    "model.weights.json",
    "preprocessor.json",
}


@pytest.fixture
def classifier(make_backbone, randomize):
    backbone = make_backbone(num_registers=1)
    backbone.image_converter = ViT22BImageConverter((8, 12))
    classifier = ViT22BImageClassifier(
        backbone, 2, activation="softmax", dropout=0.1, class_names=["a", "b"]
    )
    randomize(classifier)
    return classifier


@pytest.fixture
def backbone(classifier):
    return classifier.backbone


@pytest.fixture
def folder(classifier, tmp_path):
    classifier.save_to_preset(tmp_path)
    return tmp_path


def assert_same_outputs(one, other, images):
    theirs = other.predict(images, verbose=0)
    for key, output in one.predict(images, verbose=0).items():
        np.testing.assert_array_equal(output, theirs[key])


# === Save and load ===


@pytest.mark.parametrize(
    "options",
    [{}, {"block": "sequential", "norm": "layer", "pooling": "cls"}],
    ids=["parallel", "sequential"],
)
def test_saved_equals_loaded(make_backbone, images, options, tmp_path):
    backbone = make_backbone(**options, random=True)
    backbone.save_to_preset(tmp_path)
    loaded = from_preset(tmp_path)
    assert type(loaded) is ViT22BBackbone
    assert loaded.get_config() == backbone.get_config()
    assert loaded.trainable_weights
    assert_same_outputs(loaded, backbone, images)


def test_stock_keras_hub_loads_the_backbone(folder, backbone, images):
    loaded = keras_hub.models.Backbone.from_preset(str(folder))
    assert type(loaded) is ViT22BBackbone
    assert_same_outputs(loaded, backbone, images)


@pytest.mark.parametrize("size", [600, 5000, "5GB"])
def test_stock_keras_hub_loads_shards(backbone, images, tmp_path, size):
    backbone.save_to_preset(tmp_path / "sharded", max_shard_size=size)
    shards = list((tmp_path / "sharded").glob("model-*.safetensors"))
    assert bool(shards) == (size != "5GB")
    loaded = keras_hub.models.Backbone.from_preset(str(tmp_path / "sharded"))
    assert type(loaded) is ViT22BBackbone
    for ours, theirs in zip(loaded.weights, backbone.weights, strict=True):
        np.testing.assert_array_equal(ours.value, theirs.value)
    assert_same_outputs(loaded, backbone, images)


def test_a_folder_holds_these_files(folder):
    assert {p.name for p in folder.iterdir()} == FILES


def test_the_index_names_every_tensor(folder, classifier):
    index = json.loads((folder / "model.weights.json").read_text())
    assert index["weight_map"] == {
        name: "model.safetensors" for name in classifier.tensors()
    }
    count = classifier.count_params()
    assert index["metadata"]["total_size"] == 4 * count


def test_metadata_tells_size_and_dtype(folder, backbone):
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["parameter_count"] == backbone.count_params()
    assert metadata["dtype"] == "float32"
    assert metadata["keras_version"] == keras.version()


def test_saving_what_was_loaded_gives_the_same_files(folder, tmp_path):
    again = tmp_path / "again" / folder.name
    ViT22BImageClassifier.from_preset(folder).save_to_preset(again)
    for name in FILES - {"model.safetensors"}:
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    ours, theirs = (load_file(f / "model.safetensors") for f in (folder, again))
    assert list(ours) == list(theirs)
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name])


# === Classifiers ===


def test_a_classifier_comes_back_whole(folder, classifier, images):
    loaded = ViT22BImageClassifier.from_preset(folder)
    np.testing.assert_array_equal(loaded(images), classifier(images))
    for option in ("num_classes", "activation", "dropout", "class_names"):
        assert getattr(loaded, option) == getattr(classifier, option)
    assert loaded.preprocessor.image_converter.image_size == (8, 12)
    assert loaded.compiled


def test_num_classes_gives_a_new_head(folder, backbone, images):
    loaded = ViT22BImageClassifier.from_preset(folder, num_classes=5)
    np.testing.assert_array_equal(loaded(images), np.zeros((3, 5)))
    assert loaded.class_names is None
    assert_same_outputs(loaded.backbone, backbone, images)


def test_as_many_classes_still_mean_a_new_head(folder, images):
    loaded = ViT22BImageClassifier.from_preset(folder, num_classes=2)
    np.testing.assert_array_equal(loaded.head.kernel.value, np.zeros((8, 2)))


def test_num_classes_none_keeps_the_head(folder, classifier, images):
    loaded = ViT22BImageClassifier.from_preset(folder, num_classes=None)
    np.testing.assert_array_equal(loaded(images), classifier(images))


def test_a_backbone_is_read_from_a_classifiers_folder(folder, backbone, images):
    assert_same_outputs(from_preset(folder), backbone, images)


def test_a_classifier_on_a_backbones_folder_needs_num_classes(
    backbone, images, tmp_path
):
    backbone.save_to_preset(tmp_path)
    with pytest.raises(ValueError, match="no classification head.*num_classes"):
        ViT22BImageClassifier.from_preset(tmp_path)
    loaded = ViT22BImageClassifier.from_preset(tmp_path, num_classes=3)
    assert tuple(loaded(images).shape) == (3, 3)
    assert_same_outputs(loaded.backbone, backbone, images)


# === Options ===


@pytest.mark.parametrize(
    "image_shape, grid",
    [((12, 8, 3), (3, 2)), ((16, 24, 3), (4, 6)), ((4, 4, 3), (1, 1))],
)
def test_image_shape_resizes_positions(folder, backbone, image_shape, grid):
    loaded = from_preset(folder, image_shape=image_shape)
    assert loaded.image_shape == image_shape
    assert loaded.image_converter.image_size == image_shape[:2]
    np.testing.assert_allclose(
        loaded.patch_embedding.position_embedding.value,
        resize_position_embedding(
            backbone.patch_embedding.position_embedding, (2, 3), grid
        ),
        atol=1e-6,
    )
    raw = np.zeros((2, 9, 14, 3), "uint8")
    outputs = loaded(loaded.image_converter(raw))
    assert outputs["sequence_output"].shape[1] == grid[0] * grid[1] + 1


def test_image_shape_reaches_a_classifiers_preprocessor(folder):
    loaded = ViT22BImageClassifier.from_preset(folder, image_shape=(16, 24, 3))
    assert loaded.preprocessor.image_converter.image_size == (16, 24)
    raw = np.zeros((2, 9, 14, 3), "uint8")
    assert loaded.predict(raw, verbose=0).shape == (2, 2)


@pytest.mark.parametrize(
    "image_shape, message",
    [
        ((9, 12, 3), "does not divide into 4 x 4 patches"),
        ((8, 12, 1), "patch_embedding.kernel has shape"),
        ((8, 12), "fixed shape"),
    ],
)
def test_an_image_shape_that_cannot_be_is_refused(folder, image_shape, message):
    with pytest.raises(ValueError, match=message):
        from_preset(folder, image_shape=image_shape)


def test_dtype_is_that_of_the_new_model(folder, backbone, images):
    mixed = from_preset(folder, dtype="mixed_bfloat16")
    assert mixed.dtype_policy.name == "mixed_bfloat16"
    assert {w.dtype for w in mixed.weights} == {"float32"}
    half = from_preset(folder, dtype="bfloat16")
    assert {w.dtype for w in half.weights} == {"bfloat16"}
    for ours, theirs in zip(half.weights, backbone.weights, strict=True):
        np.testing.assert_allclose(
            ops.cast(ours.value, "float32"), theirs.value, rtol=2**-8
        )
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert from_preset(folder).dtype_policy.name == "mixed_bfloat16"


def test_options_of_training_can_be_added(folder, backbone, images):
    loaded = from_preset(folder, dropout_rate=0.2, drop_path_rate=0.1)
    assert loaded.dropout_rate == 0.2
    assert_same_outputs(loaded, backbone, images)


def test_without_weights_they_are_random(folder, backbone, images):
    loaded = from_preset(folder, load_weights=False)
    assert loaded.count_params() == backbone.count_params()
    difference = (
        loaded.predict(images, verbose=0)["pooled_output"]
        - backbone.predict(images, verbose=0)["pooled_output"]
    )
    assert np.abs(difference).min() > 0


def test_an_option_that_changes_the_weights_is_refused(folder):
    with pytest.raises(ValueError, match="not part of the model: registers"):
        from_preset(folder, num_registers=0)


@pytest.mark.parametrize("model", [ViT22BBackbone, ViT22BImageClassifier])
def test_an_unknown_option_is_refused(folder, model):
    with pytest.raises(TypeError, match="colour"):
        model.from_preset(folder, colour="red")


# === Saving that fails ===


@pytest.mark.parametrize("exists", [False, True])
def test_a_failing_save_leaves_what_was_there(
    backbone, folder, tmp_path, monkeypatch, exists
):
    write_json = preset_config.write_json
    target = folder if exists else tmp_path / "preset"
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def fail_at_metadata(path, value):
        if path.name == "metadata.json":
            raise OSError("No space left on device")
        write_json(path, value)

    monkeypatch.setattr(preset_config, "write_json", fail_at_metadata)
    with pytest.raises(OSError, match="No space left"):
        backbone.save_to_preset(target)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert not list(tmp_path.parent.glob(".*saving*"))
    with pytest.raises(ValueError, match="Unknown preset"):
        from_preset(tmp_path / "preset")


def test_a_file_in_the_way_is_left_alone(backbone, tmp_path):
    (tmp_path / "preset").write_text("mine")
    with pytest.raises(ValueError, match="preset is a file, not a folder"):
        backbone.save_to_preset(tmp_path / "preset")
    assert (tmp_path / "preset").read_text() == "mine"


def test_another_models_preprocessing_is_not_inherited(
    folder, make_backbone, images
):
    make_backbone().save_to_preset(folder)
    assert from_preset(folder).image_converter is None
    with pytest.raises(ValueError, match="no classification head"):
        ViT22BImageClassifier.from_preset(folder)


def test_the_working_directory_is_not_replaced(
    make_backbone, tmp_path, monkeypatch
):
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    for folder in (".", "", "..", tmp_path):
        with pytest.raises(ValueError, match="working directory"):
            make_backbone().save_to_preset(folder)
    make_backbone().save_to_preset("preset")
    assert (tmp_path / "below" / "preset" / "config.json").is_file()


def test_a_folder_of_folders_is_not_replaced(make_backbone, tmp_path):
    (tmp_path / "home" / "photos").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds other folders .photos."):
        make_backbone().save_to_preset(tmp_path / "home")
    assert [p.name for p in (tmp_path / "home").iterdir()] == ["photos"]


def test_a_private_folder_stays_private(make_backbone, tmp_path):
    folder = tmp_path / "preset"
    folder.mkdir(mode=0o700)
    make_backbone().save_to_preset(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize`")
def test_an_int8_model_comes_back_bit_for_bit(
    make_backbone, images, tmp_path, dtype
):
    classifier = ViT22BImageClassifier(
        make_backbone(random=True, dtype=dtype, num_layers=1), num_classes=3
    )
    classifier.quantize("int8")
    classifier.save_to_preset(tmp_path / "int8", max_shard_size=2000)
    loaded = ViT22BImageClassifier.from_preset(tmp_path / "int8", dtype=dtype)
    assert loaded.backbone.blocks[0].in_projection.quantization_mode == "int8"
    assert loaded.backbone.count_params() == classifier.backbone.count_params()
    for name, variable in classifier.tensors().items():
        other = loaded.tensors()[name]
        assert other.dtype == variable.dtype, name
        np.testing.assert_array_equal(
            keras.ops.convert_to_numpy(other.value),
            keras.ops.convert_to_numpy(variable.value),
        )
    np.testing.assert_array_equal(
        loaded.predict(images, verbose=0), classifier.predict(images, verbose=0)
    )
    fresh = ViT22BImageClassifier.from_preset(
        tmp_path / "int8", num_classes=5, dtype=dtype
    )
    # A new head is to be trained, which int8 cannot be.
    assert fresh.head.quantization_mode is None


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize`")
def test_floats_are_not_loaded_into_int8(make_backbone, tmp_path):
    make_backbone().save_weights(tmp_path / "float.safetensors")
    backbone = make_backbone()
    backbone.quantize("int8")
    with pytest.raises(ValueError, match="missing: .*kernel_scale"):
        backbone.load_weights(tmp_path / "float.safetensors")
