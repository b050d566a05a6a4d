"""The forms of a graph: simplified, canonical, cut into unconnected parts, and that of its family."""
