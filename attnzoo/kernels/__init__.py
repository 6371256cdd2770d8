"""Pure functions on [B, H, T, D] tensors, without state."""
