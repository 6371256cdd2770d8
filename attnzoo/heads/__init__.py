"""Heads: how alike they are, how they fare, how they are begun anew.

Nothing is imported here: blocks import ``diversity``, and what examines heads imports blocks.
"""
