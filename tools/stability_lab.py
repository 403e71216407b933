"""The full grid of the stability laboratory.

    python tools/stability_lab.py --output results/stability_digits

trains 126 small models: parallel and sequential blocks, without QK norm and
with RMS and layer norm, seven learning rates, three seeds. Each run is kept as
it ends, so the same command goes on after an interruption. docs/stability.md
has what came out.
"""

import argparse
import sys

from keras_vit22b.training import stability
from keras_vit22b.training import stability_plots
from keras_vit22b.training.stability_bench import StabilityProtocol


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", default="results/stability_lab")
    arguments = parser.parse_args()
    protocol = StabilityProtocol(arguments.dataset)
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

    runs = laboratory.run(settings, progress)
    result = laboratory.report(runs)
    stability_plots.plot_by_logit(
        runs, protocol, laboratory.folder / "logit_and_loss.png"
    )
    for variant, value in result["sensitivity"].items():
        print(f"{variant:<30}{value['mean']:.3f} ± {value['std']:.3f}")


if __name__ == "__main__":
    main()
