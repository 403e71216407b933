"""Compile a training step for a TPU slice that is not there.

libtpu compiles on any Linux host. The model is built abstractly, so the 22B
costs seconds and no memory, and the step is the one that `fit` runs.
"""

import dataclasses
import importlib.metadata
import json
import re
import time

import keras

from keras_vit22b.distribution.mesh import check_mesh
from keras_vit22b.distribution.mesh import device_mesh
from keras_vit22b.planning.chips import GIB
from keras_vit22b.planning.chips import Slice
from keras_vit22b.planning.schedule import Schedule
from keras_vit22b.planning.schedule import read_schedule
from keras_vit22b.planning.timeline import block_timeline
from keras_vit22b.planning.timeline import plot_timeline
from keras_vit22b.planning.timeline import predict_times

_SIZES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# As in "HLO temporaries (25.76G) exceeds available HBM (15.75G)" or "Used
# 25.76G of 15.75G hbm".
_OUT_OF_MEMORY = re.compile(
    r"([\d.]+)([KMGT])\)? (?:exceeds available HBM|of) "
    r"\(?([\d.]+)([KMGT])"
)


@dataclasses.dataclass
class Memory:
    """Memory of one chip, in bytes.

    Attributes:
        fits: bool. The compiler's own answer.
        arguments: int. Weights, optimizer, images and labels; `None` if it
            does not fit.
        temporaries: int. Activations, gradients and buffers of transfers;
            `None` if it does not fit.
        needed: int. In all; if it does not fit, what the compiler names.
        available: int. `None` if it fits, since the compiler then says not.
    """

    fits: bool
    arguments: int | None
    temporaries: int | None
    needed: int | None
    available: int | None


@dataclasses.dataclass
class CompileReport:
    """What the TPU compiler made of a training step.

    Attributes:
        settings: dict. The arguments of `compile_for`.
        chips: int.
        memory: `Memory`.
        schedule: `Schedule`; `None` if the step does not fit.
        seconds: dict from `"trace"` and `"compile"` to seconds.
        versions: dict from package to version.
    """

    settings: dict
    chips: int
    memory: Memory
    schedule: Schedule | None
    seconds: dict
    versions: dict

    def times(self):
        """Predict the step's times; see `timeline.predict_times`."""
        return predict_times(self.schedule, self._chip)

    @property
    def num_layers(self):
        """int. Blocks, as far as the schedule has transfers of them."""
        blocks = {t.block for t in self.schedule.transfers} - {None}
        return max(blocks, default=0) + 1

    @property
    def _chip(self):
        return Slice.from_name(self.settings["topology"]).chip

    def to_json(self):
        """Return the report as a JSON string, every transfer included."""
        report = dataclasses.asdict(dataclasses.replace(self, schedule=None))
        del report["schedule"]
        if self.schedule is not None:
            report["times"] = self.times()
            report["summary"] = self.schedule.summary()
            report["transfers"] = [
                dataclasses.asdict(t) for t in self.schedule.transfers
            ]
        return json.dumps(report, indent=2)

    def plot(self, path, block=1):
        """Draw one block's schedule, forward and backward, as a PNG.

        Args:
            path: path of the file.
            block: int. Index of the block. Defaults to `1`; the first waits
                for its weights.
        """
        if self.schedule is None:
            raise ValueError("There is no schedule: the step does not fit.")
        lanes = block_timeline(self.schedule, self._chip, block)
        plot_timeline(lanes, path, title=f"Block {block}, {self._title()}")

    def _title(self):
        s = self.settings
        return (
            f"{s['preset']} on {s['topology']}, batch {s['batch']} x model "
            f"{s['model']}, {s['images_per_chip']} images a chip"
        )

    def __str__(self):
        memory, lines = self.memory, [self._title()]
        if not memory.fits:
            lines.append(
                f"does not fit: {_gib(memory.needed)} needed of "
                f"{_gib(memory.available)} a chip"
            )
            return "\n".join(lines)
        lines.append(
            f"fits: {_gib(memory.needed)} a chip, of which arguments "
            f"{_gib(memory.arguments)}, temporaries {_gib(memory.temporaries)}"
        )
        lines.append(
            f"traced in {self.seconds['trace']:.0f} s, compiled in "
            f"{self.seconds['compile']:.0f} s"
        )
        times = self.times()
        waiting = times["waiting"]
        lines.append(
            f"predicted {1e3 * times['step']:.0f} ms a step: matmuls "
            f"{1e3 * times['matmul']:.0f}, other computing "
            f"{1e3 * times['compute']:.0f}, waiting "
            f"{1e3 * sum(waiting.values()):.1f}"
        )
        lines.append(
            f"{'cause':<19}{'phase':<9}{'kind':<19}{'schedule':<12}"
            f"{'count':>6}{'MB a chip':>11}{'waiting, ms':>12}"
        )
        for row in self.schedule.summary():
            key = "/".join(row[k] for k in ("cause", "phase", "kind", "status"))
            lines.append(
                f"{row['cause']:<19}{row['phase']:<9}{row['kind']:<19}"
                f"{row['status']:<12}{row['count']:>6}"
                f"{row['bytes'] / 1e6:>11.1f}{1e3 * waiting[key]:>12.2f}"
            )
        return "\n".join(lines)


def compile_for(
    topology,
    preset,
    *,
    batch,
    model,
    images_per_chip,
    num_layers=None,
    num_classes=1000,
    fsdp=True,
    optimizer="adamw",
    overlap="auto",
    remat=True,
    dtype="mixed_bfloat16",
    compiler_options=None,
):
    """Compile the training step of a classifier for a TPU slice.

    The process itself must run JAX on the CPU: set `JAX_PLATFORMS=cpu`. The
    step is that of several hosts: on one, `fit` also gives each image a weight,
    with which rows that fill up a batch are left out.

    Args:
        topology: string. The slice, such as `"v4:8x8x16"`.
        preset: string. Name or folder of a preset.
        batch: int. Size of the mesh's axis "batch".
        model: int. Size of the mesh's axis "model".
        images_per_chip: int. The step takes `images_per_chip` times the
            number of chips.
        num_layers: int. Blocks, other than the preset's, since a few show
            what all do. Defaults to `None`.
        num_classes: int. Of the head. Defaults to `1000`.
        fsdp: bool. Whether weights and optimizer are sharded over "batch"
            too. Defaults to `True`.
        optimizer: string or `keras.optimizers.Optimizer`. Defaults to
            `"adamw"`.
        overlap: string. See `keras_vit22b.distribution.device_mesh`. Defaults
            to `"auto"`.
        remat: bool. Whether blocks are recomputed in the backward pass.
            Defaults to `True`.
        dtype: string. Defaults to `"mixed_bfloat16"`.
        compiler_options: dict. Flags of libtpu; in training,
            `LIBTPU_INIT_ARGS` holds them. Defaults to `None`: the mesh's own
            `compiler_options`, or none with `overlap="xla"` or `"off"`.

    Returns:
        A `CompileReport`. A step that does not fit is a report too.

    Raises:
        ImportError: if libtpu is not installed.
        ValueError: if the slice is unknown, has not `batch * model` chips, or
            the backend is not JAX.

    Example:
    ```python
    report = keras_vit22b.distribution.compile_for(
        "v4:8x8x16", "vit22b_patch14_224",
        batch=128, model=8, images_per_chip=32, num_layers=4,
    )
    print(report)
    report.plot("block.png")
    ```
    """
    settings = locals()
    if keras.config.backend() != "jax":
        raise ValueError(
            "compile_for needs KERAS_BACKEND=jax. The backend is "
            f"{keras.config.backend()}."
        )
    tpu_slice = Slice.from_name(topology)
    if not isinstance(images_per_chip, int) or images_per_chip < 1:
        raise ValueError(
            "images_per_chip must be an integer of at least 1. Received: "
            f"{images_per_chip!r}."
        )
    check_mesh(batch, model, tpu_slice.num_chips)
    try:
        optimizer = keras.optimizers.get(optimizer)
    except ValueError as error:
        raise ValueError(
            "optimizer must be a keras.optimizers.Optimizer or the name of "
            f"one, such as 'adamw' or 'sgd'. Received: {optimizer!r}."
        ) from error
    settings["optimizer"] = optimizer.name
    start = time.perf_counter()
    mesh = device_mesh(
        batch=batch,
        model=model,
        overlap=overlap,
        devices=tpu_slice.devices(),
    )
    if compiler_options is None:
        hide = overlap in ("auto", "ring")
        compiler_options = mesh.compiler_options if hide else {}
        settings["compiler_options"] = compiler_options
    lowered = _lower(
        preset,
        mesh,
        num_images=images_per_chip * batch * model,
        num_classes=num_classes,
        fsdp=fsdp,
        optimizer=optimizer,
        backbone_options={"dtype": dtype, "remat": remat}
        | ({} if num_layers is None else {"num_layers": num_layers}),
    )
    traced = time.perf_counter()
    memory, schedule = _compile(lowered, model, compiler_options)
    return CompileReport(
        settings=settings,
        chips=tpu_slice.num_chips,
        memory=memory,
        schedule=schedule,
        seconds={
            "trace": traced - start,
            "compile": time.perf_counter() - traced,
        },
        versions={
            name: importlib.metadata.version(name)
            for name in ("keras", "jax", "libtpu")
        },
    )


def _lower(
    preset,
    mesh,
    *,
    num_images,
    num_classes,
    fsdp,
    optimizer,
    backbone_options,
):
    """Trace the step that `fit` runs, and return it lowered."""
    import jax

    from keras_vit22b.models import ViT22BBackbone
    from keras_vit22b.models import ViT22BImageClassifier
    from keras_vit22b.models.abstract import abstract_build
    from keras_vit22b.models.abstract import train_state_structs

    distribution = keras.distribution.ModelParallel(
        layout_map=ViT22BImageClassifier.get_layout_map(mesh, fsdp=fsdp),
        batch_dim_name="batch",
    )
    before = keras.distribution.distribution()
    try:
        keras.distribution.set_distribution(distribution)
        backbone = ViT22BBackbone.from_preset(
            preset, abstract=True, **backbone_options
        )
        with abstract_build():
            classifier = ViT22BImageClassifier(
                backbone, num_classes, compile=False
            )
        # Metrics have values, and these devices cannot hold any. So the step
        # is that of several hosts, where `fit` fills up no batch.
        keras.distribution.set_distribution(None)
        classifier.compile(optimizer)
        keras.distribution.set_distribution(distribution)

        def struct(shape, dtype):
            layout = distribution.get_data_layout(shape).backend_layout
            return jax.ShapeDtypeStruct(shape, dtype, sharding=layout)

        data = (
            struct((num_images, *backbone.image_shape), "float32"),
            struct((num_images,), "int32"),
        )
        state = train_state_structs(classifier, data)
        classifier.make_train_function()

        def train_step(state, data):
            return classifier.train_function(state, iter([data]))

        shardings = jax.tree.map(lambda s: s.sharding, state)
        step = jax.jit(
            train_step, donate_argnums=0, out_shardings=(None, shardings)
        )
        return step.lower(state, data)
    finally:
        keras.distribution.set_distribution(before)


def _compile(lowered, model, compiler_options):
    """Return the `Memory` and the `Schedule` of a lowered step."""
    import jax

    try:
        compiled = lowered.compile(compiler_options=compiler_options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return out_of_memory(str(error)), None
    sizes = compiled.memory_analysis()
    memory = Memory(
        fits=True,
        arguments=sizes.argument_size_in_bytes,
        temporaries=sizes.temp_size_in_bytes,
        # Outputs take the place of the arguments that are donated.
        needed=sizes.argument_size_in_bytes
        + sizes.temp_size_in_bytes
        + sizes.output_size_in_bytes
        - sizes.alias_size_in_bytes,
        available=None,
    )
    return memory, read_schedule(compiled.as_text(), model)


def out_of_memory(message):
    """Return the `Memory` that the compiler's error tells of.

    Args:
        message: string. Of the error.
    """
    found = _OUT_OF_MEMORY.search(message)
    needed = available = None
    if found:
        needed = _bytes(found[1], found[2])
        available = _bytes(found[3], found[4])
    return Memory(False, None, None, needed, available)


def _bytes(number, unit):
    return round(float(number) * _SIZES[unit.upper()])


def _gib(size):
    return "an unknown size" if size is None else f"{size / GIB:.2f} GiB"
