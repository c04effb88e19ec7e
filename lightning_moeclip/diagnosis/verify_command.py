"""The command line of ``verify``."""

import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("factory", metavar="package.module:factory", help="returns (LightningModule, global batches)")
    parser.add_argument("--strategy", default="moeclip", help="a Lightning name, or package.module:make_strategy")
    parser.add_argument("--world-size", type=int, default=2, help="ranks, all on this machine's CPUs")
    parser.add_argument("--expert-parallel-size", type=int, default=1, help="ranks that share out the experts")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps")
    parser.add_argument("--gradient-clip-val", type=float, help="as in the Trainer")
    parser.add_argument("--accumulate-grad-batches", type=int, default=1, help="as in the Trainer")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers")
    parser.add_argument("--tolerance", type=float, default=1e-8, help="largest relative error that passes")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="seconds until the ranks are ended")
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    # here, since the other commands do without Lightning
    from lightning_moeclip.diagnosis.verify import verify

    report = verify(
        args.factory,
        strategy=args.strategy,
        world_size=args.world_size,
        expert_parallel_size=args.expert_parallel_size,
        steps=args.steps,
        gradient_clip_val=args.gradient_clip_val,
        accumulate_grad_batches=args.accumulate_grad_batches,
        seed=args.seed,
        tolerance=args.tolerance,
        timeout_s=args.timeout_s,
    )
    print(report.to_json() if args.json else report)
    return 0 if report.ok else 1
