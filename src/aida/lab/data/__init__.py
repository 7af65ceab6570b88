"""The data sets of the experiments: where they are, how they get there, and how they are read."""

from aida.lab.data.errors import DataError
from aida.lab.data.root import data_root
from aida.lab.data.sets import SETS, DataSet, find

__all__ = ["SETS", "DataError", "DataSet", "data_root", "find"]
