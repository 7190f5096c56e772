"""`python -m namm` is the `namm` command."""

import sys

from namm.cli import main

sys.exit(main())
