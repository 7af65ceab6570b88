"""The data sets of the experiments: where they are, how they get there, and how they are read."""

from aida_lab.data.errors import DataError
from aida_lab.data.root import data_root
from aida_lab.data.sets import SETS, DataSet, find

__all__ = ["SETS", "DataError", "DataSet", "data_root", "find"]
