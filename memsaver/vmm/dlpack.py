"""Tensors over GPU memory at an address, by DLPack: torch takes the device as it is told, and tells when they are dead.

The structures are those of the DLPack standard, version 0 (dmlc/dlpack, include/dlpack/dlpack.h).
"""

from __future__ import annotations

import ctypes

import torch

_CUDA, _UINT = 2, 1


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_alive: dict[int, tuple[_Managed, object, object]] = {}
"""By address of the structure: it, its arrays, and what the tensor keeps alive."""


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(managed: int, alive: dict = _alive) -> None:  # bound: at the interpreter's end globals go first
    alive.pop(managed, None)


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def tensor(address: int, nbytes: int, index: int, keeper: object) -> torch.Tensor:
    """uint8 tensor ``[nbytes]`` at an address, said to be on GPU ``index``, whose storage keeps ``keeper`` alive."""
    shape, strides = (ctypes.c_int64 * 1)(nbytes), (ctypes.c_int64 * 1)(1)
    managed = _Managed(_Tensor(address, _CUDA, index, 1, _UINT, 8, 1, shape, strides, 0), None, None)
    managed.deleter = ctypes.cast(_delete, ctypes.c_void_p)
    at = ctypes.addressof(managed)
    _alive[at] = managed, (shape, strides), keeper
    return torch.utils.dlpack.from_dlpack(_capsule(at, b"dltensor", None))
