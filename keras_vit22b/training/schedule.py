"""The reciprocal square-root schedule.

Source: Zhai et al., 2022, section 3.6, https://arxiv.org/abs/2106.04560
"""

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="keras_vit22b")
class ReciprocalSquareRoot(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up, decay by `1 / sqrt(step)`, linear cooldown.

    After the warm-up

        lr(step) = learning_rate / sqrt(1 + (step - warmup_steps) / timescale)

    and before it `learning_rate`; times `min(1, step / warmup_steps)` and
    `min(1, (total_steps - step) / cooldown_steps)`. Without a cooldown the
    schedule has no end, and one can be started from any checkpoint: see
    `cool_down`.

    Args:
        learning_rate: float. The peak.
        warmup_steps: int. Defaults to `10_000`.
        timescale: int. Steps after the warm-up in which the rate falls by
            `sqrt(2)`. Defaults to `10_000`.
        total_steps: int. Needed with a cooldown. Defaults to `None`.
        cooldown_steps: int. Defaults to `0`.

    Raises:
        ValueError: if a number is out of range, or warm-up and cooldown do not
            fit into `total_steps`.

    Example:
    ```python
    schedule = keras_vit22b.training.ReciprocalSquareRoot(
        1e-3, total_steps=177_000, cooldown_steps=30_000
    )
    optimizer = keras.optimizers.AdamW(schedule)
    ```
    """

    def __init__(
        self,
        learning_rate,
        *,
        warmup_steps=10_000,
        timescale=10_000,
        total_steps=None,
        cooldown_steps=0,
    ):
        super().__init__()
        for name, value, least in (
            ("learning_rate", learning_rate, 0),
            ("warmup_steps", warmup_steps, 0),
            ("timescale", timescale, 1),
            ("cooldown_steps", cooldown_steps, 0),
        ):
            if not value >= least:
                raise ValueError(
                    f"{name} must be at least {least}. Received: {value!r}."
                )
        if cooldown_steps and total_steps is None:
            raise ValueError(
                f"A cooldown of {cooldown_steps} steps needs total_steps, the "
                "step at which it ends."
            )
        if total_steps is not None and total_steps < (
            warmup_steps + cooldown_steps
        ):
            raise ValueError(
                f"{warmup_steps} steps of warm-up and {cooldown_steps} of "
                f"cooldown do not fit into {total_steps} steps."
            )
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.timescale = timescale
        self.total_steps = total_steps
        self.cooldown_steps = cooldown_steps

    def __call__(self, step):
        step = ops.cast(step, "float32")
        after = ops.maximum(step - self.warmup_steps, 0.0)
        rate = self.learning_rate * ops.rsqrt(1.0 + after / self.timescale)
        if self.warmup_steps:
            rate = rate * ops.minimum(1.0, step / self.warmup_steps)
        if self.cooldown_steps:
            left = ops.maximum(self.total_steps - step, 0.0)
            rate = rate * ops.minimum(1.0, left / self.cooldown_steps)
        return rate

    def cool_down(self, start, steps):
        """Return the same schedule with a cooldown from step `start`.

        Args:
            start: int. Such as the step of a checkpoint.
            steps: int. After which the rate is zero.
        """
        return type(self)(
            **{
                **self.get_config(),
                "total_steps": start + steps,
                "cooldown_steps": steps,
            }
        )

    def get_config(self):
        return {
            "learning_rate": self.learning_rate,
            "warmup_steps": self.warmup_steps,
            "timescale": self.timescale,
            "total_steps": self.total_steps,
            "cooldown_steps": self.cooldown_steps,
        }


@keras.saving.register_keras_serializable(package="keras_vit22b")
class OfBatches(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule of steps, for an optimizer that accumulates gradients.

    Keras gives schedules the number of batches, not of steps.

    Args:
        schedule: a schedule of steps.
        batches: int. That make a step.
    """

    def __init__(self, schedule, batches):
        super().__init__()
        self.schedule, self.batches = schedule, batches

    def __call__(self, step):
        return self.schedule(ops.cast(step, "int32") // self.batches)

    def get_config(self):
        schedule = keras.saving.serialize_keras_object(self.schedule)
        return {"schedule": schedule, "batches": self.batches}

    @classmethod
    def from_config(cls, config):
        schedule = keras.saving.deserialize_keras_object(config["schedule"])
        return cls(schedule, config["batches"])
