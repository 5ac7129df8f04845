"""``python -m memsaver.doctor``."""

import sys

from memsaver.doctor.printing import main

if __name__ == "__main__":
    sys.exit(main())
