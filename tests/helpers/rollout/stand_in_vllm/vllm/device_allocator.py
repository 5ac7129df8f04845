from typing import Any

instance: Any = None


def get_mem_allocator_instance() -> Any:
    return instance
