"""The paper's theory, evaluated: what eps does, what projections do, and what Theorem 1 is worth.

Read ``epsilon`` and ``projections`` for the two mechanisms, ``bounds`` for the theorem and its gap,
and docs/theory.md for what came out. ``study.run()`` measures everything, ``figure.draw`` draws it.
"""
