"""Kill training at random moments, go on, and compare the weights.

    python tools/kill_training.py --kills 5

trains a small classifier by tools/train.py without interruption, and again with
kill -9 at random moments, after each of which the same command is run again: on
one device, on 8 simulated devices, and with two processes of four (JAX). The
weights must be equal, bit by bit, and so must the logs but for their times.
Writes kill_training.json below --output, and prints a line for each.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time

TRAIN = pathlib.Path(__file__).with_name("train.py")
KINDS = ("one device", "eight devices", "two processes")
EVERY = 4
TIMES = ("seconds_per_step", "images_per_second", "mfu")
# Prints nothing: run in a process of its own, since Keras is slow to import.
PRESET = """
import sys
import keras
from keras_vit22b import ViT22BBackbone, ViT22BImageConverter
keras.utils.set_random_seed(0)
backbone = ViT22BBackbone(
    (8, 8, 1), 2, num_layers=2, num_heads=8, hidden_dim=64, mlp_dim=128,
    pooling="mean", dropout_rate=float(sys.argv[2]),
)
backbone.image_converter = ViT22BImageConverter((8, 8), channels=1)
backbone.save_to_preset(sys.argv[1])
"""


def environment(devices=1):
    """Return the environment of a process with so many simulated devices."""
    return os.environ | {
        "KERAS_BACKEND": os.environ.get("KERAS_BACKEND", "jax"),
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "NPROC": "64",
    }


def make_preset(folder, dropout=0.1):
    """Save a small preset, with random weights, to a folder."""
    subprocess.run(
        [sys.executable, "-c", PRESET, str(folder), str(dropout)],
        env=environment(),
        check=True,
        capture_output=True,
    )


def command(preset, output, *options):
    """Return the command line of a run; options are of its recipe."""
    sizes = ["batch_size=64", "ema_momentum=0.9"]
    schedule = ["warmup_steps=5", "cooldown_steps=10", "optimizer=adafactor"]
    return [
        *(sys.executable, str(TRAIN), "--data", "digits"),
        *("--preset", str(preset), "--output", str(output)),
        *("--every", str(EVERY), "--log-every", "1"),
        *("--set", *sizes, *schedule, *options),
    ]


def start(kind, preset, output, steps):
    """Start the processes of a run; return them."""
    run = command(preset, output, f"total_steps={steps}")
    if kind == "one device":
        commands, devices = [run], 1
    elif kind == "eight devices":
        commands, devices = [[*run, "--batch=2", "--model=4", "--fsdp"]], 8
    else:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{listener.getsockname()[1]}"
        commands = [
            [
                *(*run, "--batch=2", "--model=4", f"--address={address}"),
                *("--processes=2", f"--process={process}"),
            ]
            for process in range(2)
        ]
        devices = 4
    return [
        subprocess.Popen(
            command,
            env=environment(devices),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]


def finish(processes, timeout=900):
    """Wait for processes; raise if one failed."""
    for process in processes:
        _, errors = process.communicate(timeout=timeout)
        if process.returncode:
            raise RuntimeError(f"{process.args} failed:\n{errors[-4000:]}")


def lines(output):
    """Return how many lines the log of a run has."""
    path = output / "log.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def kill_at(processes, output, count, delay):
    """Kill processes a moment after their log has `count` lines."""
    while lines(output) < count:
        if any(process.poll() is not None for process in processes):
            break  # It ended before, which `finish` reports if it failed.
        time.sleep(0.002)
    time.sleep(delay)
    killed = [process.poll() is None for process in processes]
    for process in processes:
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.communicate()
    return any(killed)


def read_log(output):
    """Return the records of a log, without times."""
    records = map(json.loads, (output / "log.jsonl").read_text().splitlines())
    return [
        {name: value for name, value in record.items() if name not in TIMES}
        for record in records
    ]


def compare(kind, kills, folder, seed=0, steps=40):
    """Train with and without kills; return what differed, and when it was.

    Args:
        kind: string, one of `KINDS`.
        kills: int.
        folder: path of an empty folder.
        seed: int. Of the moments. Defaults to `0`.
        steps: int. Of the run. Defaults to `40`.

    Returns:
        A dict of `"kind"`, `"killed_after"` (lines of the log), `"weights"`
        and `"log"` (whether they are equal).
    """
    generator = random.Random(seed)
    preset = folder / "start"
    make_preset(preset)
    whole, broken = folder / "whole", folder / "broken"
    finish(start(kind, preset, whole, steps))
    last = lines(whole)
    moments = sorted(generator.sample(range(1, last - 5), kills))
    killed_after = []
    for moment in moments:
        # Later than what the log holds, so that it is training that is killed.
        moment = max(moment, lines(broken) + 1)
        processes = start(kind, preset, broken, steps)
        if kill_at(processes, broken, moment, generator.random() / 10):
            killed_after.append(lines(broken))
    finish(start(kind, preset, broken, steps))
    weights = [
        (run / "preset" / "model.safetensors").read_bytes()
        for run in (whole, broken)
    ]
    return {
        "kind": kind,
        "killed_after": killed_after,
        "lines": last,
        "weights": weights[0] == weights[1],
        "log": read_log(whole) == read_log(broken),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="results")
    arguments = parser.parse_args()
    results = []
    for kind in arguments.kinds:
        with tempfile.TemporaryDirectory() as folder:
            result = compare(
                kind, arguments.kills, pathlib.Path(folder), arguments.seed
            )
        results.append(result)
        equal = "equal" if result["weights"] and result["log"] else "DIFFERENT"
        print(
            f"{kind}: killed after {result['killed_after']} of "
            f"{result['lines']} lines; weights and log {equal}",
            flush=True,
        )
    folder = pathlib.Path(arguments.output)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "kill_training.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    sys.exit(not all(r["weights"] and r["log"] for r in results))


if __name__ == "__main__":
    main()
