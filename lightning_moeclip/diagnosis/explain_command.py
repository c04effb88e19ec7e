"""The command line of ``explain``."""

import argparse
import contextlib

from lightning_moeclip.diagnosis.explain import explain, has_own
from lightning_moeclip.diagnosis.factory import load_factory, make_module

__all__ = ["add_arguments", "read_towers", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("factory", help="package.module:function that returns the module, or module and batches")
    parser.add_argument("--world-size", type=int, default=8, help="number of ranks (default: 8)")
    parser.add_argument("--expert-parallel-size", type=int, default=1, help="ranks that share out the experts")
    parser.add_argument(
        "--strategy", default="moeclip", help="moeclip, or one of Lightning's: ddp, fsdp, deepspeed, ..."
    )
    parser.add_argument(
        "--towers",
        action="append",
        metavar="TOWER=PATH",
        help="image=model.visual; may be given several times (default: known layouts are recognised)",
    )
    parser.add_argument("--ranks-per-node", type=int, help="tells links between nodes apart (default: one node)")
    parser.add_argument("--bucket-size-mb", type=float, default=25.0, help="as in MoEClipStrategy")
    parser.add_argument("--gradient-dtype", help="as in MoEClipStrategy, such as bfloat16")
    parser.add_argument(
        "--loss-scaling", choices=("unified", "local"), default="unified", help="as in MoEClipPrecision"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Print the table; 1 when a gradient is not reduced, or wrongly."""
    towers = read_towers(args.towers)
    module = make_module(load_factory(args.factory))
    if has_own(module, "configure_model"):
        with contextlib.suppress(Exception):  # it may need a Trainer; the table has a note
            module.configure_model()  # type: ignore[operator]
    explanation = explain(
        module,
        world_size=args.world_size,
        expert_parallel_size=args.expert_parallel_size,
        towers=towers,
        strategy=args.strategy,
        ranks_per_node=args.ranks_per_node,
        bucket_size_mb=args.bucket_size_mb,
        gradient_dtype=args.gradient_dtype,
        loss_scaling=args.loss_scaling,
    )
    print(explanation.to_json() if args.json else explanation)
    return 0 if explanation.is_ok else 1


def read_towers(given: list[str] | None) -> dict[str, list[str]] | None:
    """Module paths by tower, from ``TOWER=PATH`` each.

    Raises:
        ValueError: one has another form.
    """
    if not given:
        return None
    towers: dict[str, list[str]] = {}
    for pair in given:
        tower, equals, path = pair.partition("=")
        if not (tower and equals and path):
            raise ValueError(f"--towers {pair}: write TOWER=PATH, such as --towers image=model.visual.")
        towers.setdefault(tower, []).append(path)
    return towers
