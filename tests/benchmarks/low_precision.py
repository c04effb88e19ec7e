"""What a scale per region and float32 masters save: exact zeros, skipped steps, and the decrease of the loss.

Run ``python -m tests.benchmarks.low_precision``. Counted, not timed; the runs are those of
``tests/traps/test_trap_5_one_scale_for_all.py`` and ``tests/gradients/test_masters.py``.
"""

import argparse

from lightning_moeclip import MoEClipPrecision
from lightning_moeclip.testing import Rank, on_ranks
from tests.benchmarks import measure
from tests.gradients.test_masters import decrease
from tests.traps.test_trap_5_one_scale_for_all import STEPS, with_a_small_head, with_spikes


@on_ranks(1)
def decreases(rank: Rank) -> dict[str, float]:
    """Decrease of the loss in 200 small steps, by how weights are kept."""
    return {
        "float32": decrease(MoEClipPrecision("32-true")),
        "masters": decrease(MoEClipPrecision("bf16-true", master_weights=True)),
        "plain": decrease(MoEClipPrecision("bf16-true")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="print only, and leave the results file as it is")
    arguments = parser.parse_args()
    modes = ("unified", "local")
    zeros, overflow = {}, {}
    for mode in modes:
        found = with_a_small_head.launch(loss_scaling=mode)[0]  # type: ignore[attr-defined]
        zeros[mode] = sum(found["zeros"][-50:]) / 50
        overflow[mode] = sum(with_spikes.launch(loss_scaling=mode)[0]["overflow"].values())  # type: ignore[attr-defined]
    kept = decreases.launch()[0]  # type: ignore[attr-defined]
    figures = {
        "underflow: share of zeros, one scale": (zeros["unified"], 2),
        "underflow: share of zeros, own scale": (zeros["local"], 2),
        "underflow: one scale / own scale": (zeros["unified"] / zeros["local"], 2),
        "overflow: rate of skipped steps, one scale": (overflow["unified"], 2),
        "overflow: rate of skipped steps, own scale": (overflow["local"], 2),
        "overflow: own scale / one scale": (overflow["local"] / overflow["unified"], 2),
        "masters: decrease missed / float32": (abs(kept["masters"] / kept["float32"] - 1), 1),
        "masters: decrease of plain bf16-true / float32": (kept["plain"] / kept["float32"], 1),
    }
    rows = [
        measure.row(name, measure.exact(value), rounds=STEPS, ranks=ranks) for name, (value, ranks) in figures.items()
    ]
    measure.write_rows(None if arguments.keep else measure.RESULTS / "low_precision.csv", rows)


if __name__ == "__main__":
    main()
