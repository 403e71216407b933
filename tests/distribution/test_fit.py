"""`fit` on a mesh gives the numbers of one device, however matmuls run."""

import json

import keras
import pytest

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="Layouts are of the JAX backend."
)

# Runs each case on its mesh and on one device, and prints both results.
SCRIPT = """
import json, re, sys
import jax
import keras
import numpy as np

from keras_vit22b import ViT22BBackbone
from keras_vit22b import ViT22BImageClassifier
from keras_vit22b.distribution import device_mesh

jax.config.update("jax_default_matmul_precision", "highest")
generator = np.random.default_rng(0)
images = generator.normal(size=(48, 8, 8, 3)).astype("float32")
labels = np.arange(48) % 5


class Steps(keras.callbacks.Callback):
    # Losses and gradients by step; Keras would give the mean loss so far.
    def __init__(self):
        self.losses, self.gradients = [], []

    def on_train_batch_begin(self, batch, logs):
        self.model.reset_metrics()

    def on_train_batch_end(self, batch, logs):
        self.losses.append(float(logs["loss"]))
        self.gradients.append({
            path: np.asarray(slot.value)
            for path, slot in self.model.optimizer.gradients.items()
        })


def recording(kind):
    # An optimizer of a kind that keeps the gradients it was last given.
    class Recording(kind):
        def build(self, variables):
            super().build(variables)
            slots = self.add_optimizer_variables(variables, "gradient")
            self.gradients = {v.path: s for v, s in zip(variables, slots)}

        def update_step(self, gradient, variable, learning_rate):
            self.assign(self.gradients[variable.path], gradient)
            super().update_step(gradient, variable, learning_rate)

    return Recording


def make(case):
    keras.utils.set_random_seed(0)
    backbone = ViT22BBackbone(
        (8, 8, 3), 4, hidden_dim=16, mlp_dim=32,
        **{"num_layers": 2, "num_heads": 8, **case.get("backbone", {})},
    )
    model = ViT22BImageClassifier(backbone, 5)
    drawn = np.random.default_rng(2)
    for weight in model.weights:
        weight.assign(drawn.normal(0.1, 0.3, weight.shape))
    if case.get("lora"):
        backbone.trainable = False
        for layer in backbone.blocks:
            for projection in (layer.in_projection, layer.out_projection):
                projection.trainable = True
                projection.enable_lora(2)
                projection.lora_kernel_b.assign(
                    drawn.normal(0.1, 0.3, projection.lora_kernel_b.shape)
                )
    if case.get("quantize"):
        backbone.quantize(case["quantize"])
    name = case.get("optimizer", "AdamW")
    config = dict(case.get("config", {}))
    if name == "AdamW":
        # By default it makes whole steps of gradients that are mere rounding,
        # and then the next gradients differ.
        config["epsilon"] = 1e-4
    optimizer = recording(getattr(keras.optimizers, name))(0.01, **config)
    model.compile(optimizer, **case.get("compile", {}))
    return model


def fit(case):
    model, steps = make(case), Steps()
    model.fit(
        images, labels, batch_size=16, shuffle=False, verbose=0,
        callbacks=[steps],
    )
    return steps


def outputs(case):
    # Eager, predicted, evaluated; and for a batch that no ring divides.
    model = make(case)
    one = np.asarray(model(images[:16]))
    few = np.asarray(model(images[:8])) if case["batch"] < 8 else one[:8]
    return [
        float(np.abs(one).mean()),
        float(np.abs(few - one[:8]).max()),
        float(np.abs(model.predict(images, batch_size=16, verbose=0)).mean()),
        float(model.evaluate(images, labels, batch_size=16, verbose=0)[0]),
    ]


def transfers(case):
    # What the compiled step of `fit` exchanges.
    model = make(case)
    model.optimizer.build(model.trainable_variables)
    layout = keras.distribution.distribution().get_data_layout
    data = [
        jax.device_put(a, layout(a.shape).backend_layout)
        for a in (images[:16], labels[:16])
    ]
    state = [
        [v.value for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    ]
    text = jax.jit(model.train_step).lower(state, data).compile().as_text()
    return {
        op: re.findall(f"= [a-z0-9]+\\\\[([0-9,]*)\\\\][^ ]* {op}\\\\(", text)
        for op in ("collective-permute", "all-gather", "all-to-all")
    }


def compare(ours, wanted):
    # Losses of both; and the worst difference of a gradient, over its largest
    # number, or over a hundredth of any gradient's where that is more.
    errors = {}
    for ours_of_step, wanted_of_step in zip(ours.gradients, wanted.gradients):
        scale = max(np.abs(g).max() for g in wanted_of_step.values())
        assert ours_of_step.keys() == wanted_of_step.keys()
        if scale == 0:  # Before gradients that accumulate are first applied.
            assert not any(map(np.any, ours_of_step.values()))
            continue
        for path, gradient in wanted_of_step.items():
            difference = np.abs(ours_of_step[path] - gradient).max()
            size = max(np.abs(gradient).max(), scale / 100)
            errors[path] = max(errors.get(path, 0), float(difference / size))
    worst = max(errors, key=errors.get)
    return [ours.losses, wanted.losses, errors[worst], worst]


def run(case):
    return globals()[case.get("run", "fit")](case)


def on_mesh(case):
    mesh = device_mesh(
        batch=case["batch"],
        model=case["model"],
        overlap=case.get("overlap", "auto"),
    )
    layout_map = ViT22BImageClassifier.get_layout_map(
        mesh, fsdp=case.get("fsdp", False)
    )
    distribution = keras.distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch"
    )
    with distribution.scope():
        return run(case)


def on_one_device(case):
    if case.get("run") == "transfers":
        return None
    same = {k: v for k, v in case.items() if k not in ("overlap", "fsdp")}
    key = json.dumps(same, sort_keys=True)
    if key not in known:
        known[key] = run(same)
    return known[key]


known = {}
results = []
for case in json.loads(sys.argv[1]):
    found, wanted = on_mesh(case), on_one_device(case)
    results.append(
        compare(found, wanted) if "run" not in case else [found, wanted]
    )
print(json.dumps(results))
"""

MESHES = [(1, 8), (2, 4), (4, 2), (8, 1)]
# Compiles sooner: no second block, and no rings in the pooling.
ONE_BLOCK = {"num_layers": 1, "pooling": "mean"}


@pytest.fixture
def run(run_on_eight_devices):
    def run(*cases):
        return run_on_eight_devices(SCRIPT, json.dumps(cases))

    return run


def assert_equal(results, tolerance=1e-5):
    for on_mesh, on_one_device in results:
        assert on_mesh
        assert on_mesh == pytest.approx(on_one_device, abs=tolerance)


@pytest.fixture
def assert_fit_equals(run):
    """Train on a mesh and on one device; compare losses and gradients."""

    def assert_fit_equals(*cases, tolerance=1e-5):
        results = run(*cases)
        for case, (losses, wanted, error, worst) in zip(cases, results):
            assert len(losses) == len(wanted) > 0
            assert losses == pytest.approx(wanted, abs=tolerance), case
            assert error < tolerance, (case, worst)
        return [losses for losses, *_ in results]

    return assert_fit_equals


@pytest.mark.parametrize("batch, model", MESHES)
def test_losses_and_gradients_are_those_of_one_device(
    assert_fit_equals, batch, model
):
    """Of three steps.

    Not weights: the gradient of the key's bias in the pooling is zero, and
    optimizers that normalize it make steps of its rounding.
    """
    mesh = {"batch": batch, "model": model, "overlap": "ring"}
    losses = assert_fit_equals(
        *(
            {**mesh, **case, "fsdp": fsdp}
            for case in (
                {"optimizer": "SGD"},
                {"optimizer": "AdamW", "backbone": ONE_BLOCK},
                {"optimizer": "Adafactor", "backbone": ONE_BLOCK},
            )
            for fsdp in (False, True)
        )
    )
    assert {len(values) for values in losses} == {3}
    # Each optimizer went its own way.
    assert losses[2][:1] == pytest.approx(losses[4][:1])
    assert losses[2][1:] != pytest.approx(losses[4][1:])


def test_training_does_not_depend_on_how_matmuls_run(assert_fit_equals):
    mesh = {"batch": 2, "model": 4, "fsdp": True, "backbone": ONE_BLOCK}
    # "ring" is in the test above.
    assert_fit_equals(*({**mesh, "overlap": o} for o in ("xla", "off", "auto")))


@pytest.mark.parametrize(
    "ways",
    [
        [
            {"backbone": {"remat": True}},
            # Odd numbers of tokens, and one head a device.
            {"backbone": {**ONE_BLOCK, "pooling": "cls", "num_heads": 4}},
            {"backbone": {**ONE_BLOCK, "num_registers": 3, "layer_scale": 0.1}},
        ],
        [
            {
                "backbone": {
                    **ONE_BLOCK,
                    "block": "sequential",
                    "use_qkv_bias": True,
                }
            },
            {"backbone": ONE_BLOCK, "compile": {"steps_per_execution": 3}},
            {
                "backbone": ONE_BLOCK,
                "config": {"gradient_accumulation_steps": 2},
            },
            {"lora": True, "backbone": ONE_BLOCK},
        ],
    ],
    ids=["models", "training"],
)
def test_every_way_to_train_gives_the_same(assert_fit_equals, ways):
    mesh = {"batch": 2, "model": 4, "fsdp": True, "overlap": "ring"}
    assert_fit_equals(*({**mesh, **way} for way in ways))


def test_half_precision_differs_by_its_rounding_alone(assert_fit_equals):
    mesh = {"batch": 2, "model": 4, "fsdp": True, "overlap": "ring"}
    half = {**ONE_BLOCK, "dtype": "mixed_bfloat16", "remat": True}
    assert_fit_equals({**mesh, "backbone": half}, tolerance=0.05)


def test_outputs_are_those_of_one_device(run):
    mesh = {"batch": 2, "model": 4, "run": "outputs"}
    results = run(
        mesh,
        # Eight heads, eight images.
        {**mesh, "batch": 4, "model": 2, "backbone": ONE_BLOCK},
        {**mesh, "quantize": "int8", "backbone": ONE_BLOCK},
    )
    assert_equal(results)


def test_the_step_of_fit_sends_chunks_and_gathers_no_activations(run):
    """Two blocks and the pooling, forward and backward.

    Into the heads two halves of a chunk travel forward, and backward a chunk
    and two halves of a sum; out of them two halves and then gradients.
    """
    mesh = {"batch": 1, "model": 8, "run": "transfers"}
    over_both = {"batch": 2, "model": 4, "fsdp": True, "run": "transfers"}
    (ring, _), (off, _), (xla, _) = run(
        {**mesh, "overlap": "ring"},
        {**mesh, "overlap": "off"},
        {**over_both, "overlap": "xla"},
    )
    matmuls = 2 * 2 + 4
    assert len(ring["collective-permute"]) == matmuls // 2 * (2 + 3 + 2 + 1)
    assert not any(is_tokens(s) for s in ring["all-gather"])
    assert any(is_tokens(s) for s in off["all-gather"])
    # Over "batch" the compiler gathers kernels, not tokens.
    assert not any(is_tokens(s) for s in xla["all-gather"])


def is_tokens(shape):
    """Whether a gathered array holds every image's four tokens."""
    return shape.startswith("16,4,")
