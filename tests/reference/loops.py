"""The two systems written as loops over scalars' worth of work in float64, sharing no code."""

import math

import numpy as np


def group_norm(x, num_groups, weight, bias, eps):
    """x (b, c, h, w) float64."""
    out = np.empty_like(x)
    per_group = x.shape[1] // num_groups
    for b in range(x.shape[0]):
        for group in range(num_groups):
            run = slice(group * per_group, (group + 1) * per_group)
            values = x[b, run]
            mean = values.mean()
            centred = values - mean
            centred -= centred.mean()  # the mean is rounded to the size of the values
            variance = (centred**2).mean()
            out[b, run] = centred / math.sqrt(variance + eps)
    return out * weight[:, None, None] + bias[:, None, None]


def softmax_attention(q, k, v, scale):
    """q (n, d), k (m, d), v (m, e) -> (n, e), one query at a time."""
    out = np.empty((q.shape[0], v.shape[1]))
    for i in range(q.shape[0]):
        scores = np.array([scale * float(np.dot(q[i], k[j])) for j in range(k.shape[0])])
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        out[i] = sum(weights[j] * v[j] for j in range(k.shape[0]))
    return out


def pixel_attention(x, params, num_groups, num_heads, eps=1e-5):
    """The formula: x (b, c, h, w), params a dict of the ten arrays; all float64."""
    b, c, h, w = x.shape
    d = c // num_heads
    normed = group_norm(x, num_groups, params["norm_weight"], params["norm_bias"], eps)
    out = np.empty_like(x)
    for sample in range(b):
        z = np.empty((h * w, c))
        for i in range(h):
            for j in range(w):
                z[i * w + j] = normed[sample, :, i, j]
        q = z @ params["q_weight"].T + params["q_bias"]
        k = z @ params["k_weight"].T + params["k_bias"]
        v = z @ params["v_weight"].T + params["v_bias"]
        mixed = np.empty((h * w, c))
        for head in range(num_heads):
            run = slice(head * d, (head + 1) * d)
            mixed[:, run] = softmax_attention(q[:, run], k[:, run], v[:, run], 1 / math.sqrt(d))
        projected = mixed @ params["out_weight"].T + params["out_bias"]
        for i in range(h):
            for j in range(w):
                out[sample, :, i, j] = x[sample, :, i, j] + projected[i * w + j]
    return out
