"""Compile the whole 22B's training step for v4:8x8x16.

    python tools/compile_22b.py --output docs

writes compile_22b.json (every transfer), compile_22b.txt (their summary) and
compile_22b.png (one block's schedule). 48 blocks, pooling and the paper's head
of 29,593 classes, AdamW, batch 128 x model 8, 32 images a chip.
"""

import argparse
import pathlib
import resource
import sys

from keras_vit22b.planning.chips import set_environment

set_environment()

from keras_vit22b.distribution import compile_for  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="results")
    parser.add_argument("--num-layers", type=int, help="fewer, for a try")
    arguments = parser.parse_args()
    report = compile_for(
        "v4:8x8x16",
        "vit22b_patch14_224",
        batch=128,
        model=8,
        images_per_chip=32,
        num_layers=arguments.num_layers,
        num_classes=29593,
    )
    folder = pathlib.Path(arguments.output)
    folder.mkdir(parents=True, exist_ok=True)
    host = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text = (
        f"$ python {' '.join(sys.argv)}\n{report}\n"
        f"host memory {host / 2**30:.1f} GiB, "
        + ", ".join(f"{k} {v}" for k, v in report.versions.items())
        + "\n"
    )
    (folder / "compile_22b.txt").write_text(text)
    (folder / "compile_22b.json").write_text(report.to_json())
    if report.schedule is not None:
        report.plot(folder / "compile_22b.png")
    print(text, end="")


if __name__ == "__main__":
    main()
