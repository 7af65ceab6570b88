"""The one place that holds the version; it imports nothing, so that building needs no torch."""

__version__ = "0.1.0"
