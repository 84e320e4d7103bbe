"""Quantized checkpoints: which matrices are quantized and how (`config`), which tensors each then has
(`weight_format`), and how these become the layouts of `kernels.quantized` (`convert`, which alone imports torch)."""
