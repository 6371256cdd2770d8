"""Comparing: sweeps over mechanisms and options, a table of runs, and a page that shows them side by side."""
