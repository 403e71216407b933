"""Which weights decay, and how fast, by name.

The scaling-ViT lineage decays the head a hundred times faster than the body,
and vectors, positions and the pooling's probe not at all.

Source: Zhai et al., 2022, section 3.2, https://arxiv.org/abs/2106.04560
"""

import dataclasses
import re

from keras import ops

# The last part of a path says what a weight is.
_MATRICES = r"kernel|lora_kernel_[ab]"
_NOT_DECAYED = (
    r"(\w+_)?bias|scale|gamma|beta|(layer|attention|mlp)_scale"
    r"|position_embedding|class_(token|position)|registers|probe"
)
ROWS = {
    "head": rf"(.*/)?head/({_MATRICES})",
    "body": rf"(?!(.*/)?head/)(.*/)?({_MATRICES})",
    "none": rf"(.*/)?({_NOT_DECAYED})",
}


@dataclasses.dataclass(frozen=True)
class WeightDecay:
    """Decay of weights by name: `w -= learning_rate * decay * w` each step.

    Kernels decay; norms, biases, positions, tokens and probe do not.

    Attributes:
        head: float. Of the classifier's kernel. Defaults to `3.0`, as ViT-22B.
        body: float. Of all other kernels. Defaults to `0.03`.
        others: tuple of `(pattern, decay)`, for weights of other names. A
            pattern is a regular expression of a whole path, such as
            `".*/gate"`; it comes before the names known here.
    """

    head: float = 3.0
    body: float = 0.03
    others: tuple = ()

    def __post_init__(self):
        others = self.others
        if isinstance(others, (list, tuple)):
            others = tuple(
                tuple(row) if isinstance(row, list) else row for row in others
            )
            object.__setattr__(self, "others", others)
        for row in others:
            if not isinstance(row, tuple) or len(row) != 2:
                raise ValueError(
                    f"others must be pairs (pattern, decay). Received: {row!r}."
                )
            try:
                re.compile(row[0])
            except (re.error, TypeError) as error:
                raise ValueError(
                    f"{row[0]!r} is no regular expression: {error}."
                ) from None
        decays = {"head": self.head, "body": self.body, **dict(others)}
        for name, decay in decays.items():
            number = isinstance(decay, (int, float))
            if not number or isinstance(decay, bool) or not 0 <= decay < 1e9:
                raise ValueError(
                    f"The decay of {name} must be a number of at least 0. "
                    f"Received: {decay!r}."
                )

    def of(self, paths):
        """Return the decay of each weight.

        Args:
            paths: list of strings, such as `variable.path`.

        Returns:
            A list of floats.

        Raises:
            ValueError: naming the weights that no name fits, or the pattern
                of `others` that fits no weight.
        """
        for pattern, _ in self.others:
            if not any(re.fullmatch(pattern, path) for path in paths):
                raise ValueError(
                    f"No weight's path is {pattern!r}, which WeightDecay("
                    f"others=) names. Paths are like {paths[0]!r}."
                )
        found = {path: self._of(path) for path in paths}
        unknown = [path for path, decay in found.items() if decay is None]
        if unknown:
            raise ValueError(
                f"No rule says whether {', '.join(unknown[:5])} "
                f"{'decays' if len(unknown) == 1 else 'decay'}. Add one to "
                f"WeightDecay(others=), such as "
                f"({re.escape(unknown[0])!r}, 0.0)."
            )
        return list(found.values())

    def _of(self, path):
        for pattern, decay in self.others:
            if re.fullmatch(pattern, path):
                return decay
        values = {"head": self.head, "body": self.body, "none": 0.0}
        for row, pattern in ROWS.items():
            if re.fullmatch(pattern, path):
                return values[row]
        return None


class DecaysByName:
    """An optimizer whose `weight_decay` is a `WeightDecay`.

    Place it before the optimizer among the base classes, and call
    `_decay_weight` in `update_step`.
    """

    def __init__(self, *args, weight_decay=None, **kwargs):
        super().__init__(*args, **kwargs)
        if isinstance(weight_decay, dict):  # Of `get_config`.
            weight_decay = WeightDecay(**weight_decay)
        if weight_decay is None:
            weight_decay = WeightDecay()
        if not isinstance(weight_decay, WeightDecay):
            raise ValueError(
                "weight_decay must be a WeightDecay, such as WeightDecay("
                f"head=0.1, body=0.1). Received: {weight_decay!r}."
            )
        # Keras knows `weight_decay` as one number for all.
        self.decay_by_name = weight_decay

    def exclude_from_weight_decay(self, *args, **kwargs):
        raise ValueError(
            "What decays is up to WeightDecay(others=), such as "
            '((".*/gate", 0.0),).'
        )

    def build(self, variables):
        self._decays = self.decay_by_name.of([v.path for v in variables])
        super().build(variables)

    def _decay_weight(self, variable, learning_rate):
        decay = self._decays[self._get_variable_index(variable)]
        if decay:
            factor = ops.cast(decay * learning_rate, variable.dtype)
            self.assign_sub(variable, factor * variable)

    def get_config(self):
        config = super().get_config()
        config["weight_decay"] = dataclasses.asdict(self.decay_by_name)
        return config
