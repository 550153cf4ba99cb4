"""`python -m peagle.cli`, the same as `peagle`."""

import sys

from peagle.cli.app import main

sys.exit(main())
