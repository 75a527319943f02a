"""CLIP and Long-CLIP as OpenAI and Zhang et al. lay them out, in plain torch: the model that conversions must equal.

Written from the papers and the names in the public weights, without transformers.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

KEEP = 20  # positions that Long-CLIP reads from its first table
# The shapes of B/16 and L/14, scaled down. L/14: different depths, and a text width that equals the joint width, so
# that a forgotten transposition does not show in shapes.
TOWERS = {"vision_width": 128, "vision_layers": 2, "text_width": 128, "text_layers": 2}
B16 = {"image_size": 64, "patch": 16, **TOWERS, "joint": 64}
L14 = {**B16, "image_size": 56, "patch": 14, "vision_width": 192, "vision_layers": 3, "joint": 128}


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class Block(nn.Module):
    def __init__(self, width, heads, hidden, activation, mask=None):
        super().__init__()
        self.attn = nn.MultiheadAttention(width, heads)
        self.ln_1 = nn.LayerNorm(width)
        layers = [("c_fc", nn.Linear(width, hidden)), ("gelu", activation()), ("c_proj", nn.Linear(hidden, width))]
        self.mlp = nn.Sequential(OrderedDict(layers))
        self.ln_2 = nn.LayerNorm(width)
        self.attn_mask = mask  # a plain attribute, as in OpenAI's code

    def forward(self, x):  # [T, B, W]
        mask = None if self.attn_mask is None else self.attn_mask.to(x.dtype)
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, width, layers, heads, hidden, activation, mask=None):
        super().__init__()
        self.resblocks = nn.Sequential(*(Block(width, heads, hidden, activation, mask) for _ in range(layers)))

    def forward(self, x):  # [B, T, W]
        return self.resblocks(x.transpose(0, 1)).transpose(0, 1)


class Vision(nn.Module):
    def __init__(self, image_size, patch, width, layers, heads, hidden, joint, activation):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, patch, stride=patch, bias=False)
        self.class_embedding = nn.Parameter(torch.empty(width))
        self.positional_embedding = nn.Parameter(torch.empty((image_size // patch) ** 2 + 1, width))
        self.ln_pre = nn.LayerNorm(width)
        self.transformer = Transformer(width, layers, heads, hidden, activation)
        self.ln_post = nn.LayerNorm(width)
        self.proj = nn.Parameter(torch.empty(width, joint))

    def forward(self, pixels):  # [B, 3, H, W]
        x = self.conv1(pixels).flatten(2).transpose(1, 2)  # [B, P, W]
        start = self.class_embedding.expand(x.shape[0], 1, -1)
        x = torch.cat([start, x], dim=1) + self.positional_embedding  # [B, 1 + P, W]
        x = self.transformer(self.ln_pre(x))
        return self.ln_post(x[:, 0]) @ self.proj  # [B, D]


class OpenAITwin(nn.Module):
    """`long` gives the second positional table; without it the model is plain CLIP."""

    def __init__(
        self, *, long=True, context=248, vocabulary=600, vision_heads=None, activation=QuickGELU, seed=0, **sizes
    ):
        super().__init__()
        sizes = {**B16, **sizes}
        size, patch, width, joint = (sizes[name] for name in ("image_size", "patch", "vision_width", "joint"))
        self.context, self.vocabulary, self.size = context, vocabulary, size
        heads = vision_heads or width // 64
        self.visual = Vision(size, patch, width, sizes["vision_layers"], heads, 4 * width, joint, activation)
        width, layers = sizes["text_width"], sizes["text_layers"]
        mask = torch.full((context, context), -torch.inf).triu(1)
        self.transformer = Transformer(width, layers, width // 64, 4 * width, activation, mask)
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.positional_embedding = nn.Parameter(torch.empty(context, width))
        self.positional_embedding_res = nn.Parameter(torch.empty(context, width)) if long else None
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(torch.empty(width, joint))
        self.logit_scale = nn.Parameter(torch.empty(()))
        self.mask1 = (torch.arange(context) < KEEP)[:, None].float()  # [T, 1]
        self.mask2 = 1 - self.mask1
        if seed is not None:  # None: the values do not matter
            self._draw(seed)
        self.eval()

    @torch.no_grad()
    def _draw(self, seed):
        """Random weights everywhere, norms and biases included, so that every mistake shows."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            draw = torch.randn(weight.shape, generator=generator)
            if name.endswith(("ln_1.weight", "ln_2.weight", "ln_pre.weight", "ln_post.weight", "ln_final.weight")):
                weight.copy_(1 + 0.3 * draw)
            elif "embedding" in name:
                weight.copy_(draw)
            elif weight.ndim > 1:
                fan = weight.shape[0] if name.endswith("proj") else weight[0].numel()  # right-hand factors: rows
                weight.copy_(1.5 * draw / fan**0.5)
            else:
                weight.copy_(0.3 * draw)

    def encode_image(self, pixels):
        return self.visual(pixels)

    def encode_text(self, ids):  # [B, context]
        if self.positional_embedding_res is None:
            positions = self.positional_embedding
        else:
            positions = self.positional_embedding * self.mask1 + self.positional_embedding_res * self.mask2
        x = self.transformer(self.token_embedding(ids) + positions)
        x = self.ln_final(x)[torch.arange(ids.shape[0]), ids.argmax(dim=-1)]
        return x @ self.text_projection  # [B, D]

    def forward(self, pixels, ids):
        return self.encode_image(pixels), self.encode_text(ids)

    def tokens(self, words, *, pad=0):
        """Ids of a caption by OpenAI's rule: start, words, end, cut to the context with the end kept, then pads."""
        start, end = self.vocabulary - 2, self.vocabulary - 1
        ids = [start, *words, end][: self.context]
        ids[-1] = end
        return torch.tensor(ids + [pad] * (self.context - len(ids)))
