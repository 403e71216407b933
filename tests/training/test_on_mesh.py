"""Recipes and the monitor give on a mesh what they give on one device."""

import keras
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="Layouts are of the JAX backend."
)

SCRIPT = """
import json
import jax
import keras
import numpy as np

from keras_vit22b import ViT22BBackbone
from keras_vit22b import ViT22BImageClassifier
from keras_vit22b import distribution
from keras_vit22b.training import RECIPES
from keras_vit22b.training import AttentionMonitor
from keras_vit22b.training import TrainingLog

jax.config.update("jax_default_matmul_precision", "highest")
generator = np.random.default_rng(0)
images = generator.normal(size=(48, 8, 8, 3)).astype("float32")
labels = np.arange(48) % 5
recipe = RECIPES["vit22b"].replace(
    warmup_steps=1, cooldown_steps=0, head_bias=-2.0, learning_rate=0.01
)


def train():
    keras.utils.set_random_seed(0)
    # Wide enough that kernels are factored.
    backbone = ViT22BBackbone(
        (8, 8, 3), 4, num_layers=2, num_heads=8, hidden_dim=32, mlp_dim=64,
        pooling="mean",
    )
    model = ViT22BImageClassifier(backbone, 5, compile=False)
    drawn = np.random.default_rng(2)
    for weight in model.weights:
        weight.assign(drawn.normal(0.1, 0.3, weight.shape))
    recipe.compile(model)
    log = TrainingLog(every=1)
    monitor = AttentionMonitor(images[:8], every=1, max_logit=1e9)
    model.fit(
        images, labels, batch_size=16, shuffle=False, verbose=0,
        callbacks=[log, monitor],
    )
    records = [
        {name: np.asarray(value).tolist() for name, value in record.items()}
        for record in monitor.records
    ]
    table = None
    if keras.distribution.distribution() is not None:
        rows = distribution.coverage(model).rows
        table = {
            row.path.rpartition("/")[2]: [row.dtype, row.axes]
            for row in rows if "block_0_in_projection_kernel" in row.path
        }
    return [r["loss"] for r in log.records], records, table


results = [train()]
for batch, model in ((2, 4), (8, 1)):
    mesh = distribution.device_mesh(batch=batch, model=model)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(
            layout_map=ViT22BImageClassifier.get_layout_map(mesh, fsdp=True),
            batch_dim_name="batch",
        )
    )
    results.append(train())
print(json.dumps(results))
"""


def test_losses_and_records_are_those_of_one_device(run_on_eight_devices):
    one, *meshes = run_on_eight_devices(SCRIPT)
    losses, records, _ = one
    assert len(losses) == 3 and len(records) == 4
    assert len(set(losses)) == 3
    for found, theirs, table in meshes:
        assert found == pytest.approx(losses, rel=1e-4)
        for record, wanted in zip(theirs, records, strict=True):
            for name, value in wanted.items():
                np.testing.assert_allclose(
                    record[name], value, rtol=1e-3, err_msg=name
                )
        momentum = table["block_0_in_projection_kernel_momentum"]
        assert momentum[0] == "bfloat16"
        assert momentum[1][0] == "batch"
        assert "block_0_in_projection_kernel_row_square" in table
