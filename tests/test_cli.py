"""The command line: output, JSON, and one line for a bad input."""

import json

import numpy as np
import PIL.Image
import pytest

from keras_vit22b import ViT22BBackbone
from keras_vit22b import ViT22BImageConverter
from keras_vit22b import __version__
from keras_vit22b import cli


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line; return its exit code, output and errors."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["keras-vit22b", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        captured = capsys.readouterr()
        return exit.value.code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preset")
    backbone = ViT22BBackbone(
        (8, 8, 1), 4, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=16
    )
    backbone.image_converter = ViT22BImageConverter((8, 8), channels=1)
    backbone.save_to_preset(folder)
    return folder


def test_presets_lists_every_row(run):
    code, output, _ = run("presets")
    assert code == 0
    assert "vit22b_patch14_224" in output
    rows = json.loads(run("presets", "--json")[1])
    assert rows["vit_g_patch14_224"]["has_weights"] is False


def test_version_is_that_of_the_package(run):
    assert run("--version") == (0, f"keras-vit22b {__version__}\n", "")


def test_info_counts_the_block_kernels_of_the_22b(run):
    code, output, _ = run("info", "vit22b_patch14_224", "--json")
    assert code == 0
    size = json.loads(output)
    assert size["parameters"]["block_kernels"] == 21_743_271_936
    assert size["tokens"] == 256
    assert size["bytes"]["bfloat16"] == 2 * size["parameters"]["total"]


def test_info_counts_flops_of_matmuls_twice_their_parameters(run):
    size = json.loads(run("info", "vit22b_patch14_224", "--json")[1])
    flops = size["flops_per_image"]
    assert flops["block_matmuls"] == 2 * 256 * 21_743_271_936
    assert flops["attention"] == 48 * 4 * 256 * 256 * 6144


def test_probe_of_a_folder_writes_its_record_and_plot(run, preset, tmp_path):
    generator = np.random.default_rng(0)
    for index in range(12):
        path = tmp_path / "images" / "dark bright".split()[index % 2]
        path.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 100, (9, 9), "uint8")
        pixels += 150 * (index % 2)
        PIL.Image.fromarray(pixels.astype("uint8")).save(path / f"{index}.png")
    output = tmp_path / "out"
    options = ["--images", tmp_path / "images", "--shots", "1,2"]
    options += ["--seeds", 2, "--output", output]
    code, text, _ = run("probe", preset, *options)
    assert code == 0
    assert "raw pixels" in text
    record = json.loads((output / "probe.json").read_text())
    assert record["data"]["images"] == 12
    assert record["preprocessing"]["image_size"] == [8, 8]
    assert len(record["accuracy"]["raw pixels"]["2"]["values"]) == 2
    assert (output / "probe.png").read_bytes().startswith(b"\x89PNG")
    again = json.loads(run("probe", preset, *options, "--json")[1])
    assert again == record


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["info", "vit22b_patch14"], "vit22b_patch14_224"),
        (["probe", "vit22b_patch14_224"], "never released"),
        (["probe", "--shots", "one"], "1,5,10"),
        (["probe", "--images", "nowhere"], "nowhere"),
        (["probe", "--shots", "200"], "at most 173 shots"),
        (["probe", "--shots", "-1"], "shots"),
        (["probe", "--output", __file__], "File exists"),
        (["info", "a" * 5000], "a"),
    ],
)
def test_a_bad_input_is_one_line_on_stderr(run, arguments, message):
    code, output, errors = run(*arguments)
    assert code == 1
    assert output == ""
    assert errors.startswith("Error: ")
    assert errors.count("\n") == 1
    assert message in errors
    assert "Traceback" not in errors


def test_images_that_cannot_be_read_are_counted(run, preset, tmp_path):
    for index in range(6):
        path = tmp_path / "images" / "ab"[index % 2]
        path.mkdir(parents=True, exist_ok=True)
        color = 40 * index
        PIL.Image.new("L", (9, 9), color).save(path / f"{index}.png")
    (path / "broken.png").write_bytes(b"no image")
    options = ["--images", tmp_path / "images", "--shots", "1", "--seeds", 1]
    options += ["--output", tmp_path / "out"]
    code, _, errors = run("probe", preset, *options)
    assert code == 1 and "broken.png" in errors
    code, output, errors = run("probe", preset, *options, "--skip-unreadable")
    assert code == 0
    assert "1 images could not be read" in output
    assert "broken.png" in errors


def test_features_fill_a_store_and_go_on(run, preset, tmp_path):
    store, photos = tmp_path / "store", tmp_path / "photos.npz"
    np.savez(photos, images=np.zeros((3, 9, 8), "uint8"), labels=[0, 1, 0])
    code, output, _ = run(
        *("features", preset, photos, store, "--pooling", "mean,map"),
        *("--blocks", "-1", "--views", "2"),
    )
    assert code == 0
    assert "block_0.mean" in output and "2 x 8" in output
    code, output, errors = run(
        *("features", preset, photos, store, "--pooling", "mean,map"),
        *("--blocks", "-1", "--views", "2", "--json"),
    )
    assert json.loads(output)["views"]["count"] == 2 and not errors
    code, _, errors = run("features", preset, photos, store)
    assert code == 1 and "made differently" in errors
