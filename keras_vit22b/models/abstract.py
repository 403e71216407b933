"""Build a model of any size without allocating its weights.

This file and worker_model.py are the ones that use private names of Keras.
Variables made inside `keras.StatelessScope(initialize_variables=False)` have
no value. Keras keeps them on a global list and initializes the list at the
next opportunity: inside the `fit` or `predict` of some other model. So they
are taken off that list, and each gets its value from `set_value` or
`initialize_missing`.
"""

import contextlib

import keras
from keras.src.backend.common import global_state

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
        value = keras.ops.convert_to_tensor(stored.read(), dtype=variable.dtype)
    else:
        from keras_vit22b.weights.jax_arrays import sharded_array

        value = sharded_array(variable.shape, sharding, stored.read_slice)
    if not is_abstract(variable):
        variable.assign(value)
        return
    variable._initialize(value)
    variable._initializer = None


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
