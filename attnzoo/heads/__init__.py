"""Heads: how alike they are, how they fare, how they are begun anew.

``diversity`` is a loss; ``health`` measures, ``degenerate`` judges, ``reinit`` and ``prune`` act.

Nothing is imported here: blocks import ``diversity``, and what examines heads imports blocks.
"""
