"""The full grid of the stability laboratory.

    python tools/stability_lab.py --output results/stability_digits

trains 126 small models: parallel and sequential blocks, without QK norm and
with RMS and layer norm, seven learning rates, three seeds. Each run is kept as
it ends, so the same command goes on after an interruption.
"""

import argparse
import sys

from keras_vit22b.training import stability


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", default="results/stability_lab")
    arguments = parser.parse_args()
    protocol = stability.StabilityProtocol(
        arguments.dataset, steps=arguments.steps
    )
    laboratory = stability.Laboratory(protocol, arguments.output)
    settings = stability.grid(seeds=range(arguments.seeds))

    def progress(run, number, count):
        print(
            f"{number}/{count} {run['block']} {run['qk_norm']} "
            f"{run['learning_rate']:g} {run['seed']}: {run['final_loss']:.3f}",
            file=sys.stderr,
        )
        # What there is so far can be looked at.
        if number % len(stability.LEARNING_RATES) == 0:
            laboratory.report(laboratory.run(settings[:number]))

    result = laboratory.report(laboratory.run(settings, progress))
    for variant, value in result["sensitivity"].items():
        print(f"{variant:<28}{value['mean']:.3f} ± {value['std']:.3f}")


if __name__ == "__main__":
    main()
