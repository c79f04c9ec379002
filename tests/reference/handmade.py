"""Classifiers whose attention is known in advance."""

import torch
from torch import nn

from regard.layers.attend import attend


def left_neighbour(row, column, h, w):
    """Each place attends the one to its left; the first column attends itself."""
    return [(row, max(column - 1, 0))]


def own_row(row, column, h, w):
    """Each place attends all of its row alike."""
    return [(row, c) for c in range(w)]


def top_right(row, column, h, w):
    """Every place attends the top right corner."""
    return [(0, w - 1)]


class Handmade(nn.Module):
    """Two heads over patches: one by `rule`, one attending its own place; logits from colour.

    Logit 1 is the mean over places of what head 0 brings, logit 0 is zero. The value of a token
    is the mean of its patch.
    """

    def __init__(self, rule, patch=4, strength=60.0, depth=2):
        super().__init__()
        self.rule = rule
        self.patch_size = patch
        self.strength = strength
        self.blocks = nn.ModuleList(HandmadeBlock(rule, strength) for _ in range(depth))

    def forward(self, images):
        patches = nn.functional.avg_pool2d(images.mean(1, keepdim=True), self.patch_size)
        _, _, h, w = patches.shape
        x = patches.flatten(2).transpose(1, 2)  # b n 1
        for block in self.blocks:
            x = block(x, h, w)
        pooled = x.mean((1, 2))
        return torch.stack([torch.zeros_like(pooled), pooled], dim=1)


class HandmadeBlock(nn.Module):
    """The attention of `Handmade`; it hands on what head 0 brings."""

    def __init__(self, rule, strength):
        super().__init__()
        self.rule = rule
        self.strength = strength

    def forward(self, x, h, w):
        b, n, _ = x.shape
        wanted = torch.zeros(n, n)
        for row in range(h):
            for column in range(w):
                for r, c in self.rule(row, column, h, w):
                    wanted[row * w + column, r * w + c] = self.strength
        q = torch.stack([wanted, self.strength * torch.eye(n)]).expand(b, 2, n, n)
        k = torch.eye(n).expand(b, 2, n, n)
        out = attend(q, k, x.unsqueeze(1).expand(b, 2, n, 1), scale=1.0)
        return out[:, 0]


def known_weights(rule, h, w):
    """The weights (n, n) of head 0, by loops."""
    known = torch.zeros(h * w, h * w)
    for row in range(h):
        for column in range(w):
            targets = rule(row, column, h, w)
            for r, c in targets:
                known[row * w + column, r * w + c] = 1 / len(targets)
    return known
