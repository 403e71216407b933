"""Compile a few of the 22B's blocks for slices of every kind.

    python tools/compile_slices.py --output docs

writes compile_slices.txt (what the compiler made of each step's transfers) and
compile_slices.json (also the planner's memory beside the compiler's). Each
slice takes two to four minutes on two cores.
"""

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys

from keras_vit22b.planning.chips import set_environment

set_environment()

PRESET = "vit22b_patch14_224"
# (topology, batch, model, images a chip), all with FSDP. The first four meshes
# are those that the planner recommends.
SLICES = (
    ("v4:8x8x16", 128, 8, 32),
    ("v5e:16x16", 16, 16, 32),
    ("v5p:4x4x8", 16, 8, 32),
    ("v5e:4x8", 4, 8, 16),
    ("v4:8x8x16", 256, 4, 32),
)


def compile_slice(topology, batch, model, images_per_chip, num_layers):
    """Return a dict of what the compiler and the planner say."""
    from keras_vit22b.distribution import compile_for
    from keras_vit22b.distribution import plan
    from keras_vit22b.planning.chips import Slice

    report = compile_for(
        topology,
        PRESET,
        batch=batch,
        model=model,
        images_per_chip=images_per_chip,
        num_layers=num_layers,
    )
    tpu_slice = Slice.from_name(topology)
    planned = plan(
        PRESET,
        kind=tpu_slice.chip.kind,
        chips=tpu_slice.num_chips,
        shape=tpu_slice.shape,
        images=tpu_slice.num_chips * images_per_chip,
        num_layers=num_layers,
    )
    (mesh,) = (
        m
        for m in planned.meshes
        if (m.batch, m.model, m.fsdp) == (batch, model, True)
    )
    return {
        "topology": topology,
        "batch": batch,
        "model": model,
        "images_per_chip": images_per_chip,
        "num_layers": num_layers,
        "memory": dataclasses.asdict(report.memory),
        "planned_memory": mesh.memory,
        "summary": report.schedule.summary() if report.schedule else None,
        "times": report.times() if report.schedule else None,
        "seconds": report.seconds,
        "versions": report.versions,
        "text": str(report),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="results")
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only is not None:
        case = SLICES[arguments.only]
        print(json.dumps(compile_slice(*case, arguments.num_layers)))
        return
    folder = pathlib.Path(arguments.output)
    folder.mkdir(parents=True, exist_ok=True)
    cases, failed = [], []
    for index, case in enumerate(SLICES):
        print("Compiling for", *case, file=sys.stderr)
        # Each in a process of its own: memory is given back, and a mesh set.
        process = subprocess.run(
            [sys.executable, __file__, "--only", str(index)]
            + ["--num-layers", str(arguments.num_layers)],
            stdout=subprocess.PIPE,
            text=True,
        )
        if process.returncode:
            failed.append(" ".join(map(str, case)))
            continue
        cases.append(json.loads(process.stdout.splitlines()[-1]))
        write(cases, folder)
    if failed:
        sys.exit(f"Failed: {'; '.join(failed)}")
    print((folder / "compile_slices.txt").read_text(), end="")


def write(cases, folder):
    """Write what is known so far."""
    lines = []
    for case in cases:
        lines += [case["text"], ""]
    lines.append(
        f"{'slice':<11}{'batch':>6}{'model':>6}{'GB, compiler':>14}"
        f"{'GB, planner':>13}{'ratio':>7}"
    )
    for case in cases:
        needed, planned = case["memory"]["needed"], case["planned_memory"]
        line = f"{case['topology']:<11}{case['batch']:>6}{case['model']:>6}"
        if needed is None:  # It does not fit, and the compiler names no size.
            line += f"{'?':>14}{planned / 1e9:>13.2f}{'?':>7}"
        else:
            line += f"{needed / 1e9:>14.2f}{planned / 1e9:>13.2f}"
            line += f"{planned / needed:>7.2f}"
        lines.append(line)
    text = "\n".join(
        [
            f"$ python {' '.join(sys.argv)}",
            ", ".join(f"{k} {v}" for k, v in cases[0]["versions"].items()),
            "",
            *lines,
        ]
    )
    (folder / "compile_slices.txt").write_text(text + "\n")
    rows = [{k: v for k, v in case.items() if k != "text"} for case in cases]
    (folder / "compile_slices.json").write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
