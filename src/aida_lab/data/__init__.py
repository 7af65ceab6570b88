"""The data sets of the experiments: declarations, download and import, checks, and readers."""

from aida_lab.data.local import DataError, data_root
from aida_lab.data.sets import SETS, DataSet, find

__all__ = ["SETS", "DataError", "DataSet", "data_root", "find"]
