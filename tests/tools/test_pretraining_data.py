"""Pretraining data: no digits, and the same batches from the same seed."""

import importlib.util
import pathlib
import sys
import types
import unicodedata

import numpy as np
import pytest

PATH = pathlib.Path(__file__).parents[2] / "tools" / "pretraining_data.py"


@pytest.fixture(scope="module")
def data():
    spec = importlib.util.spec_from_file_location("pretraining_data", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_no_digit_of_any_script_is_a_class(data):
    digits = [
        chr(point)
        for point in range(sys.maxunicode + 1)
        if unicodedata.numeric(chr(point), None) is not None
    ]
    assert len(digits) > 1000
    assert not any(map(data.is_allowed, digits))


@pytest.mark.parametrize("character", "AzЖλअ∑")
def test_letters_and_symbols_are_allowed(data, character):
    assert data.is_allowed(character)


@pytest.mark.parametrize("character", "¼²①Ⅷ१٣ ⠿\u0301")
def test_numbers_marks_and_blanks_are_not(data, character):
    assert not data.is_allowed(character)


def test_batches_depend_on_seed_epoch_and_index_alone(data):
    fields = np.random.default_rng(0).integers(
        0, 256, (6, 2, data.FIELD, data.FIELD), "uint8"
    )
    glyphs = types.SimpleNamespace(
        classes=["A", "B", "C"], starts=np.array([0, 2, 4, 6]), fields=fields
    )
    photos = np.random.default_rng(1).integers(0, 256, (9, 28, 28), "uint8")

    def batches(seed=0):
        return data.MixedBatches(
            glyphs, photos, np.arange(9), batch_size=8, steps=3, seed=seed
        )

    images, labels = batches()[1]
    assert images.shape == (8, 28, 28, 1)
    assert images.min() >= -1 and images.max() <= 1
    assert (labels[:4] < 10).all() and (labels[4:] >= 10).all()
    again = batches()[1]
    assert (again[0] == images).all() and (again[1] == labels).all()
    later = batches()
    later.on_epoch_end()
    for other in (batches()[2], later[1], batches(seed=1)[1]):
        assert (other[0] != images).any()
