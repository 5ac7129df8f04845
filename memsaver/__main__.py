"""Run the command ``memsaver`` as ``python -m memsaver``."""

import sys

from memsaver.system.hidden_packages import refuse_hidden

refuse_hidden("recipes")
from recipes.cli import main

sys.exit(main())
