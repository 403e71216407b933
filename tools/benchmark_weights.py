"""Measure loading and saving of weights against plain reads and writes.

    python tools/benchmark_weights.py --scratch /tmp/weights

On a model of the package's table, by default the one of a billion parameters
in bfloat16. Each measurement has a process of its own; ratios are to a plain
read, or write and fsync, of the same bytes in the same process. The page cache
is warm for every read. Prints JSON and writes it to --output.
"""

import argparse
import gc
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import numpy as np

REPEATS = 5
SHARD_SIZE = "600MB"


def resident(key="VmRSS"):
    """Return this process's resident memory, or its peak, in bytes."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key}")


def forget_peak():
    """Start a new peak of resident memory."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def back_memory(num_bytes):
    """Touch memory and free it, so that what is timed next can use it at once.

    A virtual machine may hand free memory back to its host; the first touch
    then costs more than a write to disk, and falls on whoever comes first.
    """
    np.empty(num_bytes, np.uint8)[:: os.sysconf("SC_PAGESIZE")] = 1


def shard_files(folder):
    return sorted(pathlib.Path(folder).glob("*.safetensors"))


def num_bytes_of(folder):
    return sum(path.stat().st_size for path in shard_files(folder))


def plain_read(folder):
    """Return the seconds of reading all bytes, file by file, at its best."""
    seconds = []
    for _ in range(REPEATS):
        back_memory(2 * num_bytes_of(folder))
        start = time.perf_counter()
        held = [path.read_bytes() for path in shard_files(folder)]
        seconds.append(time.perf_counter() - start)
        del held
    return min(seconds)


def measure_load(folder, preset, devices):
    """Load into an abstract model; seconds and peak memory."""
    import keras

    if devices > 1:
        split = keras.distribution.LayoutMap(
            keras.distribution.DeviceMesh((devices,), ["model"])
        )
        split[".*in_projection/kernel"] = ("model", None, None)
        split[".*out_projection/kernel"] = (None, None, "model")
        split["pooling/(query|key|value)/kernel"] = ("model", None, None)
        split["pooling/out/kernel"] = (None, None, "model")
        split["pooling/mlp_.*/kernel"] = ("model", None)
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(
                layout_map=split, batch_dim_name="model"
            )
        )
    from keras_vit22b import ViT22BBackbone
    from keras_vit22b.weights.preset_folder import PresetFolder
    from keras_vit22b.weights.shards import Shards
    from keras_vit22b.weights.shards import num_bytes

    read = plain_read(folder)
    # The backend's own start is not the loader's.
    keras.ops.convert_to_numpy(keras.ops.ones((1,)))
    seconds, extra = [], []
    for _ in range(REPEATS):
        model = ViT22BBackbone.from_preset(
            preset, abstract=True, dtype="bfloat16"
        )
        back_memory(2 * num_bytes_of(folder))
        before = resident()
        forget_peak()
        start = time.perf_counter()
        with PresetFolder(folder) as opened:
            model._load_tensors(Shards(opened))
        if keras.config.backend() == "jax":
            import jax

            jax.block_until_ready([w.value for w in model.weights])
        seconds.append(time.perf_counter() - start)
        own = sum(held_bytes(w) for w in model.weights)
        extra.append(resident("VmHWM") - before - own)
        largest = max(num_bytes(w) for w in model.weights)
        del model
        gc.collect()
    return {
        "plain_read_s": read,
        "load_s": min(seconds),
        "load_over_read": min(seconds) / read,
        "extra_peak_bytes": extra[0],
        "largest_tensor_bytes": largest,
        "allowed_peak_bytes": int(1.2 * largest + 100e6),
    }


def held_bytes(variable):
    """Return the bytes of a variable on all simulated devices together."""
    from keras_vit22b.weights.shards import num_bytes

    shards = getattr(variable.value, "addressable_shards", None)
    if shards is None:
        return num_bytes(variable)
    return sum(shard.data.nbytes for shard in shards)


def measure_save(folder, scratch):
    """Save against writing and syncing the same bytes."""
    from keras_vit22b import from_preset

    model = from_preset(folder, dtype="bfloat16")
    data = [path.read_bytes() for path in shard_files(folder)]
    plain, save = [], []
    for _ in range(REPEATS):
        back_memory(2 * num_bytes_of(folder))
        start = time.perf_counter()
        for index, part in enumerate(data):
            with open(scratch / f"plain{index}", "wb") as file:
                file.write(part)
                file.flush()
                os.fsync(file.fileno())
        plain.append(time.perf_counter() - start)
        for index in range(len(data)):
            (scratch / f"plain{index}").unlink()
        back_memory(2 * num_bytes_of(folder))
        start = time.perf_counter()
        model.save_to_preset(scratch / "saved", max_shard_size=SHARD_SIZE)
        save.append(time.perf_counter() - start)
        shutil.rmtree(scratch / "saved")
    return {
        "plain_write_s": min(plain),
        "save_s": min(save),
        "save_over_write": min(save) / min(plain),
    }


def measure_peers(folder, scratch):
    """Keras' own H5, and safetensors' own reader."""
    import safetensors.numpy

    from keras_vit22b import from_preset

    model = from_preset(folder, dtype="bfloat16")
    path = scratch / "model.weights.h5"
    back_memory(2 * num_bytes_of(folder))
    start = time.perf_counter()
    model.save_weights(path)
    saved = time.perf_counter() - start
    path.read_bytes()
    back_memory(2 * num_bytes_of(folder))
    start = time.perf_counter()
    model.load_weights(path)
    loaded = time.perf_counter() - start
    path.unlink()
    back_memory(2 * num_bytes_of(folder))
    start = time.perf_counter()
    held = [safetensors.numpy.load_file(p) for p in shard_files(folder)]
    numpy_s = time.perf_counter() - start
    del held
    return {
        "plain_read_s": plain_read(folder),
        "keras_h5_load_s": loaded,
        "keras_h5_save_s": saved,
        "safetensors_numpy_load_s": numpy_s,
    }


def make_preset(folder, preset):
    """Write a preset with random weights."""
    import keras

    from keras_vit22b import from_preset

    keras.utils.set_random_seed(0)
    from_preset(preset, load_weights=False, dtype="bfloat16").save_to_preset(
        folder, max_shard_size=SHARD_SIZE
    )


def run(task, options, backend, devices=1):
    """Run one task in a process of its own and return its result."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, __file__, "--task", task]
    command += ["--preset", options.preset, "--scratch", str(options.scratch)]
    command += ["--devices", str(devices)]
    output = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return json.loads(output.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", default="vit1b_patch14_224")
    parser.add_argument("--scratch", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument(
        "--devices", type=int, default=1, help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    folder = options.scratch / options.preset
    tasks = {
        "make": lambda: make_preset(folder, options.preset),
        "load": lambda: measure_load(folder, options.preset, options.devices),
        "save": lambda: measure_save(folder, options.scratch),
        "peers": lambda: measure_peers(folder, options.scratch),
    }
    if options.task:
        print(json.dumps(tasks[options.task]()))
        return
    options.scratch.mkdir(parents=True, exist_ok=True)
    if not folder.exists():
        run("make", options, "jax")
    result = {"preset": options.preset, "dtype": "bfloat16"}
    result["bytes"] = num_bytes_of(folder)
    for backend in ("jax", "tensorflow"):
        result[f"load_{backend}"] = run("load", options, backend)
        result[f"save_{backend}"] = run("save", options, backend)
        result[f"peers_{backend}"] = run("peers", options, backend)
    result["load_jax_8_devices"] = run("load", options, "jax", devices=8)
    text = json.dumps(result, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
