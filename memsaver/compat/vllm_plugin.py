"""Plugin that vLLM loads in each of its processes (entry point ``vllm.general_plugins``).

It does nothing unless ``VLLM_PLUGINS``, vLLM's own variable, names it: ``VLLM_PLUGINS=memsaver``.
"""

import importlib
import importlib.util
import os

import memsaver.compat

NAME = "memsaver"
_BACKENDS = "vllm.device_allocator.sleep_mode_backend"  # not in 0.24


def register() -> None:
    """Place vLLM's memory on tags: weights, KV cache and, from 0.33 on, the graphs' pool.

    Further calls have no effect. From 0.33 on, ``sleep_mode_backend="memsaver"`` is another name
    for ``cumem``. If vLLM's own allocator is imported already, the call raises ``StateError``.
    """
    if NAME not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    memsaver.compat.install("vllm.device_allocator.cumem")
    if importlib.util.find_spec(_BACKENDS) is not None:
        factory = importlib.import_module(_BACKENDS).SleepModeBackendFactory
        try:
            factory.get_backend_class(NAME)
        except ValueError:  # not registered yet
            factory.register_backend(NAME, _BACKENDS, "CuMemBackend")
