"""Private: everything in a step of :class:`aida.Aida` but the arithmetic."""
