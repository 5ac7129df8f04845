import functools
import pkgutil
from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar


class HookType(Enum):
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    waiting: ClassVar[list[tuple[str, Any, HookType]]] = []

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
        cls.waiting.append((target, hook, hook_type))

    @classmethod
    def apply_hooks(cls) -> None:
        while cls.waiting:
            target, hook, kind = cls.waiting.pop(0)
            place, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(place)
            if kind is HookType.AROUND:
                assert isinstance(owner.__dict__[name], staticmethod)
                hook = staticmethod(functools.partial(hook, getattr(owner, name)))
            setattr(owner, name, hook)
