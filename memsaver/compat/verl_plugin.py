"""Plugin that verl imports in each of its processes (entry point ``verl.plugins``).

It does nothing unless ``VERL_ENGINE_VENDOR``, verl's own variable, is ``memsaver``. Like the
command ``memsaver``, it stands above all packages.
"""

import logging
import os

NAME = "memsaver"

if os.environ.get("VERL_ENGINE_VENDOR") == NAME:
    try:
        from trainer_bridge.adoption.verl import register

        register(NAME)
    except Exception:  # verl itself reports it at level DEBUG only
        logging.getLogger(__name__).exception("memsaver could not register with verl")
        raise
