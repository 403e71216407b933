"""Accelerators: what a chip does in a second, and how chips are joined.

Sources. TPU peaks, memory and link bandwidth: the table in
https://jax-ml.github.io/scaling-book/tpus. Memory that a TPU program can have:
the compiler's own answer, libtpu 0.0.42.1. Clocks follow from the peak and the
number of matrix units (v4, v5p: 8 of 128 x 128; v5e: 4; v6e: 4 times that of
v5e a cycle). H100 and H200 are the SXM data sheets',
https://www.nvidia.com/en-us/data-center/h200. Peaks are dense bfloat16.
"""

import dataclasses
import itertools
import math
import os
import re
import types

from keras_vit22b.distribution.device_order import wrapped_sides


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of chip.

    Attributes:
        kind: string.
        peak_flops: float. FLOP/s in bfloat16.
        hbm_bytes: float. Memory that a program can have.
        hbm_bandwidth: float. Bytes/s.
        link_bandwidth: float. Bytes/s of one link in one direction. A GPU's
            is all its NVLink.
        dimensions: int. Of the torus; a chip has two links a dimension. `0`
            for GPUs, which reach all others of their host through a switch.
        chips_per_host: int.
        clock: float. Cycles/s, to turn the compiler's cycles into time; `0`
            where it is not compiled for.
        topology_options: dict. What JAX needs beside a topology's name.
    """

    kind: str
    peak_flops: float
    hbm_bytes: float
    hbm_bandwidth: float
    link_bandwidth: float
    dimensions: int
    chips_per_host: int
    clock: float = 0.0
    topology_options: dict = dataclasses.field(default_factory=dict)


GIB = 2**30

# Without it, JAX takes the two cores of a chip for two devices.
_MEGACORE = {"chip_config_name": "megacore", "chips_per_host_bounds": (2, 2, 1)}

CHIPS = {
    chip.kind: chip
    for chip in (
        Chip("v4", 275e12, 30.75 * GIB, 1.2e12, 45e9, 3, 4, 1.05e9, _MEGACORE),
        Chip("v5e", 197e12, 15.75 * GIB, 0.81e12, 45e9, 2, 8, 1.5e9),
        Chip("v5p", 459e12, 95.74 * GIB, 2.8e12, 90e9, 3, 4, 1.75e9, _MEGACORE),
        Chip("v6e", 918e12, 31.25 * GIB, 1.6e12, 90e9, 2, 8, 1.75e9),
        Chip("h100", 989e12, 80e9, 3.35e12, 450e9, 0, 8),
        Chip("h200", 989e12, 141e9, 4.8e12, 450e9, 0, 8),
    )
}
# Between hosts of GPUs, a chip: 400 Gbit/s InfiniBand, one way.
HOST_BANDWIDTH = 50e9


def chip(kind):
    """Return the `Chip` of a kind, such as `"v4"` or `"H100"`.

    Raises:
        ValueError: if the kind is unknown.
    """
    try:
        return CHIPS[kind.lower()]
    except (AttributeError, KeyError):
        raise ValueError(
            f"Unknown chip {kind!r}. Known are {', '.join(CHIPS)}."
        ) from None


def chip_of_device(device):
    """Return the `Chip` of a JAX device, or `None` if it is not in the table.

    Args:
        device: a `jax.Device`.
    """
    kind = device.device_kind.lower()
    for name, words in (
        ("v4", "tpu v4"),
        ("v5e", "tpu v5 lite"),
        ("v5p", "tpu v5"),
        ("v6e", "tpu v6"),
        ("h100", "h100"),
        ("h200", "h200"),
    ):
        if words in kind:
            return CHIPS[name]
    return None


@dataclasses.dataclass(frozen=True)
class Slice:
    """TPU chips joined by links.

    Attributes:
        chip: `Chip`.
        shape: tuple of int. Chips along each dimension.
    """

    chip: Chip
    shape: tuple

    @classmethod
    def from_name(cls, name):
        """Make a slice from a name, such as `"v4:8x8x16"`.

        Raises:
            ValueError: if the name has another form, or is of a GPU.
        """
        match = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)*)", str(name))
        if not match:
            raise ValueError(
                "Expected a kind of TPU and its shape, such as 'v4:8x8x16'. "
                f"Received: {name!r}."
            )
        kind = chip(match[1])
        shape = tuple(map(int, match[2].split("x")))
        if not kind.dimensions:
            raise ValueError(
                f"{kind.kind} is a GPU, and only TPUs are compiled for ahead. "
                "keras-vit22b plan takes any chip."
            )
        if len(shape) != kind.dimensions:
            example = "x".join(["4"] * kind.dimensions)
            raise ValueError(
                f"A {kind.kind} slice has {kind.dimensions} dimensions, such "
                f"as '{kind.kind}:{example}'. Received: {name!r}."
            )
        return cls(kind, shape)

    @property
    def name(self):
        """string. As `from_name` takes it."""
        return f"{self.chip.kind}:{'x'.join(map(str, self.shape))}"

    @property
    def num_chips(self):
        """int."""
        return math.prod(self.shape)

    @property
    def wraps(self):
        """tuple of bool. Whether the links close a ring, by dimension."""
        return wrapped_sides(self.chip.kind, self.shape)

    def stand_ins(self):
        """Return what `device_order` reads of devices, without a compiler."""
        return [
            types.SimpleNamespace(
                platform="tpu", device_kind=self.chip.kind, coords=coords
            )
            for coords in itertools.product(*map(range, self.shape))
        ]

    def devices(self):
        """Return JAX devices that can be compiled for, but run nothing.

        Raises:
            ImportError: if libtpu is not installed.
            ValueError: if there is no such slice.
        """
        from jax.experimental import topologies

        check_libtpu()
        _quiet_libtpu()
        options = dict(self.chip.topology_options)
        if any(self.wraps):
            options["wrap"] = (*self.wraps, False)[:3]
        try:
            topology = topologies.get_topology_desc(
                platform="tpu", topology_name=self.name, **options
            )
        except Exception as error:  # JAX raises its own kinds.
            raise ValueError(
                f"The TPU compiler knows no slice {self.name}: {error}"
            ) from error
        return topology.devices


def check_libtpu():
    """Raise if the TPU compiler is not installed."""
    import importlib.util

    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(
            "Compiling for a TPU needs its compiler, which runs on any Linux "
            'host: pip install "keras-vit22b[jax,tpu-check]", or in a clone '
            'pip install -e ".[jax,tpu-check]"'
        )


def set_environment():
    """Set what compiling for TPUs needs, before Keras is imported.

    Where libtpu is installed, JAX would look for a TPU, and libtpu would ask
    the network for its host.
    """
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    _quiet_libtpu()


def _quiet_libtpu():
    """Tell libtpu what it would ask the network for; any answer will do.

    And that no other process has a TPU, so that several can compile.
    """
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
