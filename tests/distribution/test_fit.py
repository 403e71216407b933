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


class Losses(keras.callbacks.Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, batch, logs):
        self.values.append(float(logs["loss"]))


def make(case):
    keras.utils.set_random_seed(0)
    backbone = ViT22BBackbone(
        (8, 8, 3), 4, num_layers=2, num_heads=8, hidden_dim=16, mlp_dim=32,
        **case.get("backbone", {}),
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
    optimizer = keras.optimizers.get({
        "class_name": case.get("optimizer", "adamw"),
        "config": {"learning_rate": 0.01, **case.get("config", {})},
    })
    model.compile(optimizer, **case.get("compile", {}))
    return model


def losses_of_fit(case):
    model, losses = make(case), Losses()
    model.fit(
        images, labels, batch_size=16, shuffle=False, verbose=0,
        callbacks=[losses],
    )
    return losses.values


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


def run(case):
    return globals()[case.get("run", "losses_of_fit")](case)


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
    same = {k: v for k, v in case.items() if k not in ("overlap", "fsdp")}
    if case.get("run") == "transfers":
        return None
    key = json.dumps(same, sort_keys=True)
    if key not in known:
        known[key] = run(same)
    return known[key]


known = {}
results = [[on_mesh(c), on_one_device(c)] for c in json.loads(sys.argv[1])]
print(json.dumps(results))
"""

MESHES = [(1, 8), (2, 4), (4, 2), (8, 1)]


@pytest.fixture
def run(run_on_eight_devices):
    def run(*cases):
        return run_on_eight_devices(SCRIPT, json.dumps(cases))

    return run


def assert_equal(results, tolerance=1e-5):
    for on_mesh, on_one_device in results:
        assert on_mesh
        assert on_mesh == pytest.approx(on_one_device, abs=tolerance)


@pytest.mark.parametrize("batch, model", MESHES)
def test_losses_are_those_of_one_device(run, batch, model):
    mesh = {"batch": batch, "model": model, "overlap": "ring"}
    results = run(
        *(
            {**mesh, "optimizer": optimizer, "fsdp": fsdp}
            for optimizer in ("sgd", "adamw")
            for fsdp in (False, True)
        )
    )
    assert_equal(results)
    assert results[0][0] != results[2][0]


def test_losses_do_not_depend_on_how_matmuls_run(run):
    mesh = {"batch": 2, "model": 4, "fsdp": True}
    assert_equal(
        run(*({**mesh, "overlap": o} for o in ("ring", "xla", "off", "auto")))
    )


@pytest.mark.parametrize(
    "options",
    [
        {"backbone": {"remat": True}},
        {"backbone": {"pooling": "cls"}},  # An odd number of tokens.
        {"backbone": {"block": "sequential", "use_qkv_bias": True}},
        {"backbone": {"num_registers": 2, "layer_scale": 0.1}},
        {"compile": {"steps_per_execution": 3}},
        {"config": {"gradient_accumulation_steps": 2}},
        {"lora": True},
    ],
    ids=str,
)
def test_every_way_to_train_gives_the_same_losses(run, options):
    assert_equal(run({"batch": 2, "model": 4, "fsdp": True, **options}))


def test_half_precision_differs_by_its_rounding_alone(run):
    mesh = {"batch": 2, "model": 4, "fsdp": True, "overlap": "ring"}
    half = {"backbone": {"dtype": "mixed_bfloat16"}}
    assert_equal(run({**mesh, **half}), tolerance=0.05)


def test_outputs_are_those_of_one_device(run):
    mesh = {"batch": 2, "model": 4, "run": "outputs"}
    results = run(
        *({**mesh, "overlap": o} for o in ("auto", "xla", "off")),
        {**mesh, "batch": 4, "model": 2},  # Eight heads, eight images.
        {**mesh, "quantize": "int8"},
    )
    assert_equal(results)


def test_the_step_of_fit_sends_chunks_and_gathers_no_activations(run):
    """Two blocks and the pooling, forward and backward.

    Into the heads two halves of a chunk travel forward, and backward a chunk
    and two halves of a sum; out of them two halves and then gradients.
    """
    mesh = {"batch": 1, "model": 8, "run": "transfers"}
    (ring, _), (off, _) = run(
        {**mesh, "overlap": "ring"}, {**mesh, "overlap": "off"}
    )
    matmuls = 2 * 2 + 4
    assert len(ring["collective-permute"]) == matmuls // 2 * (2 + 3 + 2 + 1)
    assert not any(is_tokens(s) for s in ring["all-gather"])
    assert any(is_tokens(s) for s in off["all-gather"])


def is_tokens(shape):
    """Whether a gathered array holds every image's four tokens."""
    return shape.startswith("16,4,")
