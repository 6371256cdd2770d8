"""Re-measures the figures of docs/RESULTS.md."""
