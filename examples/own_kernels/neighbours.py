"""SciPy's k-d tree, tuned as it is: a kernel of other people's needs a function that names its parameters.

autotune search kernel examples.own_kernels.neighbours:nearest --device cpu --timeout 60
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.spatial import KDTree
from scipy.spatial.distance import cdist

import autotune

Array = np.ndarray[Any, Any]


def reference(points: Array, queries: Array) -> Array:
    """Every distance, and the least of each row."""
    least: Array = cdist(queries, points).min(axis=1)
    return least


def make_inputs(points: int, queries: int, dimensions: int = 3, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {"points": rng.random((points, dimensions)), "queries": rng.random((queries, dimensions))}


@autotune.tunable(
    space={
        "leafsize": [2, 4, 8, 16, 32, 64, 128],
        "compact_nodes": [False, True],
        "balanced_tree": [False, True],
        "workers": [1, 2, 4],
    },
    key=["points", "queries"],
    reference=reference,
    inputs=make_inputs,
    shapes=[{"points": 20000, "queries": 2000}, {"points": 2000, "queries": 2000}],
    metrics={"queries/us": lambda call: len(call.arguments["queries"]) / call.us},
)
def nearest(
    points: Array,
    queries: Array,
    *,
    leafsize: int = 16,
    compact_nodes: bool = True,
    balanced_tree: bool = True,
    workers: int = 1,
) -> Array:
    """The distance of each query to the nearest of the points; SciPy's own defaults."""
    tree = KDTree(points, leafsize, compact_nodes=compact_nodes, balanced_tree=balanced_tree)
    distances: Array = tree.query(queries, workers=workers)[0]
    return distances
