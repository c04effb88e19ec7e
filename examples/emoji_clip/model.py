"""Two small transformers, one for pictures and one for words, with a mixture of experts in every second block.

Shapes: N pairs, L tokens of a row (patches or words), D width.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lightning_moeclip.modules import MoE

NUM_EXPERTS = 4  # per layer: 1, 2 or 4 ranks can share them out


class Attention(nn.Module):
    """Every token of a row looks at the row's real tokens."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, is_token: Tensor | None) -> Tensor:
        rows, length, dim = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.num_heads, dim // self.num_heads).permute(2, 0, 3, 1, 4)
        mask = None if is_token is None else is_token[:, None, None, :]
        heads = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(heads.transpose(1, 2).reshape(rows, length, dim))


class Block(nn.Module):
    """Attention, then an MLP or experts. Padding is no token: it takes part in no routing and in no balance."""

    def __init__(self, dim: int, num_heads: int, *, num_experts: int = 0) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(dim), Attention(dim, num_heads)
        self.mlp_norm, self.mlp = nn.LayerNorm(dim), mlp(dim, num_experts)

    def forward(self, x: Tensor, is_token: Tensor | None) -> Tensor:
        """x: [N, L, D]; is_token: [N, L] bool, None where there is no padding -> [N, L, D]."""
        x = x + self.attention(self.attention_norm(x), is_token)
        if is_token is None:
            return x + self.mlp(self.mlp_norm(x))
        tokens = x[is_token]
        return x.masked_scatter(is_token[..., None], tokens + self.mlp(self.mlp_norm(tokens)))


def mlp(dim: int, num_experts: int) -> nn.Module:
    """A perceptron, or experts half as wide of which each token takes two: the same work per token."""
    if num_experts:
        return MoE(dim, 2 * dim, num_experts, top_k=2)
    return nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))


class Transformer(nn.Module):
    """Blocks, the mean over the tokens of a row, and a projection to the features that the loss compares."""

    def __init__(self, dim: int, *, depth: int, num_heads: int, num_experts: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(dim, num_heads, num_experts=num_experts if number % 2 else 0) for number in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        self.projection = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, is_token: Tensor | None = None) -> Tensor:
        """x: [N, L, D]; is_token: [N, L] bool, None where there is no padding -> [N, D]."""
        for block in self.blocks:
            x = block(x, is_token)
        x = self.norm(x)
        if is_token is None:
            return self.projection(x.mean(1))
        weight = is_token[..., None].to(x.dtype)
        return self.projection((x * weight).sum(1) / weight.sum(1))


class ImageTower(nn.Module):
    """A small ViT: the picture in square patches."""

    def __init__(self, transformer: Transformer, dim: int, *, image_size: int, patch_size: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, kernel_size=patch_size, stride=patch_size)
        self.position = nn.Parameter(0.02 * torch.randn((image_size // patch_size) ** 2, dim))
        self.transformer = transformer

    def forward(self, images: Tensor) -> Tensor:
        """images: [N, 3, image_size, image_size] -> [N, D]."""
        return self.transformer(self.patches(images).flatten(2).transpose(1, 2) + self.position)


class TextTower(nn.Module):
    """A caption as words with their places; ``pad`` is the number that is no word."""

    def __init__(self, transformer: Transformer, dim: int, *, num_words: int, max_words: int, pad: int = 0) -> None:
        super().__init__()
        self.pad = pad
        self.words = nn.Embedding(num_words, dim)
        self.position = nn.Parameter(0.02 * torch.randn(max_words, dim))
        self.transformer = transformer

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [N, max_words] int64, at least one word per row -> [N, D]."""
        return self.transformer(self.words(tokens) + self.position, tokens != self.pad)


class EmojiCLIP(nn.Module):
    """The two towers; their features meet in the loss.

    Args:
        num_words: size of the vocabulary.
        max_words: length of a padded caption.
        dim: D of both towers and of the features.
        depth: blocks per tower, every second one with experts.
        num_heads: attention heads per block.
        num_experts: experts per MoE layer.
    """

    def __init__(
        self,
        num_words: int,
        max_words: int,
        *,
        dim: int = 128,
        depth: int = 2,
        num_heads: int = 4,
        num_experts: int = NUM_EXPERTS,
    ) -> None:
        super().__init__()

        def transformer() -> Transformer:
            return Transformer(dim, depth=depth, num_heads=num_heads, num_experts=num_experts)

        self.visual = ImageTower(transformer(), dim, image_size=32, patch_size=8)
        self.text = TextTower(transformer(), dim, num_words=num_words, max_words=max_words)

    def forward(self, images: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """images: [N, 3, 32, 32]; tokens: [N, max_words] -> image and text features, [N, D] each."""
        return self.visual(images), self.text(tokens)
