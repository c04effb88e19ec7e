"""The emoji example: its data, its batches in every layout, its metrics and its command."""

import json
import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lightning_moeclip.binding import pl
from lightning_moeclip.modules import auxiliary_loss

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # as python does for a script in that folder

from emoji_clip.data import Batch, Draw, EmojiData, GlobalBatches, Tokenizer, TrainingPairs, load_pairs, to_batch  # noqa: E402
from emoji_clip.model import Transformer  # noqa: E402
from emoji_clip.training import EmojiTask, Recall  # noqa: E402

TONE = re.compile(r" ((medium-)?(light|dark)|medium) skin tone")


def test_file_holds_3771_distinct_pairs_of_which_327_are_held_out() -> None:
    train, held_out = load_pairs()
    assert train.images.shape == (3444, 3, 32, 32)
    assert held_out.images.shape == (327, 3, 32, 32)
    assert train.images.dtype == torch.uint8
    assert len(train.captions) == 3444
    assert len({*train.captions, *held_out.captions}) == 3771
    assert len({image.numpy().tobytes() for image in (*train.images, *held_out.images)}) == 3771


def test_other_tones_of_every_held_out_emoji_are_trained() -> None:
    train, held_out = load_pairs()
    trained_bases = {TONE.sub("", caption) for caption in train.captions if TONE.search(caption)}
    held_out_bases = [TONE.sub("", caption) for caption in held_out.captions if TONE.search(caption)]
    assert len(set(held_out_bases)) == 327
    assert set(held_out_bases) == trained_bases


def test_tokenizer_knows_every_held_out_word_and_marks_the_rest() -> None:
    train, held_out = load_pairs()
    tokenizer = Tokenizer(train.captions)
    tokens = tokenizer(held_out.captions)
    assert tokens.shape == (327, tokenizer.max_words)
    assert not (tokens == Tokenizer.UNKNOWN).any()
    assert torch.unique(tokens, dim=0).shape[0] == 327
    small = Tokenizer(["red cat", "cat"])
    assert small(["cat", "red dog", "red cat red"]).tolist() == [[2, 0], [3, 1], [3, 2]]
    assert len(small) == 4


def batches(position: int, *, rank: int = 0, world_size: int = 1) -> list[list[Draw]]:
    """7 batches of 14 in a pass over 100 pairs."""
    return list(GlobalBatches(100, 14, lambda: position, seed=5, rank=rank, world_size=world_size))


@pytest.mark.parametrize("position", [0, 3, 7, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_together_see_the_batches_of_one_process(world_size: int, position: int) -> None:
    ranks = [batches(position, rank=rank, world_size=world_size) for rank in range(world_size)]
    together = [list(chain.from_iterable(shares)) for shares in zip(*ranks, strict=True)]
    assert together == batches(position)
    assert len(together) == 7 - position % 7
    assert {draw.epoch for batch in together for draw in batch} == {position // 7}


def test_a_pass_uses_a_pair_once_and_the_next_pass_another_order() -> None:
    first, second = ([draw.index for batch in batches(position) for draw in batch] for position in (0, 7))
    assert len(set(first)) == len(first) == 98
    assert len(set(second)) == len(second) == 98
    assert first != second


def test_batch_size_without_a_row_for_every_rank_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch_size=2 makes no batch: use at least 4 .* and at most 100"):
        GlobalBatches(100, 2, lambda: 0, world_size=4)


def test_a_picture_moves_by_its_draw_alone() -> None:
    train, _ = load_pairs()
    pairs = TrainingPairs(train, Tokenizer(train.captions), seed=1)
    again = TrainingPairs(train, Tokenizer(train.captions), seed=1)
    picture = pairs[Draw(3, 70)][0]
    pairs[Draw(0, 0)]
    assert torch.equal(picture, again[Draw(3, 70)][0])
    assert len({pairs[Draw(epoch, 70)][0].numpy().tobytes() for epoch in range(20)}) > 5


class Recorder(pl.LightningModule):
    """Keeps a mark of every batch that it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[float, int]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        # the sum of all pixels with places tells the pictures, their moves and their order
        marks = batch.images.double() * torch.arange(1, batch.images.numel() + 1).view_as(batch.images)
        self.seen.append((marks.sum().item(), int(batch.tokens.sum())))
        return self.weight * 0

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def seen_batches(folder: Path, *, max_steps: int, ckpt: Path | None = None) -> tuple[list[tuple[float, int]], Path]:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        max_steps=max_steps,
        limit_val_batches=0,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[pl.callbacks.ModelCheckpoint(folder, filename="{step}", save_on_train_epoch_end=True)],
    )
    module = Recorder()
    data = EmojiData(batch_size=1148, seed=2)  # 3 steps per epoch
    trainer.fit(module, data, ckpt_path=ckpt)
    return module.seen, Path(trainer.checkpoint_callback.best_model_path)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, int]]:
    return seen_batches(tmp_path_factory.mktemp("whole"), max_steps=8)[0]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("stop", [1, 3, 5])  # inside the first epoch, at its end, inside the second
def test_a_stopped_run_goes_on_with_the_batches_it_would_have_seen(
    stop: int, uninterrupted: list[tuple[float, int]], tmp_path: Path
) -> None:
    assert len(set(uninterrupted)) == 8
    before, ckpt = seen_batches(tmp_path / "before", max_steps=stop)
    after, _ = seen_batches(tmp_path / "after", max_steps=8, ckpt=ckpt)
    assert before + after == uninterrupted


def test_recall_is_the_mean_of_both_directions() -> None:
    text = torch.eye(6)
    image = torch.eye(6)
    image[0, 0] = -1.0  # its partner comes last in both directions
    image[4] = torch.tensor([0, 0, 0, 0, 0.6, 0.8])  # nearer to text 5, while text 4 has no nearer picture
    recall = Recall(6)
    recall.update(image, text)
    result = recall.compute()
    assert result["recall_at_1"].item() == pytest.approx((4 + 5) / 12)
    assert result["recall_at_5"].item() == pytest.approx((5 + 5) / 12)


def test_padding_changes_no_feature() -> None:
    torch.manual_seed(0)
    tower = Transformer(8, depth=2, num_heads=2, num_experts=4).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    padded = torch.cat([x, torch.randn(3, 2, 8, dtype=torch.float64)], dim=1)
    is_token = torch.arange(7).expand(3, 7) < 5
    assert torch.allclose(tower(padded, is_token), tower(x), rtol=0, atol=1e-12)
    assert tower.blocks[1].mlp.tokens_per_expert.sum().item() == 2 * 3 * 5


def test_vectors_positions_and_the_logit_scale_are_not_decayed() -> None:
    task = EmojiTask(20, 4, 6, 100)
    decayed, free = task.configure_optimizers()["optimizer"].param_groups
    names = {id(p): name for name, p in task.named_parameters()}
    assert decayed["weight_decay"] > 0 == free["weight_decay"]
    assert {"loss.logit_scale", "model.text.position"} <= {names[id(p)] for p in free["params"]}
    assert {"model.visual.transformer.blocks.1.mlp.w_in", "model.text.words.weight"} <= {
        names[id(p)] for p in decayed["params"]
    }
    assert len(decayed["params"]) + len(free["params"]) == len(names)


def run_example(folder: Path, *arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "train_clip_moe.py"), "--logdir", str(folder), *arguments],
        env=os.environ
        | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_WAIT_POLICY": "PASSIVE"},  # no spinning on busy cores
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def mean_loss_in_plain_torch(*, num_steps: int) -> float:
    """Mean contrastive loss of the first steps of seed 0, by a loop over whole batches."""
    pl.seed_everything(0, verbose=False)
    data = EmojiData(seed=0)
    total_steps = 30 * data.steps_per_epoch
    task = EmojiTask(len(data.tokenizer), data.tokenizer.max_words, len(data.held_out.captions), total_steps)
    configured = task.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    pairs = TrainingPairs(data.train_pairs, data.tokenizer, seed=0)
    draws = list(GlobalBatches(len(data.train_pairs.captions), 256, lambda: 0, seed=0))
    losses = []
    for batch in (to_batch([pairs[draw] for draw in rows]) for rows in draws[:num_steps]):
        optimizer.zero_grad()
        contrastive = task.loss(*task.model(batch.images, batch.tokens))
        (contrastive + auxiliary_loss(task.model, balance=0.01)).backward()
        optimizer.step()
        scheduler.step()
        losses.append(contrastive.item())
    return sum(losses) / num_steps


def test_command_trains_on_two_ranks_and_goes_on_in_one_process(tmp_path: Path) -> None:
    first = run_example(tmp_path / "two", "--devices", "2", "--expert-parallel-size", "2", "--max-steps", "2")
    assert {"recall_at_1", "recall_at_5", "num_pairs", "train_loss", "seconds", "ckpt"} == set(first)
    assert first["num_pairs"] == 327
    # printed with four decimals; the float32 sums of two ranks and of one differ by less
    assert first["train_loss"] == pytest.approx(mean_loss_in_plain_torch(num_steps=2), abs=1e-4)
    curves = EventAccumulator(str(Path(first["ckpt"]).parents[1])).Reload().Tags()["scalars"]
    assert {
        "loss",
        "recall_at_1",
        "expert_load/model.visual.transformer.blocks.1.mlp/all/0",
        "expert_load_variation/model.text.transformer.blocks.1.mlp/all",
    } <= set(curves)
    second = run_example(tmp_path / "one", "--devices", "1", "--max-steps", "3", "--ckpt", first["ckpt"])
    assert torch.load(second["ckpt"], weights_only=True)["global_step"] == 3
