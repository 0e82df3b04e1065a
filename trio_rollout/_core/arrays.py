"""Read-only numpy arrays: 4 bytes a token, shared between tasks without copies because they can't be written to."""

import reprlib
from array import array
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

IdArray: TypeAlias = npt.NDArray[np.int32]
"""Token ids."""
FloatArray: TypeAlias = npt.NDArray[np.float32]
"""Log-probs, in nats."""
MaskArray: TypeAlias = npt.NDArray[np.uint8]
"""1 where a token is trained, 0 where it is not."""

ID_MAX = 2**31 - 1
# Compared with a type, a dtype is made of it each time; compared with itself it costs nothing.
_IDS: Final = np.dtype(np.int32)
_FLOATS: Final = np.dtype(np.float32)
_MASK: Final = np.dtype(np.uint8)


class _Brief(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80
        self.maxlevel = 3

    def repr_ndarray(self, value: npt.NDArray[Any], _level: int) -> str:
        return f"<{' x '.join(map(str, value.shape))} {value.dtype}>"


def brief(value: object) -> str:
    """Return a value's text for a repr, which a log line can hold: arrays as their size, long texts and lists cut off."""
    return _Brief().repr(value)


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    base = array.base
    if not array.flags.writeable and not (isinstance(base, np.ndarray) and base.flags.writeable):
        return array
    if base is not None or not array.flags.owndata:
        array = array.copy()  # the caller may still hold the writable original
    array.flags.writeable = False
    return array


def id_array(ids: Sequence[int] | npt.NDArray[Any]) -> IdArray:
    """Return token ids as a read-only int32 array.

    Raises:
      TypeError: an element is not an integer.
      ValueError: an element is negative or does not fit 31 bits, or the input is not one-dimensional.
    """
    if isinstance(ids, np.ndarray) and ids.dtype == _IDS and ids.ndim == 1:
        return _frozen(ids)
    if type(ids) is list and (quick := _quickly(ids)) is not None:
        return quick
    wide = np.asarray(ids)
    if wide.ndim != 1:
        raise ValueError(f"token ids must be one flat sequence, got {wide.ndim} dimensions")
    if wide.size == 0:
        return _frozen(np.empty(0, np.int32))
    if wide.dtype.kind not in "iu":
        raise TypeError(f"token ids must be integers, got values of type {wide.dtype}")
    low, high = int(wide.min()), int(wide.max())
    if low < 0 or high > ID_MAX:
        raise ValueError(f"token ids must lie in 0..{ID_MAX}, got {low if low < 0 else high}")
    return _frozen(wide.astype(np.int32))


def _quickly(ids: list[int]) -> IdArray | None:
    """Return the array of a list of token ids, in a quarter of the time of ``numpy.asarray``; None if other values may be in it."""
    if ids and type(ids[0]) is not int:
        return None
    try:
        found = np.frombuffer(bytes(array("i", ids)), _IDS)
    except (TypeError, OverflowError):
        return None
    return None if len(found) and int(found.min()) < 0 else found


def float_array(values: Sequence[float] | npt.NDArray[Any]) -> FloatArray:
    """Return floats as a read-only float32 array."""
    if isinstance(values, np.ndarray):
        return _frozen(values if values.dtype == _FLOATS else values.astype(_FLOATS))
    return _frozen(np.array(values, _FLOATS))


def mask_array(values: Sequence[int] | Sequence[bool] | npt.NDArray[Any]) -> MaskArray:
    """Return a mask of 0 and 1 as a read-only uint8 array."""
    if isinstance(values, np.ndarray):
        return _frozen(values if values.dtype == _MASK else values.astype(_MASK))
    return _frozen(np.array(values, _MASK))
