"""One paper, one file. A mechanism imports kernels, never another mechanism."""
