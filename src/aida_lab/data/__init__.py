"""The data sets of the experiments: declarations, download and import, checks, and readers."""

from aida_lab.data.local import DataError, data_root

__all__ = ["DataError", "data_root"]
