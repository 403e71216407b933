"""Build a model of any size without allocating its weights.

This file and worker_model.py are the ones that use private names of Keras.
Variables made inside `keras.StatelessScope(initialize_variables=False)` have
no value. Keras keeps them on a global list and initializes the list at the
next opportunity: inside the `fit` or `predict` of some other model. So they
are taken off that list, and each gets its value from `set_value` or
`initialize_missing`.
"""

import contextlib
import os

import keras
from keras.src.backend.common import global_state

from keras_vit22b.weights.shards import num_bytes

_PENDING = "uninitialized_variables"


@contextlib.contextmanager
def abstract_build():
    """Within this context, variables are created without values.

    Only variables made from initializers are allowed, so optimizers and
    metrics must be created outside.
    """
    before = list(global_state.get_global_attribute(_PENDING) or [])
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        global_state.set_global_attribute(_PENDING, before)


def is_abstract(variable):
    """Return whether a variable has no value yet."""
    return variable._value is None


def set_value(variable, stored):
    """Give a variable its value, whether it has one already or not.

    Under a `keras.distribution` layout each device reads its own slice, and
    the whole is never in memory.

    Args:
        variable: a `keras.Variable`.
        stored: has `read()` and `read_slice(index)`, which give arrays of the
            variable's dtype.
    """
    sharding = _sharding(variable)
    if sharding is None:
        # In one expression, so that a copy frees what it is made from.
        value = _as_tensor(stored.read())
    else:
        from keras_vit22b.weights.jax_arrays import sharded_array

        value = sharded_array(variable.shape, sharding, stored.read_slice)
    if not is_abstract(variable):
        variable.assign(value)
        return
    variable._initialize(value)
    variable._initializer = None


def quantize_abstract(model, is_int8):
    """Make chosen dense layers int8, as `quantize("int8")` does, unvalued.

    Args:
        model: a built model, within `abstract_build`.
        is_int8: function from a kernel, a `keras.Variable`, to whether it is
            int8.
    """
    for layer in model._flatten_layers():
        kernel = getattr(layer, "_kernel", None)
        if kernel is None or not is_int8(kernel):
            continue
        policy = keras.dtype_policies.get(
            f"int8_from_{layer.dtype_policy.name}"
        )
        layer._tracker.unlock()
        del layer._kernel
        layer.quantized_build(kernel.shape, "int8")
        layer._tracker.lock()
        layer.dtype_policy = policy


def _as_tensor(array):
    if keras.config.backend() != "tensorflow":
        return keras.ops.convert_to_tensor(array, dtype=array.dtype.name)
    from keras_vit22b.weights.tensorflow_tensors import as_tensor

    return as_tensor(array)


def _sharding(variable):
    """Return the JAX sharding that a variable has or will have, or `None`."""
    if keras.config.backend() != "jax":
        return None
    if keras.distribution.distribution() is None:
        return None
    variable._initialize_layout()
    return getattr(variable._layout, "backend_layout", variable._layout)


def initialize_missing(model):
    """Initialize the variables of a model that have no value yet."""
    for variable in model.variables:
        if is_abstract(variable):
            variable._deferred_initialize()


def check_memory(model):
    """Raise if the values of a model would exceed this machine's memory.

    Under a `keras.distribution` they may be spread over others: there, and
    where the system does not tell its memory, nothing is checked.
    """
    if keras.distribution.distribution() is not None:
        return
    memory, needed = _memory(), sum(map(num_bytes, model.variables))
    if memory is not None and needed > memory:
        raise ValueError(
            f"{model.name} needs {needed / 1e9:,.1f} GB for its weights, but "
            f"this machine has {memory / 1e9:,.1f} GB. What works: abstract="
            "True, to build it without; dtype='bfloat16', for half of float32; "
            "a layout of keras.distribution."
        )


def _memory():
    """Return the bytes of this machine's memory, or `None`."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def train_state_structs(model, batch):
    """Describe what `fit` passes between steps, without allocating any.

    Every variable of the model, its optimizer and its metrics gets a
    description as its value, so the model can be traced and nothing else.

    Args:
        model: an abstract, compiled model. The distribution in force, if any,
            says how variables are laid out; the optimizer and the metrics must
            have been created without one.
        batch: tuple of `jax.ShapeDtypeStruct`, as `fit` gets data.

    Returns:
        The four lists that `train_step` takes, of `jax.ShapeDtypeStruct`.
    """
    import jax

    distribution = keras.distribution.distribution()
    if distribution is not None:
        # Slots of the optimizer copy a variable's layout.
        for variable in model.variables:
            variable._initialize_layout()
    with abstract_build():
        model.optimizer.build(model.trainable_variables)
    for part in model._flatten_layers():
        # The check that weights are there would stop the trace.
        if "_is_abstract" in part.__dict__:
            part.__dict__["_is_abstract"] = False
    keras.distribution.set_distribution(None)
    model._symbolic_build(data_batch=batch)
    keras.distribution.set_distribution(distribution)
    variables = (
        *model.variables,
        *model.optimizer.variables,
        *model.metrics_variables,
    )
    for variable in variables:
        variable._value = jax.ShapeDtypeStruct(
            variable.shape, variable.dtype, sharding=_sharding(variable)
        )
    return model._get_jax_state(
        trainable_variables=True,
        non_trainable_variables=True,
        optimizer_variables=True,
        metrics_variables=True,
    )
