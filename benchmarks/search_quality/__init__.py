"""Quality of the search in completely measured spaces: autotune's, and those of other kernels."""
