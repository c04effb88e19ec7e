import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_moeclip import MoEClipStrategy
from lightning_moeclip.binding import LightningModule, Trainer
from lightning_moeclip.testing import Rank, on_ranks


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a = nn.Linear(4, 4).double()
        self.b = nn.Linear(4, 4).double()
        self.idle = nn.Linear(4, 4).double()
        self.grads = []

    def training_step(self, batch, k):
        return self.b(self.a(batch).tanh()).pow(2).mean()

    def on_before_optimizer_step(self, optimizer):
        self.grads.append({n: None if p.grad is None else p.grad.clone() for n, p in self.named_parameters()})

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


DATA = torch.randn(5, 8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@on_ranks(2)
def test_fit(rank: Rank) -> None:
    net = Net()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MoEClipStrategy(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        gradient_clip_val=0.05,
    )
    mine = [d.chunk(2)[rank.index] for d in DATA]
    trainer.fit(net, DataLoader(mine, batch_size=None))
    ref = Net()
    opt = ref.configure_optimizers()
    for k, d in enumerate(DATA):
        opt.zero_grad()
        ref.training_step(d, k).backward()
        for n, p in ref.named_parameters():
            g = net.grads[k][n]
            assert (g is None) == (p.grad is None)
            if g is not None:
                assert (g - p.grad).abs().max() < 1e-12
        nn.utils.clip_grad_norm_(ref.parameters(), 0.05)
        opt.step()
    for (n, p), q in zip(ref.named_parameters(), net.parameters()):
        assert (p - q).abs().max() < 1e-12, n
