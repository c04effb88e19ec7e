"""The command line of ``explain``."""

import argparse
import sys
from dataclasses import replace

from torch import nn

from lightning_moeclip.diagnosis.configured import first_line
from lightning_moeclip.diagnosis.explain import explain, has_own
from lightning_moeclip.diagnosis.factory import load_factory, make_module
from lightning_moeclip.diagnosis.stand_in import standing_in

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
    """Print the table.

    Returns:
        1 when a gradient is not reduced, or wrongly, or not in every step; 2 when nothing is known to be wrong, and not
        all of it is known; else 0.
    """
    towers = read_towers(args.towers)
    module = make_module(load_factory(args.factory))
    built, is_built = _built(module, args.world_size)
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
    is_complete = explanation.is_complete and is_built
    explanation = replace(explanation, notes=(*built, *explanation.notes), is_complete=is_complete)
    print(explanation.to_json() if args.json else explanation)
    if explanation.unreduced or explanation.unsound:
        return 1
    if not explanation.is_ok:
        missing = ", ".join(explanation.unknown) or ("parts of the module" if explanation.groups else "no parameters")
        print(f"explain: it cannot be told whether all is reduced ({missing}): see the notes.", file=sys.stderr)
        return 2
    return 0


def _built(module: nn.Module, world_size: int) -> tuple[list[str], bool]:
    """Call ``configure_model()``; notes on it, and whether it came to its end."""
    if not has_own(module, "configure_model"):
        return [], True
    try:
        with standing_in(module, world_size) as stand_in:
            module.configure_model()  # type: ignore[operator]
    except Exception as error:  # whatever it is, the rest of the module can be told
        return [f"configure_model() failed with {first_line(error)}: what it makes is not in the table."], False
    return stand_in.told("configure_model"), True


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
