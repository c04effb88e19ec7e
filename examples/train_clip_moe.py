"""Train CLIP with MoE towers on emoji and their names, on several ranks, with the gradients of one process.

    python examples/train_clip_moe.py --devices 2 --expert-parallel-size 2

Uses GPUs in bfloat16 when there are as many as ``--devices``, else one CPU process per device. The last line that it
prints is JSON: recall on the pairs held out from training, mean loss of the last epoch, seconds, and the checkpoint.
"""

import argparse
import json
import math
import os
import time
import warnings
from pathlib import Path

import torch
from emoji_clip.data import EmojiData
from emoji_clip.model import NUM_EXPERTS
from emoji_clip.training import EmojiTask

from lightning_moeclip import MoEClipStrategy
from lightning_moeclip.binding import pl  # lightning.pytorch or pytorch_lightning, whichever is installed
from lightning_moeclip.callbacks import CosineRollback, ExpertLoadMonitor, ResidualResync, VarianceHeatmap

# the batches are made from memory in well under a millisecond per pair: workers would only cost a process each
warnings.filterwarnings("ignore", message=".*does not have many workers.*")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--devices", type=int, default=torch.cuda.device_count() or 2, help="ranks (all GPUs, or two CPU processes)"
    )
    parser.add_argument("--expert-parallel-size", type=int, help="ranks that share out the experts (as many as fit)")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the data, also the learning rate's length")
    parser.add_argument("--max-steps", type=int, help="stop after so many steps, as if interrupted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ckpt", type=Path, help="go on from this checkpoint, in any layout")
    parser.add_argument("--logdir", type=Path, default=Path("runs/emoji_clip"), help="TensorBoard curves, checkpoints")
    parser.add_argument("--strategy", choices=("moeclip", "auto"), default="moeclip", help="auto: Lightning's own")
    return parser.parse_args(arguments)


def make_trainer(args: argparse.Namespace, total_steps: int) -> pl.Trainer:
    strategy = "auto"
    # these look on under any strategy, and the two that act need ours
    callbacks = [VarianceHeatmap(figure_every_n_steps=100), ExpertLoadMonitor()]
    if args.strategy == "moeclip":
        callbacks += [ResidualResync(), CosineRollback()]
        size = args.expert_parallel_size or math.gcd(args.devices, NUM_EXPERTS)
        strategy = MoEClipStrategy(expert_parallel_size=size, towers={"image": "model.visual", "text": "model.text"})
    has_gpus = torch.cuda.device_count() >= args.devices
    if not has_gpus:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.devices))
    return pl.Trainer(
        accelerator="gpu" if has_gpus else "cpu",
        devices=args.devices,
        strategy=strategy,
        precision="bf16-mixed" if has_gpus else "32-true",
        # steps alone end the run, since a stop inside an epoch counts as the end of that epoch
        max_epochs=-1,
        max_steps=min(total_steps, args.max_steps or total_steps),
        use_distributed_sampler=False,  # GlobalBatches deals the rows out
        num_sanity_val_steps=0,
        check_val_every_n_epoch=2,
        log_every_n_steps=10,
        logger=pl.loggers.TensorBoardLogger(args.logdir, name=None),
        callbacks=[
            pl.callbacks.TQDMProgressBar(),
            pl.callbacks.ModelCheckpoint(filename="{step}", save_on_train_epoch_end=True),
            *callbacks,
        ],
    )


def main() -> None:
    start = time.monotonic()
    args = parse()
    pl.seed_everything(args.seed, verbose=False)
    data = EmojiData(seed=args.seed)
    num_pairs = len(data.held_out.captions)
    total_steps = args.epochs * data.steps_per_epoch
    task = EmojiTask(len(data.tokenizer), data.tokenizer.max_words, num_pairs, total_steps)
    trainer = make_trainer(args, total_steps)
    trainer.fit(task, data, ckpt_path=args.ckpt)
    train_loss = trainer.callback_metrics.get("loss")  # None: the checkpoint was of a run that had ended
    recall = trainer.validate(task, data, verbose=False)[0]
    if trainer.is_global_zero:
        result = {
            **{name: round(recall[name], 4) for name in ("recall_at_1", "recall_at_5")},
            "num_pairs": num_pairs,
            "train_loss": None if train_loss is None else round(train_loss.item(), 4),
            "seconds": round(time.monotonic() - start, 1),
            "ckpt": trainer.checkpoint_callback.best_model_path or str(args.ckpt),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
