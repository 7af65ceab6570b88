"""Aida in other libraries. Import a module by name; each needs its library."""
