"""Linear layers: fused kernels, float8 and low-rank updates."""
