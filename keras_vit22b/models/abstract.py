"""Build a model of any size without allocating its weights.

This is the one file that uses private names of Keras. Variables made inside
`keras.StatelessScope(initialize_variables=False)` have no value. Keras keeps
them on a global list and initializes the list at the next opportunity: inside
the `fit` or `predict` of some other model. So they are taken off that list,
and each gets its value from `set_value` or `initialize_missing`.
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


def set_value(variable, value):
    """Give a variable its value, whether it has one already or not.

    Args:
        variable: a `keras.Variable`.
        value: array of the variable's shape and dtype.
    """
    if not is_abstract(variable):
        variable.assign(value)
        return
    variable._initialize(
        keras.ops.convert_to_tensor(value, dtype=variable.dtype)
    )
    variable._initializer = None


def initialize_missing(model):
    """Initialize the variables of a model that have no value yet."""
    for variable in model.variables:
        if is_abstract(variable):
            variable._deferred_initialize()
