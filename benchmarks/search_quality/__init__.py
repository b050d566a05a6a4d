"""How good the search is, in spaces that were measured whole: ours, and those of other people's kernels."""
