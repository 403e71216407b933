"""Which part of a batch each process of a job gives (JAX).

Keras shards data by the numbers of the processes, as if the first of them held
the first rows of the mesh. On a mesh along links a row may lie on many hosts:
on v4:8x8x16, batch 128 x model 8, there are 64 parts for 256 processes, and
Keras would make 128.
"""

import keras
import numpy as np

from keras_vit22b.distribution.sharding import check_backend


def data_share(device_mesh):
    """Return which share of each batch this process gives to `fit`.

    Processes with the same index hold the same images, and must give the same.

    Args:
        device_mesh: a `keras.distribution.DeviceMesh` with an axis "batch".

    Returns:
        `(index, count)`: the share, from 0 to `count - 1`, and how many there
        are. `(0, 1)`, all of the data, where one process holds the mesh.

    Raises:
        ValueError: if the backend is not JAX, or processes hold images in
            common, but not all.

    Example:
    ```python
    index, count = keras_vit22b.distribution.data_share(mesh)
    classifier.fit(images[index::count], labels[index::count])
    ```
    """
    check_backend()
    if "batch" not in getattr(device_mesh, "axis_names", ()):
        raise ValueError(
            'data_share needs a mesh with an axis "batch", as device_mesh '
            f"makes. Received: {device_mesh!r}."
        )
    import jax

    return process_shares(device_mesh)[jax.process_index()]


def process_shares(device_mesh, axis="batch"):
    """Return `{process: (index, count)}`; see `data_share`.

    Args:
        device_mesh: a `keras.distribution.DeviceMesh`.
        axis: string. The axis of the mesh that splits the batch. Defaults to
            `"batch"`.
    """
    devices = device_mesh.devices
    if not hasattr(devices.flat[0], "process_index"):
        devices = device_mesh.backend_mesh.devices  # From Keras' own names.
    dimension = device_mesh.axis_names.index(axis)
    rows = {}
    for position, device in np.ndenumerate(devices):
        held = rows.setdefault(device.process_index, set())
        held.add(position[dimension])
    rows = {process: tuple(sorted(held)) for process, held in rows.items()}
    parts = sorted(set(rows.values()))
    sizes = {len(part) for part in parts}
    if len(sizes) > 1 or sum(map(len, parts)) != devices.shape[dimension]:
        raise ValueError(
            "Processes must hold the same rows of the mesh, or none in "
            "common. Received: "
            + ", ".join(f"{p} holds {held}" for p, held in rows.items())
            + '. Use a mesh whose axis "model" divides the devices of a '
            "process, or is a multiple of them."
        )
    return {p: (parts.index(held), len(parts)) for p, held in rows.items()}


def check_sharded_by_keras():
    """Raise where Keras would give processes other shares than they hold.

    JAX would take them as they are: for a smaller batch, and with images that
    differ between devices that should hold the same.
    """
    distribution = keras.distribution.distribution()
    if keras.config.backend() != "jax" or distribution is None:
        return
    processes = distribution.num_processes
    if processes == 1 or not distribution.auto_shard_dataset:
        return
    shares = process_shares(
        distribution.device_mesh, distribution.batch_dim_name
    )
    count = min(distribution.num_model_replicas, processes)
    for process, share in shares.items():
        theirs = (process * count // processes, count)
        if share != theirs:
            raise ValueError(
                f"Keras would give process {process} share {theirs[0]} of "
                f"{theirs[1]} of the data, and on this mesh it holds share "
                f"{share[0]} of {share[1]}. Pass auto_shard_dataset=False to "
                "keras.distribution.ModelParallel and give each process the "
                "share that keras_vit22b.distribution.data_share(mesh) names."
            )
