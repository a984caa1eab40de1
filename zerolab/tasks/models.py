"""The models that lessons, demo, bench and train use. In shapes, B is the batch, T the tokens, C the width."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Self-attention with `heads` heads: (B, T, C) -> (B, T, C). Causal, unless a mask says otherwise."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} must be a multiple of heads={heads}")
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.heads, C // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, T, C / heads)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """Two linear layers with a hidden width of 4C: (B, T, C) -> (B, T, C)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A pre-norm transformer block, attention then MLP: (B, T, C) -> (B, T, C)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A language model with the architecture of GPT-2. By default its tokens are bytes; it has 5.7 million parameters.

    context: the longest sequence, in tokens. vocabulary: the number of different tokens, here 256 bytes.
    """

    def __init__(
        self, layers: int = 7, width: int = 256, heads: int = 4, context: int = 64, vocabulary: int = 256
    ) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, param in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(param)
            elif param.dim() == 2:
                # Each block adds the outputs of two layers to x. Those start smaller, so that x keeps its scale.
                adds_to_x = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(param, std=0.02 / (2 * layers) ** 0.5 if adds_to_x else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, T, vocabulary) for `tokens` (B, T); with `targets` (B, T), the mean loss instead."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)  # (B, T, C)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def small_gpt() -> GPT:
    """Two blocks of width 64, with the same parameters on every rank."""
    torch.manual_seed(0)
    return GPT(layers=2, width=64)


class ConvBlock(nn.Module):
    """A strided convolution and a batch norm: (B, C, H, W) -> (B, 2C, H/2, W/2)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(2 * channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class CNN(nn.Module):
    """A small image classifier: (B, channels, H, W) with values from 0 to 1 -> logits (B, classes)."""

    def __init__(self, layers: int = 2, width: int = 16, channels: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)  # learns the mean and variance of the images
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(width * 2**i) for i in range(layers))
        self.head = nn.Linear(width * 2**layers, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.first(self.norm(images)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


class ResidualBlock(nn.Module):
    """Two convolutions whose output is added to their input, each behind a norm and a ReLU: (B, C, H, W), unchanged.

    The norm is GroupNorm, which takes each image by itself, so that the result does not depend on the batch.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(4, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        return x + self.conv2(F.relu(self.norm2(y)))


class ResNet(nn.Module):
    """A small residual network: (B, channels, H, W) with values from 0 to 1 -> logits (B, classes)."""

    def __init__(self, layers: int = 1, width: int = 16, channels: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(layers))
        self.norm = nn.GroupNorm(4, width)
        self.head = nn.Linear(16 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images.to(self.first.weight.dtype))  # (B, C, H/2, W/2)
        for block in self.blocks:
            x = block(x)
        pooled = F.adaptive_avg_pool2d(F.relu(self.norm(x)), 4)  # (B, C, 4, 4), whatever the size of the images
        return self.head(pooled.flatten(1))


class PairEncoder(nn.Module):
    """Do two sentences mean the same? Word numbers (B, 2, T), 0 for padding -> logits (B, 2).

    Each sentence is encoded on its own, and its words' outputs averaged. The answer depends on the two averages.
    """

    def __init__(
        self, layers: int = 2, width: int = 64, heads: int = 4, context: int = 32, vocabulary: int = 4096
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width, padding_idx=0)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(2 * width, 2)

    def forward(self, pairs: Tensor) -> Tensor:
        words = pairs.flatten(0, 1)  # (2B, T)
        there = words != 0  # (2B, T), False for padding
        x = self.dropout(self.token(words) + self.position(torch.arange(words.shape[1], device=words.device)))
        for block in self.blocks:
            x = block(x, there[:, None, None, :])  # no word attends to padding
        weight = there.unsqueeze(2).to(x.dtype)  # (2B, T, 1)
        means = (self.norm(x) * weight).sum(1) / weight.sum(1).clamp(min=1)
        one, other = means.unflatten(0, (-1, 2)).unbind(1)  # each (B, C)
        return self.head(torch.cat([(one - other).abs(), one * other], dim=1))
