"""Run the command ``memsaver`` as ``python -m memsaver``."""

import sys

from recipes.cli import main

sys.exit(main())
