"""Presets for the test Hub, and clients that run this package."""

import hashlib
import textwrap

import keras
import pytest
from hub_server import HubClient
from hub_server import HubServer

from keras_vit22b import ViT22BBackbone
from keras_vit22b import ViT22BImageConverter

# What the code of every client may call.
START = """
import hashlib, keras, logging, os, pathlib
from keras_vit22b import from_preset, push_to_hub
from keras_vit22b.weights import hub
from keras_vit22b.weights.hub import HubPreset, open_hub_preset

def digest(backbone):
    sha256 = hashlib.sha256()
    for variable in backbone.tensors().values():
        value = keras.ops.convert_to_numpy(variable.value)
        sha256.update(value.tobytes())
    return sha256.hexdigest()

def load(handle, **options):
    backbone = from_preset(handle, **options)
    return [backbone.source, digest(backbone)]

def pull(handle, **options):
    with open_hub_preset(handle, **options) as folder:
        folder.fetch_all()
        return folder.path

def mark():
    "Draw a line in the server's list of requests."
    HfApi().whoami(token="hf_read")
"""


class Preset:
    """A small preset in several files.

    Attributes:
        folder: path.
        files: dict from file name to bytes.
        digest: sha256 of all weights, in hexadecimal.
    """

    def __init__(self, folder, seed):
        keras.utils.set_random_seed(seed)
        backbone = ViT22BBackbone(
            (8, 8, 3), 4, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=16
        )
        backbone.image_converter = ViT22BImageConverter((8, 8))
        backbone.save_to_preset(folder, max_shard_size=3000)
        # As if edited: a push would write another with the repository's name.
        (folder / "README.md").write_text("A small model.\n")
        self.folder = folder
        self.files = {p.name: p.read_bytes() for p in folder.iterdir()}
        sha256 = hashlib.sha256()
        for variable in backbone.tensors().values():
            value = keras.ops.convert_to_numpy(variable.value)
            sha256.update(value.tobytes())
        self.digest = sha256.hexdigest()

    def stage(self, server, repo="org/m", **options):
        """Put it in a repository without a client; return the commit."""
        server.store.create(repo, **options)
        return server.store.commit(repo, self.files)


@pytest.fixture(scope="session")
def presets(tmp_path_factory):
    """Two presets with the same names of files and other weights."""
    folder = tmp_path_factory.mktemp("presets")
    presets = [Preset(folder / f"{seed}" / "preset", seed) for seed in (1, 2)]
    assert presets[0].files.keys() == presets[1].files.keys()
    assert sum("-of-00003" in name for name in presets[0].files) == 3
    return presets


@pytest.fixture
def preset(presets):
    return presets[0]


@pytest.fixture
def server(tmp_path):
    with HubServer(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def client(server, tmp_path):
    """Run code in a client whose HF_HOME is `tmp_path / home`."""

    def run(code, token=None, home="home", values=(), **options):
        hub_client = HubClient(server, tmp_path / home, token=token, **options)
        code = textwrap.dedent(START) + textwrap.dedent(code)
        return hub_client.run(code, timeout=200, **dict(values))

    return run
