"""The table of chips, and slices by name."""

import pytest

from keras_vit22b.planning.chips import CHIPS
from keras_vit22b.planning.chips import Slice
from keras_vit22b.planning.chips import chip


def test_a_slice_has_a_name_and_a_size():
    tpu_slice = Slice.from_name("v4:8x8x16")
    assert tpu_slice.num_chips == 1024
    assert tpu_slice.name == "v4:8x8x16"


@pytest.mark.parametrize(
    "name, wraps",
    [
        ("v4:4x4x8", (True, True, True)),
        ("v4:2x2x2", (False, False, False)),
        ("v5e:16x16", (True, True)),
        ("v5e:8x16", (False, True)),
        ("v5e:4x8", (False, False)),
    ],
)
def test_links_close_rings_in_cubes_and_on_full_sides(name, wraps):
    assert Slice.from_name(name).wraps == wraps


@pytest.mark.parametrize(
    "name, message",
    [
        ("v4-8", "such as 'v4:8x8x16'"),
        ("v4:8x8", "has 3 dimensions, such as 'v4:4x4x4'"),
        (
            "v9:2x2",
            "Unknown chip 'v9'. Known are v4, v5e, v5p, v6e, h100, h200",
        ),
        ("h100:8", "is a GPU"),
    ],
)
def test_a_wrong_name_is_an_error(name, message):
    with pytest.raises(ValueError) as error:
        Slice.from_name(name)
    assert message in str(error.value)


def test_kinds_are_found_in_any_case():
    assert chip("H200") is CHIPS["h200"]


def test_clocks_agree_with_peaks():
    """FLOPs a cycle are whole matrix units: two a multiplier."""
    for kind, units, side in (
        ("v4", 8, 128),
        ("v5e", 4, 128),
        ("v5p", 8, 128),
        ("v6e", 4, 256),
    ):
        flops = 2 * units * side**2 * CHIPS[kind].clock
        assert flops == pytest.approx(CHIPS[kind].peak_flops, rel=0.01)
