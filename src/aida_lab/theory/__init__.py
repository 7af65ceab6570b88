"""Numerical checks of the paper's theory: the effect of eps, the projections, and Theorem 1.

``epsilon`` and ``projections`` explain the two mechanisms, ``bounds`` the theorem and the gap in its proof.
``study.run()`` measures everything, ``figure.draw`` draws it, and docs/theory.md reports the results.
"""
