"""How CUDA kernels find, read and write the elements of tensors."""
