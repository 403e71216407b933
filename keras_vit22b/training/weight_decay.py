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

    def of(self, paths):
        """Return the decay of each weight.

        Args:
            paths: list of strings, such as `variable.path`.

        Returns:
            A list of floats.

        Raises:
            ValueError: naming the weights that no name fits.
        """
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
            others = tuple(map(tuple, weight_decay["others"]))
            weight_decay = WeightDecay(**{**weight_decay, "others": others})
        # Keras knows `weight_decay` as one number for all.
        self.decay_by_name = weight_decay or WeightDecay()

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
