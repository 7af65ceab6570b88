"""The hyper-parameters of all groups, read and checked again only if one changed."""

from __future__ import annotations

from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import Tensor

from aida._step.hyper import FLAG_KEYS, HYPER_KEYS, Hyper, check_group, from_group
from aida._step.layers import LAYER_KEYS
from aida._step.storage import STORAGE_KEYS

_lr = itemgetter("lr")
_keys = (*HYPER_KEYS[1:], *LAYER_KEYS, *STORAGE_KEYS, *FLAG_KEYS)
_others = itemgetter(*_keys)


class HyperCache:
    """One :class:`Hyper` per parameter group, with numbers that tell whether anything changed."""

    def __init__(self) -> None:
        self.values: list[Hyper] = []
        self.clips = False  #: whether a group clips
        self.generation = 0  #: changes if a value changes
        self.paths_generation = 0  #: changes if a value changes that may select another path: any but lr
        self._lrs: list[float | Tensor] = []
        self._rest: list[tuple[Any, ...]] = []
        self._held: list[Any] = []
        self._may_change_in_place = False

    def update(self, groups: list[dict[str, Any]]) -> None:
        """Read the groups again if they changed since the last call. A value that is not valid raises."""
        lrs = list(map(_lr, groups))
        # all values of all groups in one list: with hundreds of groups, picking keys takes a fifth of a step
        held = list(chain.from_iterable(map(dict.values, groups)))
        # lr by identity: a tensor may replace a float of the same value, and change in place later
        if (
            not self._may_change_in_place
            and len(groups) == len(self.values)
            and all(map(is_, lrs, self._lrs))
            and _equal(held, self._held)
        ):
            return
        rest = list(map(_read_others, groups))
        values: list[Hyper] = []
        for index, group in enumerate(groups):
            known = index < len(self.values)
            if known and lrs[index] is self._lrs[index] and rest[index] == self._rest[index]:
                values.append(self.values[index])
                continue
            check_group(group, added=False)
            values.append(from_group(group))
        if len(values) != len(self.values) or not all(map(is_, values, self.values)):
            self.generation += 1
        if rest != self._rest:
            self.paths_generation += 1
        self.values, self._lrs, self._rest, self._held = values, lrs, rest, held
        self._may_change_in_place = any(_is_mutable(group["betas"]) for group in groups)
        self.clips = any(hyper.clip_norm is not None for hyper in values)


def _read_others(group: dict[str, Any]) -> tuple[Any, ...]:
    betas, *rest = _others(group)
    return (tuple(betas) if _is_mutable(betas) else betas, *rest)


def _is_mutable(betas: Any) -> bool:
    """Whether betas are in a list or an array, which may change in place."""
    return hasattr(betas, "__setitem__")


def _equal(one: list[Any], other: list[Any]) -> bool:
    try:
        return one == other
    except (RuntimeError, ValueError):  # a new tensor or array in a group: comparing it gives no single bool
        return False
