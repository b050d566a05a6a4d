"""The cases once more in JAX, for XLA. Importing this module needs JAX.

A twin takes the arrays that the case's function takes as tensors, in the same nesting and types (integers are 32 bits
wide, as JAX has them by default), and returns the same results. Floats are widened and narrowed where PyTorch does it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.fusion.cases.forward import BLOCK, FP8_MAX, GROUPS
from benchmarks.fusion.cases.mixed import BETA1, BETA2, DECAY, EPS, LEARNING_RATE, STEP

Array = Any


def layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    h = x.astype(jnp.float32)
    mean = h.mean(-1, keepdims=True)
    variance = jnp.square(h - mean).mean(-1, keepdims=True)
    return ((h - mean) * jax.lax.rsqrt(variance + 1e-5) * weight + bias).astype(x.dtype)


def rms_norm(x: Array, weight: Array) -> Array:
    h = x.astype(jnp.float32)
    h = h * jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-6)
    return h.astype(x.dtype) * weight


def bias_gelu_residual_layer_norm(x: Array, bias: Array, residual: Array, weight: Array, shift: Array) -> Array:
    return layer_norm(jax.nn.gelu(x + bias, approximate=False) + residual, weight, shift)


def softmax_scale_mask(x: Array, mask: Array) -> Array:
    return jax.nn.softmax(x * 0.125 + mask, -1)


def softmax(x: Array) -> Array:
    return jax.nn.softmax(x, -1)


def outer_softmax(x: Array) -> Array:
    return jax.nn.softmax(x, 0)


def swiglu_rms_norm(gate: Array, up: Array, weight: Array) -> Array:
    return rms_norm(jax.nn.silu(gate) * up, weight)


def cross_entropy(logits: Array, target: Array) -> Array:
    x = logits.astype(jnp.float32)
    return jax.nn.logsumexp(x, -1) - jnp.take_along_axis(x, target[:, None], 1)[:, 0]


def lstm_cell(gates: Array, cell: Array) -> Array:
    i, f, g, o = jnp.split(gates, 4, -1)
    new = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(new), new


def attention_gru(from_input: Array, from_hidden: Array, hidden: Array, attention: Array) -> Array:
    r1, u1, n1 = jnp.split(from_input, 3, -1)
    r2, u2, n2 = jnp.split(from_hidden, 3, -1)
    update = attention[..., None] * jax.nn.sigmoid(u1 + u2)
    candidate = jnp.tanh(n1 + jax.nn.sigmoid(r1 + r2) * n2)
    return (1 - update) * hidden + update * candidate


def group_norm_silu(x: Array, weight: Array, bias: Array) -> Array:
    n, c, *space = x.shape
    h = x.astype(jnp.float32).reshape(n, GROUPS, -1)
    mean = h.mean(-1, keepdims=True)
    variance = jnp.square(h - mean).mean(-1, keepdims=True)
    h = ((h - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    along = (1, c, *[1] * len(space))
    y = (h * weight.reshape(along) + bias.reshape(along)).astype(x.dtype)
    return jax.nn.silu(y)


def batch_norm_relu(x: Array, weight: Array, bias: Array, running_mean: Array, running_var: Array) -> Array:
    axes, n = (0, 2, 3), x.size // x.shape[1]
    mean = x.mean(axes, keepdims=True)
    variance = jnp.square(x - mean).mean(axes, keepdims=True)
    rstd = jax.lax.rsqrt(variance + 1e-5)
    y = (x - mean) * rstd * weight[:, None, None] + bias[:, None, None]
    new_mean = 0.9 * running_mean + 0.1 * mean.reshape(-1)
    new_var = 0.9 * running_var + 0.1 * variance.reshape(-1) * (n / (n - 1))
    return jax.nn.relu(y), mean.reshape(-1), rstd.reshape(-1), new_mean, new_var


def rope(x: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x, 2, -1)
    return x * cos[:, None] + jnp.concatenate([-second, first], -1) * sin[:, None]


def dual_axis_amax(x: Array) -> Array:
    rows, cols = x.shape
    b = x.reshape(rows // BLOCK, BLOCK, cols // BLOCK, BLOCK).astype(jnp.float32)
    magnitude = jnp.abs(b)
    along_row = jnp.maximum(magnitude.max(3, keepdims=True), 1e-12) / FP8_MAX
    along_col = jnp.maximum(magnitude.max(1, keepdims=True), 1e-12) / FP8_MAX
    return (
        (b / along_row).astype(x.dtype).reshape(rows, cols),
        along_row.reshape(rows, cols // BLOCK),
        (b / along_col).astype(x.dtype).reshape(rows, cols),
        along_col.reshape(rows // BLOCK, cols),
    )


def layer_norm_backward(dy: Array, x: Array, mean: Array, rstd: Array, weight: Array, bias: Array) -> Array:
    dy32 = dy.astype(jnp.float32)
    normal = (x.astype(jnp.float32) - mean) * rstd
    g = dy32 * weight
    dx = rstd * (g - g.mean(-1, keepdims=True) - normal * (g * normal).mean(-1, keepdims=True))
    return dx.astype(x.dtype), (dy32 * normal).sum(0).astype(weight.dtype), dy32.sum(0).astype(bias.dtype)


def rms_norm_backward(dy: Array, x: Array, rstd: Array, weight: Array) -> Array:
    dy32, normal = dy.astype(jnp.float32), x.astype(jnp.float32) * rstd
    g = dy32 * weight.astype(jnp.float32)
    dx = rstd * (g - normal * (g * normal).mean(-1, keepdims=True))
    return dx.astype(x.dtype), (dy32 * normal).sum(0).astype(weight.dtype)


def softmax_backward(dy: Array, y: Array) -> Array:
    return (dy - (dy * y).sum(-1, keepdims=True)) * y


def bias_gelu_backward(dy: Array, x: Array, bias: Array) -> Array:
    h = (x + bias).astype(jnp.float32)
    slope = 0.5 * (1 + jax.lax.erf(h * math.sqrt(0.5))) + h * jnp.exp(-0.5 * h * h) / math.sqrt(2 * math.pi)
    dx = (dy.astype(jnp.float32) * slope).astype(x.dtype)
    return dx, dx.sum(0)


def cross_entropy_backward(dloss: Array, logits: Array, lse: Array, target: Array) -> Array:
    p = jnp.exp(logits.astype(jnp.float32) - lse[:, None])
    hit = jnp.arange(logits.shape[1]) == target[:, None]
    return (jnp.where(hit, p - 1, p) * dloss[:, None]).astype(logits.dtype)


def mixed_axes(x: Array) -> Array:
    h = jax.nn.relu(x)
    return h.mean(0), h.var(0), h.max(1), jax.nn.softmax(h, 1)


def adamw(params: Array, grads: Array, firsts: Array, seconds: Array) -> Array:
    new: tuple[list[Array], list[Array], list[Array]] = ([], [], [])
    for p, g, m, v in zip(params, grads, firsts, seconds, strict=True):
        m = BETA1 * m + (1 - BETA1) * g
        v = BETA2 * v + (1 - BETA2) * g * g
        deviation = jnp.sqrt(v) / (1 - BETA2**STEP) ** 0.5 + EPS
        p = p * (1 - LEARNING_RATE * DECAY) - LEARNING_RATE / (1 - BETA1**STEP) * (m / deviation)
        for made, kept in zip((p, m, v), new, strict=True):
            kept.append(made)
    return new
