"""Tensors over memory at an address, by DLPack: torch takes the device as it is told, and tells
when they are dead.

The structures are those of the DLPack standard, version 0 (dmlc/dlpack, include/dlpack/dlpack.h).
"""

from __future__ import annotations

import ctypes

import torch

from memsaver.common.signals import held
from memsaver.native import shim

_CPU, _CUDA, _UINT = 1, 2, 1


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


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_keep = ctypes.pythonapi.Py_IncRef
_keep.restype, _keep.argtypes = None, [ctypes.py_object]


def tensor(address: int, nbytes: int, device: torch.device, keeper: object) -> torch.Tensor:
    """uint8 tensor ``[nbytes]`` at an address, said to be on ``device``; it keeps ``keeper``."""
    shape, strides = (ctypes.c_int64 * 1)(nbytes), (ctypes.c_int64 * 1)(1)
    kind, index = (_CUDA, device.index) if device.type == "cuda" else (_CPU, 0)
    managed = _Managed(_Tensor(address, kind, index, 1, _UINT, 8, 1, shape, strides, 0), None, None)
    kept = managed, shape, strides, keeper
    managed.context = id(kept)
    managed.deleter = ctypes.cast(shim.library().ms_dlpack_delete, ctypes.c_void_p)
    with held():  # from here on the tensor's, which lets go of it
        _keep(kept)
        return torch.utils.dlpack.from_dlpack(
            _capsule(ctypes.addressof(managed), b"dltensor", None)
        )
